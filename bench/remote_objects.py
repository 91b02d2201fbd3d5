"""The cost of objects that stay on another node: processor time of the driver's uplink at rest, and a task's delay.

Run: python bench/remote_objects.py [--count 2000 --count 60000] [--rest-s 10] [--src SRC]

The driver's node has no workers; tasks on a second node make objects of 16 KiB, and the driver keeps a reference to
each. Nothing happens then for some seconds, in which the processor time of both uplinks is measured. Then short tasks
with one of these objects as their argument run on the second node, one at a time; and once more directly after the
driver has dropped all objects but a few. Last, tasks return lists of references, whose time should grow with their
number. `--src` names the `src` folder of another build of fastrt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import click
import psutil

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # also as a part of fastrt.bench

from nodes import cluster  # noqa: E402

OBJECT_BYTES, A_TASK, TASKS = 16 << 10, 500, 200
LISTS = 1000, 4000
DRIVER = f"""
import sys, time
import numpy as np
import fastrt
make = fastrt.remote(lambda k: [np.full({OBJECT_BYTES // 8}, k) for _ in range({A_TASK})])
first = fastrt.remote(lambda array: int(array[0]))
refs = fastrt.remote(lambda count: [fastrt.put(np.zeros({OBJECT_BYTES // 8})) for _ in range(count)])
with fastrt.init(address=HEAD):
    made = [make.options(num_returns={A_TASK}).remote(k) for k in range(COUNT // {A_TASK})]
    fastrt.wait([row[-1] for row in made], num_returns=len(made), fetch_local=False)
    print("made", flush=True)
    sys.stdin.readline()
    for _ in range(2):
        times = []
        for k in range({TASKS}):
            start = time.perf_counter()
            assert fastrt.get(first.options(scheduling="far").remote(made[k % len(made)][k])) == k % len(made)
            times.append((time.perf_counter() - start) * 1e3)
        times.sort()
        print(times[{TASKS // 2}], times[{TASKS * 99 // 100}], flush=True)
        del made[1:]
    for count in {LISTS}:
        start = time.perf_counter()
        found = fastrt.get(refs.options(scheduling="far").remote(count))
        print((time.perf_counter() - start) * 1e3, flush=True)
        assert len(found) == count
"""


def uplinks(head: int) -> list[psutil.Process]:
    """The uplinks below a process, in the order of their start."""
    found = [one for one in psutil.Process(head).children(recursive=True) if "uplink" in " ".join(one.cmdline())]
    return sorted(found, key=lambda one: one.create_time())


def used_s(process: psutil.Process) -> float:
    """Processor seconds that a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(count: int, rest_s: float, source: str) -> str:
    """Measure with so many objects; returns the words to print."""
    with ExitStack() as stack:
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        settings = {"FASTRT_KEEP_BYTES": str(OBJECT_BYTES), "FASTRT_POPULATE_BYTES": "0", "PYTHONPATH": path}
        head, start, env = cluster(stack, str(count * OBJECT_BYTES * 2 + (256 << 20)), **settings)
        start("--num-workers", "2", "--name", "far")
        code = f"HEAD, COUNT = {head!r}, {count}\n{DRIVER}"
        words, pipe = [sys.executable, "-W", "ignore", "-c", code], subprocess.PIPE
        driver = subprocess.Popen(words, env={**os.environ, **env}, stdin=pipe, stdout=pipe, text=True)
        stack.callback(driver.wait)
        assert driver.stdout is not None
        assert driver.stdin is not None
        if driver.stdout.readline() != "made\n":
            raise click.ClickException("the driver ended; see above")
        time.sleep(rest_s)
        watched = uplinks(os.getpid())
        before = [used_s(one) for one in watched]
        time.sleep(rest_s)
        rest = [(used_s(one) - used) / rest_s * 100 for one, used in zip(watched, before, strict=True)]
        driver.stdin.write("\n")
        driver.stdin.flush()
        tasks = [[float(word) for word in driver.stdout.readline().split()] for _ in range(2)]
        lists = [float(driver.stdout.readline()) for _ in LISTS]
    (held, held_99), (dropped, dropped_99) = tasks
    listed = ", ".join(f"{size:,} references {ms:.0f} ms" for size, ms in zip(LISTS, lists, strict=True))
    return (
        f"{count:8,} objects: at rest {rest[0]:4.1f} % of a processor in the driver's uplink, {rest[1]:4.1f} % in the "
        f"other; a task {held:.1f} ms, p99 {held_99:.1f}; while they are dropped {dropped:.1f} ms, "
        f"p99 {dropped_99:.1f}; a list of {listed}"
    )


@click.command()
@click.option("--count", "counts", multiple=True, default=[2000, 20_000, 60_000], show_default=True)
@click.option("--rest-s", default=10.0, show_default=True, help="How long nothing happens, and how long before that.")
@click.option("--src", default="", help="The src folder of another build of fastrt.")
def main(counts: tuple[int, ...], rest_s: float, src: str) -> None:
    """Measure, and print a line for each number of objects."""
    for count in counts:
        print(measure(count, rest_s, src), flush=True)


if __name__ == "__main__":
    main()
