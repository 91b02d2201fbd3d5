"""Small tasks submitted on one node and run on another: two nodes of fastrt on this machine beside two of Ray.

Run: python bench/compare_two_nodes.py [--rounds 7] [--ray-python PYTHON]

Each round takes both in turn; the ratio is the median of the ratios within a round. Every result is derived from the
argument and names the node that made it, and both are checked: only values made on the other node count.
PYTHON (default: this one) has Ray, and starts its two nodes by `ray.cluster_utils.Cluster`; the first has no CPU, so
that everything runs on the second, as the first of fastrt has no workers. References are released within the time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
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

IN_FLIGHT = 1000
WORKERS = 2
REQUIRED = 10.0
WIDTH = 110
# Reads a number from standard input, submits so many tasks, checks their results, and writes the seconds.
WORK = """
import sys, time
FIRST = 1 << 40
def measure(submit, get, here, there, count, first):
    start = time.perf_counter()
    refs = [submit(k) for k in range(first, first + count)]
    values = get(refs)
    del refs
    seconds = time.perf_counter() - start
    assert values == [(3 * k + 1, there) for k in range(first, first + count)], (values[:2], there)
    assert here != there
    return seconds
def serve(*how):
    first = FIRST
    for line in sys.stdin:
        count = int(line)
        print(measure(*how, count, first), flush=True)
        first += count
"""
FASTRT = """
import fastrt
@fastrt.remote
def work(x):
    from fastrt.store import client
    return 3 * x + 1, client.require().client.segment.session
with fastrt.init(address="auto") as runtime:
    there = fastrt.get(work.remote(0))[1]
    serve(work.remote, fastrt.get, runtime.session, there)
"""
RAY = """
import logging, os
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=0, include_dashboard=False)
cluster.add_node(num_cpus=WORKERS)
cluster.wait_for_nodes()
ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
@ray.remote
def work(x):
    return 3 * x + 1, ray.get_runtime_context().get_node_id()
there = ray.get(work.remote(0))[1]
serve(work.remote, ray.get, ray.get_runtime_context().get_node_id(), there)
ray.shutdown()
cluster.shutdown()
"""


class Side:
    """A driver in a process of its own, which measures on request.

    Args:
        python: which Python.
        code: of the driver.
        stack: ends the process when it is closed.
        env: variables beside this process's own.
    """

    def __init__(self, python: str, code: str, stack: ExitStack, **env: str) -> None:
        program = f"WORKERS = {WORKERS}\n{WORK}\n{code}"
        self._process = subprocess.Popen(
            [python, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        stack.callback(self._end)

    def __call__(self, count: int) -> float:
        """Run so many tasks, all in flight at once; returns the seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            try:
                return float(line)
            except ValueError:
                continue  # Ray's own messages
        raise click.ClickException("a driver ended; see above")

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_fastrt(stack: ExitStack) -> Side:
    """Two nodes, the first without workers, and a driver at the first."""
    head, start, env = cluster(stack, "256MiB")
    start("--num-workers", str(WORKERS), "--name", "second")
    return Side(sys.executable, FASTRT.replace('"auto"', repr(head)), stack, **env)


@click.command()
@click.option("--rounds", default=7, show_default=True, help="How often each is run, after once to warm up.")
@click.option("--count", default=IN_FLIGHT, show_default=True, help="Tasks in flight.")
@click.option("--ray-python", default=sys.executable, help="A Python that has Ray.")
def main(rounds: int, count: int, ray_python: str) -> None:
    """Measure, print the rates, and judge the required ratio."""
    with ExitStack() as stack:
        sides: dict[str, Callable[[int], float]] = {"fastrt": start_fastrt(stack)}
        has_ray = [ray_python, "-c", "import ray.cluster_utils"]
        if shutil.which(ray_python) and subprocess.run(has_ray, capture_output=True).returncode == 0:
            sides["Ray"] = Side(ray_python, RAY, stack, PYTHONPATH="")
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for round_ in range(rounds + 1):
            for name, run in sides.items():
                seconds = run(count)
                if round_:
                    rates[name].append(count / seconds)
    missed = show(rates, count)
    if missed:
        raise SystemExit(1)


def show(rates: dict[str, list[float]], count: int) -> bool:
    """Print a table.

    Returns:
        Whether the required ratio was missed.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(title=f"tasks submitted on one node and run on another, {count:,} in flight", box=box.SIMPLE)
    for name in ("", "tasks/s, median", "least", "most"):
        table.add_column(name, justify="left" if not name else "right")
    for name, found in rates.items():
        table.add_row(name, *(f"{value:,.0f}" for value in (statistics.median(found), min(found), max(found))))
    console.print(table)
    if "Ray" not in rates:
        console.print("Ray is not here: nothing to compare with (--ray-python)")
        return False
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["fastrt"], rates["Ray"], strict=True))
    reached = ratio >= REQUIRED
    console.print(f"{ratio:.1f} x Ray; {REQUIRED:g} x is required: {'reached' if reached else 'MISSED'}")
    return not reached


if __name__ == "__main__":
    main()
