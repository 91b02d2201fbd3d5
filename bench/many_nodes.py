"""Many real nodes on one machine, each with one worker and a small store: a shuffle, then the same under kills.

Run: python bench/many_nodes.py [--nodes 50] [--kills 10] [--part 128KiB]

Each node is a `fastrt start` with all of its processes. The shuffle makes one array for each pair of nodes, on as many
nodes, and sums them across. Then nodes are killed as machines that lose their power, one after the other, each replaced
by a new one, while a second shuffle and short tasks run. Every sum and every result is checked. Printed: how long each
step took, and the processes and the memory of a node (PSS: a page that processes share counts in parts).
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np
import psutil
from nodes import cluster

import fastrt
from fastrt.config import parse_bytes, size_text
from fastrt.node.daemon import sweep_sessions

STORE = "64MiB"
STARTING = 4  # nodes that start at once
JOIN_S = 120.0
TASKS = 20  # short ones for each node, while nodes are killed
TASK_S = 0.05


@fastrt.remote(max_retries=-1)
def spread(row: int, count: int, nbytes: int) -> list[np.ndarray]:
    """One array for each column."""
    return [np.full(nbytes // 8, row * count + column, np.uint64) for column in range(count)]


@fastrt.remote(max_retries=-1)
def gather(*parts: np.ndarray) -> int:
    """The sum of the first items of a column's arrays, each of which holds one number."""
    assert all(part[0] == part[-1] for part in parts)
    return sum(int(part[0]) for part in parts)


@fastrt.remote(max_retries=-1)
def short(k: int) -> int:
    """A number that depends on the argument."""
    time.sleep(TASK_S)
    return 3 * k


def shuffle(count: int, nbytes: int) -> list[fastrt.ObjectRef]:
    """The references of the sums of `count` columns of `count` parts."""
    rows = [spread.options(num_returns=count).remote(row, count, nbytes) for row in range(count)]
    return [gather.remote(*(row[column] for row in rows)) for column in range(count)]


def check(sums: list[int], count: int) -> None:
    """Raise when a sum is wrong."""
    wanted = [sum(row * count + column for row in range(count)) for column in range(count)]
    assert sums == wanted, f"{sum(a != b for a, b in zip(sums, wanted, strict=True))} of {count} sums are wrong"


def tree(pid: int) -> list[psutil.Process]:
    """All processes of a node."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def kill(pid: int) -> None:
    """End a node at once, as when its machine loses its power."""
    everything = tree(pid)
    for process in everything:
        process.suspend()
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):  # its parent died before it
            process.kill()


def memory_of(pid: int) -> int:
    """The memory of a node's processes, with its share of what they have in common."""
    found = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_full_info().pss
    return found


def joined(count: int) -> int:
    """Wait until so many nodes have joined; how many there are."""
    until = time.monotonic() + JOIN_S
    while len(fastrt.nodes()) < count and time.monotonic() < until:
        time.sleep(0.1)
    return len(fastrt.nodes())


def timed(what: str, run: Callable[[], object]) -> object:
    """Run a step and print how long it took."""
    began = time.monotonic()
    found = run()
    click.echo(f"{what}: {time.monotonic() - began:.1f} s")
    return found


@click.command()
@click.option("--nodes", "count", default=50, show_default=True, help="How many, apart from the head's.")
@click.option("--kills", default=10, show_default=True, help="How many of them are killed and replaced.")
@click.option("--part", default="128KiB", show_default=True, help="Of the shuffle: one for each pair of nodes.")
@click.option("--seed", default=0, show_default=True)
def main(count: int, kills: int, part: str, seed: int) -> None:
    """Start the nodes, run both steps, and print what they took."""
    rng = random.Random(seed)
    nbytes = parse_bytes(part)
    with ExitStack() as stack:
        head, start, env = cluster(stack, STORE)
        folder = Path(env["FASTRT_RUNTIME_DIR"])
        stack.callback(sweep_sessions, folder, folder.parent / "spill")  # of nodes that were killed
        os.environ.update(env)
        pool = stack.enter_context(ThreadPoolExecutor(STARTING))
        pids = timed(
            f"{count} nodes start", lambda: list(pool.map(lambda k: start("--num-workers", "1"), range(count)))
        )
        assert isinstance(pids, list)
        stack.enter_context(fastrt.init(address=head))
        timed("they have joined", lambda: joined(count + 1))
        assert joined(count + 1) == count + 1, f"{joined(count + 1)} nodes have joined"
        moved = size_text(count * count * nbytes)
        timed(f"shuffle of {moved} in {count * count} parts", lambda: check(fastrt.get(shuffle(count, nbytes)), count))
        each = [memory_of(pid) for pid in pids]
        processes = statistics.median(len(tree(pid)) for pid in pids)
        median, most = size_text(int(statistics.median(each))), size_text(max(each))
        click.echo(f"a node: {processes:.0f} processes, {median} of memory, the median; {most} at most")

        def chaos() -> None:
            sums = shuffle(count, nbytes)
            results = [short.remote(k) for k in range(TASKS * count)]
            for _ in range(kills):
                kill(pids.pop(rng.randrange(len(pids))))
                pids.append(start("--num-workers", "1"))
            assert fastrt.get(results) == [3 * k for k in range(TASKS * count)]
            check(fastrt.get(sums), count)

        timed(f"the same and {TASKS * count} tasks, {kills} nodes killed and replaced", chaos)
        click.echo("every sum and result is right")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
