"""A program for `fastrt run --jax`, without JAX."""

# Each node's task is the JAX process of its rank; the agent speaks jaxlib's protocol.
MEMBERS = """
import os, sys
import fastrt

@fastrt.remote
def member():
    from fastrt.coordination import connect
    rank = int(os.environ["JAX_PROCESS_ID"])
    with connect(os.environ["JAX_COORDINATOR_ADDRESS"], rank) as agent:
        agent.set(f"at/{rank}", "x" * 300_000)
        agent.barrier("all")
        return rank, os.environ["JAX_NUM_PROCESSES"], len(agent.get_dir("at"))

with fastrt.init():
    nodes = sorted(fastrt.nodes(), key=lambda node: not node["IsHere"])
    found = fastrt.get([member.options(scheduling=node["NodeID"]).remote() for node in nodes])
print(sorted(found), os.environ["JAX_PROCESS_ID"], os.environ["JAX_COORDINATOR_BIND_ADDRESS"])
"""
