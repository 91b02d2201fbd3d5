"""Two nodes of Ray on this machine, and large values that go from one to the other: a program of its own.

`compare_transfer.py` runs its text in a Python that has Ray and NumPy, with the values' size as the argument. For each
line of standard input a task on the second node makes a value. Once it exists the driver on the first fetches it, and
writes the seconds of the fetch.
"""

from __future__ import annotations

import logging
import os
import sys
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
from ray.cluster_utils import Cluster

_ROOM = 3  # values a node's store has room for


@ray.remote
def make(nbytes: int, seed: int) -> np.ndarray:
    """A value whose ends identify its maker."""
    value = np.zeros(nbytes, np.uint8)
    value[0] = value[-1] = seed
    return value


def fetch(nbytes: int, seed: int) -> float:
    """Have a value made on the other node, and fetch it; returns the seconds of the fetch."""
    ref = make.remote(nbytes, seed)
    ray.wait([ref], fetch_local=False)
    start = time.perf_counter()
    value = ray.get(ref)
    seconds = time.perf_counter() - start
    assert value.nbytes == nbytes
    assert value[0] == value[-1] == seed
    return seconds


def main(nbytes: int) -> None:
    """Serve until standard input ends."""
    cluster = Cluster()
    room = _ROOM * nbytes + (256 << 20)
    cluster.add_node(num_cpus=0, object_store_memory=room, include_dashboard=False)
    cluster.add_node(num_cpus=1, object_store_memory=room)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for turn, _ in enumerate(sys.stdin):
            sys.stdout.write(f"{fetch(nbytes, turn % 251 + 1)}\n")
            sys.stdout.flush()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
