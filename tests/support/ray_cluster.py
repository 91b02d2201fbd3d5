"""A Ray cluster on this machine, for programs that want one.

Run, by a Python that has Ray: python ray_cluster.py PROGRAM [ARGUMENTS] [+ PROGRAM [ARGUMENTS] ...]

A program's arguments may say ADDRESS for the cluster's.
"""

import os
import runpy
import sys
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or Ray warns
# Also for Ray's workers, which inherit it: they import what programs here import from beside them.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(sys.argv[1]).parent), *sys.path[1:]])


def main(*words):
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
        cluster.wait_for_nodes()
        for program in " ".join(words).replace("ADDRESS", cluster.address).split(" + "):
            sys.argv = program.split()
            sys.path[0] = str(Path(sys.argv[0]).parent)
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as exc:
                if exc.code:
                    raise
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
