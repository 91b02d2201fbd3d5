"""Data that is made and used on other nodes: what passes through the driver's node, and how long it takes beside Ray.

Run: python bench/compare_locality.py [--rounds 3] [--gigabytes 4] [--ray-python PYTHON] [WORKLOAD...]

All nodes are on this machine; the driver's node has no workers. Each round takes both systems in turn, in new clusters;
the ratio is the median of the ratios within a round. Every workload checks its result.

  sums       16 arrays of 50 MB, made and summed by tasks on two nodes, and never read by the driver
  shuffle    PARTS x PARTS pieces between three nodes: each task of the second step takes a piece of each of the first
  partition  the same, with random numbers by their remainders: most of its time is NumPy's, with either system
  broadcast  one array of a gigabyte, an argument of a task on each of four nodes; `one` is the same on one node
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # also as a part of fastrt.bench

from nodes import cluster  # noqa: E402

WIDTH = 110
NODES = {"sums": 2, "shuffle": 3, "partition": 3, "one": 1, "broadcast": 4}
PATIENCE_S = 600
# Needs: remote, put, get, on(function, k) (the function on node k), stored() (bytes in the driver's node), NODES.
WORK = """
import sys, threading, time
import numpy as np
def sums(gigabytes):
    made = [make.remote(k, 6_250_000) for k in range(16)]
    found = get([total.remote(one) for one in made])
    assert found == [k * 6_250_000 for k in range(16)]
def shuffle(gigabytes, parts=64):
    count = int(gigabytes * 1e9 / 8 / parts / parts)
    pieces = [several(cut, parts).remote(k, parts, count) for k in range(parts)]
    found = get([add.remote(*[row[j] for row in pieces]) for j in range(parts)])
    assert found == [sum(range(j * parts, (j + 1) * parts)) * count for j in range(parts)]
def partition(gigabytes, parts=64):
    count = int(gigabytes * 1e9 / 8 / parts)
    pieces = [several(split, parts).remote(k, parts, count) for k in range(parts)]
    found = get([merge.remote(j, *[row[j] for row in pieces]) for j in range(parts)])
    assert sum(found) == parts * count
def one(gigabytes):
    broadcast(gigabytes, 1)
def broadcast(gigabytes, nodes=4):
    large = put(np.full(125_000_000, 1.0))
    assert get([on(total, k).remote(large) for k in range(nodes)]) == [125_000_000] * nodes
def make(k, count):
    return np.full(count, float(k))
def total(array):
    return int(array.sum())
def cut(k, parts, count):
    return [np.full(count, j * parts + k) for j in range(parts)]
def add(*pieces):
    return sum(int(piece.sum()) for piece in pieces)
def split(k, parts, count):
    data = np.random.default_rng(k).integers(0, 1 << 62, count, dtype=np.int64)
    which = (data % parts).astype(np.uint8)  # NumPy sorts bytes by radix: little of the time is the program's own
    order = np.argsort(which, kind="stable")
    return np.split(data[order], np.searchsorted(which[order], np.arange(1, parts)))
def merge(j, *pieces):
    assert all((piece % len(pieces) == j).all() for piece in pieces[:2])
    return sum(len(piece) for piece in pieces)
"""
RUN = """
most, done = 0, threading.Event()
def watch():
    global most
    while not done.wait(0.02):
        most = max(most, stored())
thread = threading.Thread(target=watch)
thread.start()
get([on(total, k).remote(np.ones(10)) for k in range(NODES)])
start = time.perf_counter()
globals()[WORKLOAD](GIGABYTES)
seconds = time.perf_counter() - start
done.set()
thread.join()
print("found", seconds, most, flush=True)
"""
FASTRT = """
import fastrt
from fastrt._core.memory import arena
from fastrt.store import client
make, total, cut, add, split, merge = map(fastrt.remote, (make, total, cut, add, split, merge))
get, put = fastrt.get, fastrt.put
several = lambda function, count: function.options(num_returns=count)
on = lambda function, k: function.options(scheduling=f"node{k}")
stored = lambda: arena.room(client.require().client)[0]
with fastrt.init(address=HEAD):
    exec(RUN)
"""
RAY = """
import logging, os
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At
cluster = Cluster()
cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=STORE)
nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE) for _ in range(NODES)]
cluster.wait_for_nodes()
ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
make, total, cut, add, split, merge = map(ray.remote, (make, total, cut, add, split, merge))
get, put = ray.get, ray.put
several = lambda function, count: function.options(num_returns=count)
on = lambda function, k: function.options(scheduling_strategy=At(nodes[k].node_id, soft=False))
stored = lambda: 0
exec(RUN)
ray.shutdown()
cluster.shutdown()
"""


def program(workload: str, gigabytes: float, body: str, **names: object) -> str:
    """The driver of one system for one workload."""
    given = {"WORKLOAD": workload, "GIGABYTES": gigabytes, "NODES": NODES[workload], "RUN": RUN, **names}
    return "".join(f"{name} = {value!r}\n" for name, value in given.items()) + WORK + body


def run(python: str, code: str, **env: str) -> tuple[float, int]:
    """Run a driver; returns the seconds and the most bytes in its node's store."""
    words = [python, "-c", code]
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, timeout=PATIENCE_S)
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            _, seconds, most = line.split()
            return float(seconds), int(most)
    raise click.ClickException(f"a driver ended:\n{done.stdout}{done.stderr}")


def run_fastrt(workload: str, gigabytes: float, store: int) -> tuple[float, int]:
    """Start a cluster of fastrt, and run the workload in it."""
    with ExitStack() as stack:
        head, start, env = cluster(stack, str(store))
        for k in range(NODES[workload]):
            start("--num-workers", "2", "--name", f"node{k}")
        return run(sys.executable, program(workload, gigabytes, FASTRT, HEAD=head), **env)


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--gigabytes", default=4.0, show_default=True, help="Data of the shuffle.")
@click.option("--store", default=4 << 30, show_default=True, help="Bytes of each node's store.")
@click.option("--ray-python", default="", help="A Python that has Ray.")
@click.argument("workloads", nargs=-1, type=click.Choice(list(NODES)))
def main(rounds: int, gigabytes: float, store: int, ray_python: str, workloads: tuple[str, ...]) -> None:
    """Measure, and print the medians."""
    table = Table(title="data made and used on other nodes, medians", box=box.SIMPLE)
    for name in ("", "fastrt s", "Ray s", "x Ray", "MB in the driver's store"):
        table.add_column(name, justify="left" if not name else "right")
    for workload in workloads or NODES:
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(run_fastrt(workload, gigabytes, store))
            if ray_python:
                code = program(workload, gigabytes, RAY, STORE=store)
                theirs.append(run(ray_python, code, PYTHONPATH="")[0])
        seconds = statistics.median(one for one, _ in ours)
        ratios = [ray / own for (own, _), ray in zip(ours, theirs, strict=False)]
        row = [f"{statistics.median(values):.2f}" if values else "" for values in (theirs, ratios)]
        table.add_row(workload, f"{seconds:.2f}", *row, f"{max(most for _, most in ours) / 1e6:.1f}")
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


if __name__ == "__main__":
    main()
