"""Programs for `fastrt run --jax` with real JAX: a process of a rank, and the program that starts these processes."""

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
