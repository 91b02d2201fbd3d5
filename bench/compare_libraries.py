"""The interfaces of other libraries over fastrt beside those libraries, alternating in one run.

    python bench/compare_libraries.py [--rounds 7] [--ray-python PYTHON]

Two workers each. The figure that counts is the median of the ratios within a round; the results of every round
are checked. A peer that is not installed is left out. PYTHON has Ray, whose queue is measured in a process of its own:
its rate does not change between rounds by more than the others' ratios do.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import math
import multiprocessing
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fastrt
from fastrt.util import Pool, Queue

CALLS = 10_000
ONE_BY_ONE = 1000
MESSAGES = 50_000
MESSAGE = bytes(1024)
CHUNK_COUNT = 10  # a Dask array of 10 x 10 chunks
SHARED = np.ones(10_000_000)  # 80 MB, an argument of every call
SHARED_CALLS = 200
RAY = """
import sys, time, ray
from ray.util.queue import Queue
ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
@ray.remote
def produce(queue, count):
    for _ in range(count):
        queue.put(bytes(1024))
queue, count = Queue(), 2000
ray.get(produce.remote(queue, 10))
for _ in range(10): queue.get()
start = time.perf_counter()
ref = produce.remote(queue, count)
for _ in range(count): queue.get()
print(count / (time.perf_counter() - start))
"""
FORK = multiprocessing.get_context("fork")  # the default before Python 3.14
Work = Callable[[], Any]
# (title, operations, fastrt's, {peer: its}, (peer with a required ratio, factor))
Row = tuple[str, int, Work, dict[str, Work], tuple[str, float] | None]


def square(x: int) -> int:
    """The work of a small call."""
    return x * x


def total_of(array: Any, k: int) -> float:
    """The work of a call on the shared array."""
    return float(array[k])


def produce(queue: Any, count: int) -> None:
    """Put messages."""
    for _ in range(count):
        queue.put(MESSAGE)


SQUARES = [k * k for k in range(CALLS)]


def checked(values: list[Any], expected: list[Any]) -> None:
    """Compare results.

    Raises:
        AssertionError: they are wrong.
    """
    if values != expected:
        raise AssertionError(f"{len(values)} results, and they differ from the expected ones")


def executors() -> Iterator[Row]:
    ours, theirs = fastrt.Executor(2), concurrent.futures.ProcessPoolExecutor(2, mp_context=FORK)

    def mapped(executor: Any) -> None:
        checked(list(executor.map(square, range(CALLS))), SQUARES)

    def submitted(executor: Any) -> None:
        checked([f.result() for f in [executor.submit(square, k) for k in range(CALLS)]], SQUARES)

    def one_by_one(executor: Any) -> None:
        checked([executor.submit(square, k).result() for k in range(ONE_BY_ONE)], SQUARES[:ONE_BY_ONE])

    for title, count, work, required in (
        (f"Executor.map of {CALLS:,} small calls", CALLS, mapped, ("ProcessPoolExecutor", 10.0)),
        (f"Executor.submit of {CALLS:,}", CALLS, submitted, None),
        ("submit and result, one at a time", ONE_BY_ONE, one_by_one, None),
    ):
        yield title, count, lambda w=work: w(ours), {"ProcessPoolExecutor": lambda w=work: w(theirs)}, required
    theirs.shutdown()


def pools() -> Iterator[Row]:
    with Pool(2) as ours, FORK.Pool(2) as theirs:
        for title, count, call in (
            (f"Pool.map of {CALLS:,}", CALLS, lambda pool: pool.map(square, range(CALLS))),
            (f"Pool.imap of {CALLS:,}", CALLS, lambda pool: list(pool.imap(square, range(CALLS)))),
        ):
            yield (
                title, count, lambda c=call: checked(c(ours), SQUARES),
                {"multiprocessing": lambda c=call: checked(c(theirs), SQUARES)}, None,
            )  # fmt: skip


def parallels() -> Iterator[Row]:
    joblib = importlib.import_module("joblib")
    importlib.import_module("fastrt.joblib").register()
    roots = [math.sqrt(k) for k in range(CALLS)]

    def small(backend: str) -> None:
        with joblib.parallel_config(backend=backend, n_jobs=2):
            checked(joblib.Parallel()(joblib.delayed(math.sqrt)(k) for k in range(CALLS)), roots)

    def shared(backend: str) -> None:
        with joblib.parallel_config(backend=backend, n_jobs=2):
            found = joblib.Parallel()(joblib.delayed(total_of)(SHARED, k) for k in range(SHARED_CALLS))
        checked(found, [1.0] * SHARED_CALLS)

    title = f"joblib.Parallel of {CALLS:,} small calls"
    yield title, CALLS, lambda: small("fastrt"), {"loky": lambda: small("loky")}, ("loky", 3.0)
    title = f"joblib.Parallel, {SHARED_CALLS} calls with one 80 MB array"
    yield title, SHARED_CALLS, lambda: shared("fastrt"), {"loky": lambda: shared("loky")}, None


def graphs() -> Iterator[Row]:
    dask, array = importlib.import_module("dask"), importlib.import_module("dask.array")
    get = importlib.import_module("fastrt.dask").get
    side = 100 * CHUNK_COUNT
    lazy = array.ones((side, side), chunks=100)
    lazy = (lazy + lazy.T).sum(axis=0)
    count = len(lazy.__dask_graph__())

    def compute(scheduler: Any) -> None:
        with dask.config.set(scheduler=scheduler, num_workers=2):
            checked(lazy.compute().tolist(), [2.0 * side] * side)

    peers = {"Dask, processes": lambda: compute("processes"), "Dask, threads": lambda: compute("threads")}
    yield f"a Dask array of {count:,} tasks", count, lambda: compute(get), peers, None


def queues() -> Iterator[Row]:
    ours, theirs = Queue(), FORK.Queue()
    remote = fastrt.remote(produce)

    def on_fastrt() -> None:
        ref = remote.remote(ours, MESSAGES)
        checked([ours.get() for _ in range(MESSAGES)][-1:], [MESSAGE])
        fastrt.get(ref)

    def on_multiprocessing() -> None:
        process = FORK.Process(target=produce, args=(theirs, MESSAGES))
        process.start()
        checked([theirs.get() for _ in range(MESSAGES)][-1:], [MESSAGE])
        process.join()

    yield (
        f"Queue, {MESSAGES:,} messages of 1 KiB, one to one", MESSAGES, on_fastrt,
        {"multiprocessing": on_multiprocessing}, None,
    )  # fmt: skip


PARTS = {part.__name__: part for part in (executors, pools, parallels, graphs, queues)}


def timed(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(row: Row, rounds: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Operations a second of fastrt and of each peer, and the median ratio."""
    _, count, ours, peers, _ = row
    for work in (ours, *peers.values()):
        work()  # workers are started, functions sent
    times: dict[str, list[float]] = {name: [] for name in ("fastrt", *peers)}
    for _ in range(rounds):
        times["fastrt"].append(timed(ours))
        for name, work in peers.items():
            times[name].append(timed(work))
    found = {}
    for name in peers:
        ratio = statistics.median(t / o for t, o in zip(times[name], times["fastrt"], strict=True))
        found[name] = (count / statistics.median(times[name]), ratio)
    return count / statistics.median(times["fastrt"]), found


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--ray-python", help="a Python that has Ray, for its queue")
@click.option("--only", type=click.Choice(sorted(PARTS)), multiple=True, help="measure some of it")
def main(rounds: int, ray_python: str | None, only: tuple[str, ...]) -> None:
    """Measure fastrt's interfaces of other libraries beside these."""
    table = Table("workload, two workers", "fastrt", "peers", "required", box=box.MARKDOWN)
    with fastrt.init(num_workers=2, object_store_memory="1GiB"):
        for part in (part for name, part in PARTS.items() if not only or name in only):
            try:
                for row in part():
                    rate, peers = measured(row, rounds)
                    cells = [f"{name} {other:,.0f}/s, {ratio:.1f} x" for name, (other, ratio) in peers.items()]
                    verdict = ""
                    if row[4] is not None:
                        peer, factor = row[4]
                        verdict = f"{factor:g} x {peer}: {'reached' if peers[peer][1] >= factor else 'MISSED'}"
                    if part is queues and ray_python:
                        out = subprocess.run([ray_python, "-c", RAY], capture_output=True, text=True, check=True)
                        other = float(out.stdout.split()[-1])
                        cells.append(f"Ray {other:,.0f}/s, {rate / other:.0f} x")
                    table.add_row(row[0], f"{rate:,.0f}/s", "; ".join(cells), verdict)
            except ImportError as exc:
                table.add_row(part.__name__, "-", f"left out: {exc}", "")
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
