"""The sessions that a dashboard shows: each is joined as a tool, sampled once a second, and left when it has ended."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fastrt._core.memory import arena, clients
from fastrt._core.objects import spill
from fastrt._core.tasks import tasks as core_tasks
from fastrt.dashboard.recorder import Recorder
from fastrt.errors import AttachError, FastrtError
from fastrt.observe import ended
from fastrt.observe.joining import Joined
from fastrt.store import join
from fastrt.store.client import Store

SAMPLES = 300  # five minutes
_PATIENCE_S = 3.0  # for the daemon's answers
_RETRY_S = 2.0

LIVE, AWAY, ENDED, OUTSIDE = "live", "the daemon is away", "ended", "cannot be joined"


@dataclass(frozen=True, slots=True)
class Sample:
    """A session at one moment; amounts since the session began are totals.

    Attributes:
        at: seconds since the epoch.
        workers, busy, blocked: worker processes, those that run a task, those that wait inside of one.
        calls: actors that run a call.
        done: tasks and calls that ended, by processes that are still there.
        queued: tasks that are ready.
        used, committed, room: bytes of the store.
        spilled: bytes that were written to files.
        cpu_s, rss: processor time and resident bytes of the session's processes.
    """

    at: float
    workers: int = 0
    busy: int = 0
    blocked: int = 0
    calls: int = 0
    done: int = 0
    queued: int = 0
    used: int = 0
    committed: int = 0
    room: int = 0
    spilled: int = 0
    cpu_s: float = 0.0
    rss: int = 0


@dataclass
class Rates:
    """Changes between two samples; negative ones (a process has ended) count as none.

    Attributes:
        tasks: that ended in a second.
        cpus: processors in use.
        spilled: bytes in a second.
    """

    tasks: float = 0.0
    cpus: float = 0.0
    spilled: float = 0.0

    @classmethod
    def between(cls, before: Sample, after: Sample) -> Rates:
        """The changes from one sample to a later one, for each second."""
        seconds = max(after.at - before.at, 1e-3)
        return cls(
            max(0, after.done - before.done) / seconds,
            max(0.0, after.cpu_s - before.cpu_s) / seconds,
            max(0, after.spilled - before.spilled) / seconds,
        )


@dataclass
class _Processes:
    """The session's processes, for their processor time and memory."""

    known: dict[tuple[int, int], psutil.Process] = field(default_factory=dict)
    used_s: dict[tuple[int, int], float] = field(default_factory=dict)
    gone_s: float = 0.0  # processor time of those that have ended

    def measure(self, rows: list[dict[str, Any]]) -> tuple[float, int]:
        """Processor seconds and resident bytes of the processes of client rows."""
        rss, there = 0, {(row["pid"], row["start_time"]) for row in rows}
        for key in self.known.keys() - there:
            del self.known[key]
            self.gone_s += self.used_s.pop(key, 0.0)
        for key in there:
            try:
                process = self.known.get(key) or self.known.setdefault(key, psutil.Process(key[0]))
                with process.oneshot():
                    times = process.cpu_times()
                    self.used_s[key] = times.user + times.system
                    rss += process.memory_info().rss
            except psutil.Error:
                continue
        return self.gone_s + sum(self.used_s.values()), rss


class Watched:
    """One session. A single thread calls its methods.

    Args:
        path: of the daemon's socket.

    Attributes:
        state: LIVE; AWAY while no daemon answers; ENDED; or OUTSIDE when it could not be joined.
        why: details of the state.
        samples: the last five minutes, one a second.
        recorder: records the timeline while a page shows it.
        stacks: those that a page has asked for, by NodeID ("": this node) and pid (`pages.stacks.StackReading`).
        asked: tables of other nodes that pages show, by kind and NodeID (`services.Polled`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.parent.name
        self.state, self.why = OUTSIDE, "not joined yet"
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.last_seen = time.time()
        self.recorder: Recorder | None = None
        self.stacks: dict[tuple[str, int], Any] = {}
        self.asked: dict[tuple[str, str], Any] = {}
        self._joined: Joined | None = None
        self._processes = _Processes()
        self._failures: list[ended.Failure] = []  # once the session has ended
        self._tried_at = 0.0
        self._done_before = 0
        self._done_by: dict[tuple[int, int], int] = {}  # of living processes

    @property
    def store(self) -> Store | None:
        """This process's attachment; None while there is none."""
        return None if self._joined is None else self._joined.store

    @property
    def rates(self) -> Rates:
        """The changes between the last two samples."""
        return Rates.between(self.samples[-2], self.samples[-1]) if len(self.samples) > 1 else Rates()

    def look(self) -> None:
        """Join if need be, see whether the session still runs, and take a sample."""
        if self.state == ENDED:
            return
        if self._joined is None:
            self._join()
        if self._joined is None:
            return
        if not self._joined.is_connected():
            self._reconnect()
        if self.state in (LIVE, AWAY):
            try:
                self.samples.append(self._sample(self._joined.store))
            except FastrtError as exc:
                self.state, self.why = AWAY, str(exc)
        if self.state == LIVE:
            self.last_seen = time.time()

    def failures(self, limit: int = 0) -> list[ended.Failure]:
        """The failures that the session keeps, or kept when it ended, oldest first.

        Args:
            limit: the largest number of failures, the newest ones; 0: all.
        """
        if self._joined is None:
            return self._failures[-limit:]
        return ended.failures(self._joined.store, limit=limit)

    def close(self) -> None:
        """Leave the session."""
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = None
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.close()

    def end(self) -> None:
        """Note that the session has ended, and let go of its memory."""
        self.state = ENDED
        self.why = "its program has ended, or its node was stopped"
        with contextlib.suppress(FastrtError):
            self._failures = self.failures()
        self.close()

    def _join(self) -> None:
        now = time.monotonic()
        if now - self._tried_at < _RETRY_S:
            return
        self._tried_at = now
        try:
            self._joined = Joined(self.path, "fastrt dashboard", _PATIENCE_S)
            self.state, self.why = LIVE, ""
        except FastrtError as exc:
            if not self.path.exists():
                self.end()
            else:
                self.state, self.why = OUTSIDE, str(exc)

    def _reconnect(self) -> None:
        """Connect to the daemon that took the place of a dead one; without one, the session may have ended."""
        assert self._joined is not None
        if not self.path.exists():
            self.state, self.why = ENDED, ""  # `look`'s caller takes a last view, then calls `end`
            return
        try:
            self._joined.link = join.rejoin(str(self.path), _PATIENCE_S)
            self.state, self.why = LIVE, ""
        except AttachError as exc:
            self.state, self.why = AWAY, str(exc)

    def _sample(self, store: Store) -> Sample:
        client = store.client
        rows = [row for row in clients.table(client.segment) if row["client"] != client.index]
        workers = [row for row in rows if row["kind"] == clients.KIND_WORKER]
        actors = [row for row in rows if row["kind"] == clients.KIND_ACTOR]
        used, committed, room = arena.room(client)
        cpu_s, rss = self._processes.measure(rows)
        return Sample(
            time.time(), len(workers), sum(row["task"] is not None and not row["blocked"] for row in workers),
            sum(row["task"] is not None and bool(row["blocked"]) for row in workers),
            sum(row["task"] is not None for row in actors), self._done(workers + actors), core_tasks.queued(client),
            used, committed, room, spill.totals(client)["spilled_bytes"], cpu_s, rss,
        )  # fmt: skip

    def _done(self, rows: list[dict[str, Any]]) -> int:
        """Tasks and calls that ended since the dashboard joined or before: those of dead processes stay counted."""
        now = {(row["client"], row["gen"]): row["tasks_done"] for row in rows}
        self._done_before += sum(self._done_by[key] for key in self._done_by.keys() - now.keys())
        self._done_by = now
        total: int = self._done_before + sum(now.values())
        return total


def find(folder: Path, prefix: str) -> list[Path]:
    """The daemons' sockets below the runtime folder of sessions whose names begin with `prefix`, newest first."""
    found = []
    for path in folder.glob("*/node.sock"):
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:  # it has just ended
            continue
    return [path for _, path in sorted(found, reverse=True) if path.parent.name.startswith(prefix)]
