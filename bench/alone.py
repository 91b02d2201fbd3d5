"""Measurements of fastrt alone, with no other library running: idleness, first puts, several putters, scale.

Each function here is run in a fresh process by compare.py and returns figures by name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from peers.fastrt import Fastrt, address, writable_blocks
from workloads import STORE_BYTES, WORKERS, check

import fastrt

now = time.perf_counter_ns
IDLE_S, IDLE_TASKS = 0.010, 400
PUT_BYTES = 64 << 20
LARGE_BYTES = 2 << 30
SESSIONS = 3
LATE_S = 2
DEPTH = 11
SCALE = 1_000_000
CHUNK = 10_000
SCALE_STORE_BYTES = 4 << 30


def percentile(times: list[int], share: float) -> float:
    """The quantile of the times at `share`."""
    ranked = sorted(times)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


def after_idle() -> dict[str, float]:
    """One task after 10 ms in which nothing ran: all processes sleep, and caches have cooled.

    Beside it the machine's own part: one byte through a pipe to another Python process and back.
    """
    peer = Fastrt(WORKERS, STORE_BYTES)
    peer.prepare("task_one", None)
    tasks, pipes = [], []
    with _echo() as echo:
        for _ in range(IDLE_TASKS):
            time.sleep(IDLE_S)
            tasks.append(peer.task_one())
            time.sleep(IDLE_S)
            pipes.append(echo())
    peer.close()
    found = {}
    for name, times in (("", tasks), ("pipe_", pipes)):
        found |= {f"{name}p50_us": percentile(times, 0.5) / 1e3, f"{name}p99_us": percentile(times, 0.99) / 1e3}
    return found


@contextmanager
def _echo() -> Iterator[Callable[[], int]]:
    """A process that sends every byte back, and a function that sends it one: nanoseconds until it is back."""
    there, back = os.pipe(), os.pipe()
    code = "import os\nwhile os.write(1, os.read(0, 1)): pass"
    with subprocess.Popen([sys.executable, "-c", code], stdin=there[0], stdout=back[1]) as process:

        def echo() -> int:
            start = now()
            os.write(there[1], b"x")
            os.read(back[0], 1)
            return now() - start

        for _ in range(100):
            echo()
        yield echo
        process.kill()
    for fd in (*there, *back):
        os.close(fd)


def first_puts() -> dict[str, float]:
    """The first put of a session, into memory that was never touched: GB/s, and its share of the same put repeated.

    At once, or after 2 s: the daemon has then had time to populate memory (`node.populator`). Beside the last one, a
    program without fastrt that touches 2 GiB, waits 2 s and copies: on a virtual machine whose host takes back free
    memory, fresh pages come slowly, and the first copy into pages that are mapped already is slower than the next.
    """
    found: dict[str, float] = {}
    for name, nbytes, up_s in (
        ("64_MiB", PUT_BYTES, 0),
        ("2_GiB", LARGE_BYTES, 0),
        ("2_GiB_late", LARGE_BYTES, LATE_S),
    ):
        rates, shares, plain = [], [], []
        for _ in range(SESSIONS):
            peer = Fastrt(WORKERS, LARGE_BYTES + (1 << 30))
            array = peer.array(nbytes)
            time.sleep(up_s)
            first, *others = [_seconds_of_put(array) for _ in range(6)]
            rates.append(nbytes / first / 1e9)
            shares.append(statistics.median(others) / first)
            peer.close()
            if up_s:
                plain.append(_plain_copies(array))
        found[f"{name}_GB_per_s"] = statistics.median(rates)
        found[f"{name}_of_steady"] = statistics.median(shares)
        found[f"{name}_of_steady_least"] = min(shares)
    for name, column in zip(("fresh_GB_per_s", "late_of_steady"), zip(*plain, strict=True), strict=True):
        found[f"plain_{name}"], found[f"plain_{name}_least"] = statistics.median(column), min(column)
    return found


def _plain_copies(array: Any) -> tuple[float, float]:
    """Touch as much fresh memory, in huge pages where there are any: GB/s; copy 2 s later: share of later copies."""
    with mmap.mmap(-1, array.nbytes) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        room = np.frombuffer(memory, array.dtype)
        start = now()
        room[:: mmap.PAGESIZE // array.itemsize] = 1
        touched = (now() - start) / 1e9
        time.sleep(LATE_S)
        times = []
        for _ in range(6):
            start = now()
            np.copyto(room, array)
            times.append(now() - start)
        del room
    return array.nbytes / touched / 1e9, statistics.median(times[1:]) / times[0]


def _seconds_of_put(array: Any) -> float:
    start = now()
    ref = fastrt.put(array)
    took = (now() - start) / 1e9
    del ref
    return took


# ---- two putters at once, and what a gigabyte costs ----


@fastrt.remote
def put_many(count: int, begin: float) -> tuple[float, float]:
    """Put `count` arrays one after the other from the time `begin` on; returns start and end."""
    import numpy as np

    array = np.arange(PUT_BYTES // 8, dtype=np.float64)
    fastrt.put(array)
    while time.perf_counter() < begin:
        pass
    start = time.perf_counter()
    for _ in range(count):
        fastrt.put(array)
    return start, time.perf_counter()


@fastrt.remote
def copy_many(count: int, begin: float) -> tuple[float, float]:
    """The same by memcpy into one block of this process's mapping."""
    import numpy as np

    array = np.arange(PUT_BYTES // 8, dtype=np.float64)
    (block,) = writable_blocks(PUT_BYTES, 1)
    to, come = address(block), array.ctypes.data
    ctypes.memmove(to, come, PUT_BYTES)
    while time.perf_counter() < begin:
        pass
    start = time.perf_counter()
    for _ in range(count):
        ctypes.memmove(to, come, PUT_BYTES)
    return start, time.perf_counter()


def _together(function: Any, processes: int, count: int) -> float:
    """GB/s of several workers that do the same at once."""
    begin = time.perf_counter() + 1.0
    spans = fastrt.get([function.remote(count, begin) for _ in range(processes)])
    took = max(end for _, end in spans) - min(start for start, _ in spans)
    return processes * count * PUT_BYTES / took / 1e9


def putters() -> dict[str, float]:
    """Puts of 64 MiB by one and by two workers at once, each beside memcpy, interleaved; and CPU seconds per GB."""
    peer = Fastrt(WORKERS, STORE_BYTES)
    peer.first()
    rates: dict[str, list[float]] = {}
    for _ in range(5):
        for processes in (1, 2):
            for name, function in (("put", put_many), ("memcpy", copy_many)):
                rate = _together(function, processes, 20)
                rates.setdefault(f"{name}_{processes}_GB_per_s", []).append(rate)
    found = {name: statistics.median(values) for name, values in rates.items()}
    for method in ("put_array", "memcpy"):
        peer.prepare(method, PUT_BYTES)
        start, units = time.process_time(), len(peer.round(method, PUT_BYTES, 1.0))
        found[f"{method}_cpu_s_per_GB"] = (time.process_time() - start) / (units * PUT_BYTES / 1e9)
        peer.finish()
    peer.close()
    return found


# ---- a further worker ----


@fastrt.remote
def deeper(depth: int, asked: int) -> list[int]:
    """Nested tasks, each of which needs one more worker: nanoseconds from the call of each to its first line."""
    started = now() - asked
    return [started] if depth == 0 else [started, *fastrt.get(deeper.remote(depth - 1, now()))]


def further_worker() -> dict[str, float]:
    """The time from the call of a task that needs one more worker until the new process runs it."""
    times: list[int] = []
    for _ in range(SESSIONS):
        with fastrt.init(num_workers=1, object_store_memory=STORE_BYTES):
            fastrt.get(deeper.remote(0, now()))
            times += fastrt.get(deeper.remote(DEPTH, now()))[1:]
    return {"p50_ms": percentile(times, 0.5) / 1e6, "p99_ms": percentile(times, 0.99) / 1e6}


# ---- scale ----


def _cost(chunk: Callable[[int], int], count: int) -> float:
    """Median nanoseconds of one operation over `count` chunks."""
    return statistics.median(chunk(k) / CHUNK for k in range(count))


def _put_chunk(k: int) -> int:
    """Put, get and drop CHUNK values."""
    start = now()
    refs = [fastrt.put(n) for n in range(CHUNK)]
    values = fastrt.get(refs)
    del refs
    took = now() - start
    assert values[-1] == CHUNK - 1
    return took


def objects_alive() -> dict[str, float]:
    """A million small values alive at once: cost of put + get + release beside them, against an empty store's."""
    with fastrt.init(num_workers=WORKERS, object_store_memory=SCALE_STORE_BYTES):
        _cost(_put_chunk, 10)
        empty = [_cost(_put_chunk, 20)]
        start = now()
        alive = [fastrt.put(n) for n in range(SCALE)]
        growing = (now() - start) / SCALE
        full = _cost(_put_chunk, 40)
        start = now()
        values = fastrt.get(alive)
        in_order = (now() - start) / SCALE
        assert values == list(range(SCALE))
        chosen = random.Random(1).sample(alive, SCALE)
        start = now()
        fastrt.get(chosen)
        shuffled = (now() - start) / SCALE
        del chosen
        start = now()
        del alive
        dropping = (now() - start) / SCALE
        empty.append(_cost(_put_chunk, 20))
    return {
        "empty_ns": statistics.mean(empty),
        "beside_a_million_ns": full,
        "ratio": full / statistics.mean(empty),
        "put_while_growing_ns": growing,
        "get_in_order_ns": in_order,
        "get_shuffled_ns": shuffled,
        "drop_all_ns": dropping,
    }


@fastrt.remote
def hold(path: str) -> int:
    """Keep a worker busy until a file is gone."""
    while os.path.exists(path):
        time.sleep(0.0002)
    return os.getpid()


def _queue(count: int, remote: Callable[[int], Any]) -> dict[str, float]:
    """Queue `count` tasks while all workers are held, then let them run.

    Returns:
        Nanoseconds a task of each step; of submitting, those of the last CHUNK.
    """
    with tempfile.NamedTemporaryFile() as gate:
        held = [hold.remote(gate.name) for _ in range(WORKERS)]
        time.sleep(0.05)
        refs = [remote(k) for k in range(count - CHUNK)]
        start = now()
        refs += [remote(k) for k in range(count - CHUNK, count)]
        took = {"submit": (now() - start) / CHUNK}
    start = now()
    fastrt.wait(refs, num_returns=count)
    ran = now()
    values = fastrt.get(refs)
    read = now()
    del refs
    took.update(run=(ran - start) / count, read=(read - ran) / count, drop=(now() - read) / count)
    fastrt.get(held)
    for k in (0, count // 2, count - 1):
        check(values[k], k)
    return took


def tasks_queued() -> dict[str, float]:
    """A million tasks queued: nanoseconds a task from submission to release, against ten thousand's.

    The first time round, both take fresh memory from the system; the second time it is warm.
    """
    peer = Fastrt(WORKERS, SCALE_STORE_BYTES)
    remote = peer._stamp.remote
    first_few, first_many = _queue(CHUNK, remote), _queue(SCALE, remote)
    samples = [_queue(CHUNK, remote) for _ in range(15)]
    few = {step: statistics.median(sample[step] for sample in samples) for step in first_few}
    many = _queue(SCALE, remote)
    peer.close()
    found = {f"{step}_few_ns": few[step] for step in few} | {f"{step}_million_ns": many[step] for step in many}
    found["ratio"] = sum(many.values()) / sum(few.values())
    found["first_submit_few_ns"], found["first_submit_million_ns"] = first_few["submit"], first_many["submit"]
    return found


def wait_growth() -> dict[str, float]:
    """Microseconds a reference to wait one by one for 1,000 to 8,000 tasks.

    Three ways: `wait` for tasks that have all ended, `wait` from their submission on, `as_completed` while they run.
    """
    peer = Fastrt(WORKERS, STORE_BYTES)
    found: dict[str, list[float]] = {}
    for _ in range(9):
        for count in (1000, 2000, 4000, 8000):
            refs = [peer._stamp.remote(k) for k in range(count)]
            fastrt.wait(refs, num_returns=count)
            start = now()
            while refs:
                _, refs = fastrt.wait(refs)
            found.setdefault(f"wait_{count}_us_a_ref", []).append((now() - start) / count / 1e3)
            found.setdefault(f"with_tasks_{count}_us_a_ref", []).append(peer.wait_each(count) / count / 1e3)
            refs = [peer._stamp.remote(k) for k in range(count)]
            start = now()
            for ref in fastrt.as_completed(refs):
                del ref
            found.setdefault(f"as_completed_{count}_us_a_ref", []).append((now() - start) / count / 1e3)
    peer.close()
    return {name: statistics.median(values) for name, values in found.items()}


MEASURES = {
    function.__name__: function
    for function in (
        after_idle,
        first_puts,
        putters,
        further_worker,
        objects_alive,
        tasks_queued,
        wait_growth,
    )
}
