"""Ends a worker or an actor's process when memory runs out, before the kernel ends a process of its own choice.

The daemon looks at the machine's memory and at the limits of its cgroups, more often the less is left: a process can
fill about 2 GiB in a second. Above the threshold it ends one process, and looks again when that one is gone. `choose`
is the policy, a pure function; the rest reads /proc and the arena, only then.

Source:
    The policy follows Ray's memory monitor: work that can run again goes first, and of it the newest, because it loses
    least.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fastrt._core.memory.clients import KIND_WORKER, Client, table
from fastrt._core.objects.functions import function_name
from fastrt._core.tasks import actors, cancel
from fastrt._core.tasks import tasks as core
from fastrt.config import MemoryLevel, memory_levels
from fastrt.node.janitor import explain
from fastrt.node.memory_limit import LACK
from fastrt.node.worker_pool import kill_group

_FILL_BYTES_S = 2 << 30
_LOOK_MIN_S, _LOOK_MAX_S = 0.05, 1.0
_WORTH_BYTES = 16 << 20  # the end of a process with less memory of its own helps little
_WORTH_PART = 10  # and so does that of one with less than a tenth of the largest
_REPLACED_S = 10.0  # after the end of an idle worker: the one in its place would free as little
_BEFORE_TASKS = 1 << 62  # more than any time of a start
_ROWS_MAX = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


class Candidate(NamedTuple):
    """A process that the daemon may end.

    Attributes:
        pid: of the worker or actor.
        what: in words: "task 'f'", "actor A", "an idle worker".
        nbytes: memory of its own and of the processes that it has started, without the store.
        loses: 0: it runs nothing, 1: its work can run again, 2: its work fails or its state is lost.
        age: grows with the time at which the task was submitted. Of an actor it grows with the start of its process,
            and is less than any task's.
    """

    pid: int
    what: str
    nbytes: int
    loses: int
    age: int


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the process to end: the one that loses least, of equal ones the newest, then the largest.

    Processes whose end would free little are left out. None: there is no other.
    """
    largest = max((one.nbytes for one in candidates), default=0)
    worth = [one for one in candidates if one.nbytes >= max(_WORTH_BYTES, largest // _WORTH_PART)]
    return min(worth, key=lambda one: (one.loses, -one.age, -one.nbytes), default=None)


def above(levels: Sequence[MemoryLevel], threshold: float) -> MemoryLevel | None:
    """Return the level that is furthest above a share of its limit; None: none is."""
    over = [level for level in levels if level.used > level.limit * threshold]
    return max(over, key=lambda level: level.used / level.limit, default=None)


def pause_s(levels: Sequence[MemoryLevel], threshold: float) -> float:
    """Return how many seconds may pass before the next look."""
    left = min(level.limit * threshold - level.used for level in levels)
    return min(_LOOK_MAX_S, max(_LOOK_MIN_S, left / _FILL_BYTES_S))


class MemoryMonitor:
    """The memory monitor of one daemon.

    Args:
        client: the daemon's attachment.
        threshold: the setting `memory_threshold`.
        actor_of: the actors' indexes by the pids of their processes.
        say: prints a line at the drivers.
    """

    def __init__(self, client: Client, threshold: float, actor_of: dict[int, int], say: Callable[[str], None]) -> None:
        self._client, self._threshold, self._actor_of, self._say = client, threshold, actor_of, say
        self._due = self._idle_due = 0.0
        self._stories: dict[int, str] = {}  # by pid, of processes that were ended and are not buried

    def patience_s(self) -> float:
        """Seconds until the next look; infinite when the monitor is off."""
        return max(0.0, self._due - time.monotonic()) if 0 < self._threshold < 1 else float("inf")

    def look(self) -> None:
        """End a process if memory runs out; every tick of the daemon calls this."""
        if self.patience_s() > 0:
            return
        now = time.monotonic()
        levels = memory_levels()
        self._due = now + pause_s(levels, self._threshold)
        level = above(levels, self._threshold)
        if level is None or self._stories:
            return
        found = self._candidates()
        chosen = choose([one for one in found if one.loses or now >= self._idle_due])
        if chosen is None:
            self._due = now + _LOOK_MAX_S
            return
        how = (
            f"was ended by fastrt {LACK}: {level.where} uses {level.used // _MIB:,} of {level.limit // _MIB:,} MiB, "
            f"more than {self._threshold:.0%} (memory_threshold)"
        )
        if not chosen.loses:
            self._idle_due = now + _REPLACED_S
        rows = sorted(found, key=lambda one: -one.nbytes)[:_ROWS_MAX]
        lines = [f"  {one.nbytes // _MIB:>8,} MiB  pid {one.pid:<8} {one.what}" for one in rows]
        self._stories[chosen.pid] = "\n".join([how, "memory of workers and actors at that moment:", *lines])
        self._say(f"fastrt: process {chosen.pid} ({chosen.what}, {chosen.nbytes // _MIB:,} MiB) {how}\n")
        kill_group(chosen.pid)

    def how(self, pid: int, status: int | None, kernel: str) -> str:
        """Say in words how a process ended: the monitor's reason with a table of the memory, or as `explain`.

        Args:
            pid: of the process.
            status, kernel: as for `explain`.
        """
        return self._stories.get(pid) or explain(status, kernel)

    def forget(self, pid: int) -> None:
        """Note that a process is gone, and what it held is returned."""
        self._stories.pop(pid, None)

    def _candidates(self) -> list[Candidate]:
        own = own_bytes()
        rows = [row for row in table(self._client.segment) if row["pid"] in own]
        found = []
        for row in rows:
            pid = row["pid"]
            if pid in self._actor_of:
                found.append(self._actor(row, self._actor_of[pid], own[pid]))
            elif row["kind"] == KIND_WORKER:
                found.append(self._worker(pid, row["task"], own[pid]))
        return found

    def _worker(self, pid: int, task: int | None, nbytes: int) -> Candidate:
        if task is None:
            return Candidate(pid, "an idle worker", nbytes, 0, 0)
        info = core.info(self._client, task)
        name = function_name(self._client, info["function"][0])
        again = info["attempts"] <= info["retries"] and not info["flags"] & cancel.LATE
        return Candidate(pid, f"task {name!r}", nbytes, 1 if again else 2, info["id"])

    def _actor(self, row: dict[str, int], actor: int, nbytes: int) -> Candidate:
        info = actors.info(self._client, actor)
        name = function_name(self._client, info["function"])
        again = info["max_restarts"] < 0 or info["restarts"] < info["max_restarts"]
        age = row["start_time"] - _BEFORE_TASKS
        return Candidate(row["pid"], f"actor {name}", nbytes, 1 if again else 2, age)


def own_bytes(proc: Path = Path("/proc")) -> dict[int, int]:
    """Return the private memory of each process group, by the pid of its leader: what its end would free."""
    found: dict[int, int] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            _, resident, shared, *_ = (folder / "statm").read_text().split()
        except (OSError, ValueError):
            continue  # it has ended
        found[group] = found.get(group, 0) + (int(resident) - int(shared)) * _PAGE_BYTES
    return found
