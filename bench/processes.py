"""The cost of a library's processes at rest: memory and processor time, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "FASTRT_COMPARE_MARK"  # an environment variable that all descendants inherit, however they were started


def marked(value: str) -> list[int]:
    """Ids of all processes whose environment holds the mark with this value."""
    wanted = f"{MARK}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue  # ended meanwhile, or of another user
    return found


def anonymous_bytes(pids: list[int]) -> int:
    """Anonymous memory of some processes together (PSS: what several share is divided among them).

    Shared memory, which is where stores are, is not anonymous; forked workers' common pages count once.
    """
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss_Anon:"))
    return total


def cpu_seconds(pids: list[int]) -> float:
    """Processor time that all threads of some processes have used: from schedstat, in nanoseconds and not in ticks."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:
                continue
    return total / 1e9


def idle_share(pids: list[int], seconds: float) -> float:
    """Share of one processor that the processes use while no call is made."""
    before, start = cpu_seconds(pids), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(pids) - before) / (time.perf_counter() - start)


def wait_until_gone(value: str, timeout_s: float) -> list[int]:
    """Wait for all marked processes but this one to end; returns those that have not."""
    until = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in marked(value) if pid != os.getpid()]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)
