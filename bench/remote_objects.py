"""What a driver pays for objects that stay on another node: its uplink's processor time at rest, and a task's delay.

Run: python bench/remote_objects.py [--count 2000 --count 60000] [--src SRC]

The driver's node has no workers; tasks on a second node make objects of 16 KiB, and the driver keeps a reference to
each. Nothing happens then for some seconds, in which the processor time of both uplinks is measured. Then short tasks
with one of these objects as their argument run on the second node, one at a time; and once more directly after the
driver has dropped all objects but a few. `--src` names the `src` folder of another build of fastrt.
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

OBJECT_BYTES, A_TASK, TASKS, SETTLE_S, REST_S = 16 << 10, 500, 200, 8.0, 10.0
DRIVER = f"""
import sys, time
import numpy as np
import fastrt
make = fastrt.remote(lambda k: [np.full({OBJECT_BYTES // 8}, k) for _ in range({A_TASK})])
first = fastrt.remote(lambda array: int(array[0]))
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
"""


def uplinks(head: int) -> list[psutil.Process]:
    """The uplinks below a process, in the order of their start."""
    found = [one for one in psutil.Process(head).children(recursive=True) if "uplink" in " ".join(one.cmdline())]
    return sorted(found, key=lambda one: one.create_time())


def used_s(process: psutil.Process) -> float:
    """Processor seconds that a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(count: int, source: str) -> str:
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
        time.sleep(SETTLE_S)
        watched = uplinks(os.getpid())
        before = [used_s(one) for one in watched]
        time.sleep(REST_S)
        rest = [(used_s(one) - used) / REST_S * 100 for one, used in zip(watched, before, strict=True)]
        driver.stdin.write("\n")
        driver.stdin.flush()
        tasks = [[float(word) for word in driver.stdout.readline().split()] for _ in range(2)]
    (held, held_99), (dropped, dropped_99) = tasks
    return (
        f"{count:8,} objects: at rest {rest[0]:4.1f} % of a processor in the driver's uplink, {rest[1]:4.1f} % in the "
        f"other; a task {held:.1f} ms, p99 {held_99:.1f}; while they are dropped {dropped:.1f} ms, p99 {dropped_99:.1f}"
    )


@click.command()
@click.option("--count", "counts", multiple=True, default=[2000, 20_000, 60_000], show_default=True)
@click.option("--src", default="", help="The src folder of another build of fastrt.")
def main(counts: tuple[int, ...], src: str) -> None:
    """Measure, and print a line for each number of objects."""
    for count in counts:
        print(measure(count, src), flush=True)


if __name__ == "__main__":
    main()
