"""`fastrt run --jax` with real JAX: a task of each rank's node is the JAX process of that rank."""

import os
import subprocess

from support.cluster import FASTRT
from support.jax_envs import python_of

VERSION = "0.10.2"
JAX = """
import os, sys
import jax, jax.numpy as jnp, numpy as np

jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, size = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
jax.distributed.initialize(num_processes=size, process_id=rank)
mesh = jax.make_mesh((size,), ("process",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
local = np.arange(4, dtype=np.int32) + 4 * rank
print(int(jax.jit(jnp.sum)(jax.make_array_from_process_local_data(sharding, local))))
jax.distributed.shutdown()
"""
APP = """
import subprocess, sys
import fastrt

@fastrt.remote
def member(python, program):
    ended = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return (ended.stdout or ended.stderr).splitlines()[-1]

with fastrt.init():
    nodes = [node["NodeID"] for node in fastrt.nodes()]
    print(fastrt.get([member.options(scheduling=node).remote(*sys.argv[1:]) for node in nodes]))
"""


def test_jax_of_two_ranks_sums_over_both(runtime_dir, tmp_path):
    app = tmp_path / "app.py"
    app.write_text(APP)
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_KEY_FILE": str(tmp_path / "keys" / "key")}
    env |= {"FASTRT_OBJECT_STORE_MEMORY": "64MiB", "FASTRT_SPILL_DIR": str(tmp_path / "spill")}
    words = ["run", "--jax", "--size", "2", "--head", "127.0.0.1", "--job", "jax", "--num-workers", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    ranks = []
    try:
        for rank in range(2):
            command = [*FASTRT, *words, "--rank", str(rank), str(app), str(python_of(VERSION)), JAX]
            ranks.append(subprocess.Popen(command, **pipes))
        out, err = ranks[0].communicate(timeout=60)
        assert (ranks[0].returncode, out) == (0, "['28', '28']\n"), err
        assert ranks[1].communicate(timeout=20)[0] == ""
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()
