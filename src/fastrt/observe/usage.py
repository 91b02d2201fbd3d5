"""Sums over the trace rings of a session: time by function, busy processes over time, the store's fill.

`Usage.read` copies the rings' new records and adds them up by NumPy, so that millions of them cost no Python objects.
Times are nanoseconds of the monotonic clock. A record is counted once, when its end is known; those still open are
looked at again. The sums have a fixed size: time is divided into at most PARTS parts, which become twice as long when
they are used up, and lengths fall into classes that are a twelfth apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fastrt._core.memory import arena, clients, trace
from fastrt._core.objects import spill
from fastrt._core.repair import pages
from fastrt._core.tasks import tasks
from fastrt.observe.listing import Names
from fastrt.store.client import Store

PARTS = 600
FUNCTIONS_MAX = 1000  # with sums of their own
OTHERS = "other functions"
_FIRST_PART_NS = 5_000_000
_PER_OCTAVE = 8
_CLASSES = 50 * _PER_OCTAVE
_RUNNERS = (clients.KIND_WORKER, clients.KIND_ACTOR)
Array: TypeAlias = "np.ndarray[Any, Any]"
_RECORD = np.dtype([("start", "i8"), ("end", "i8"), ("id", "u8"), ("what", "u4"), ("kind", "u2"), ("actor", "u2")])


@dataclass(slots=True)
class Lengths:
    """The lengths of the runs of one function.

    Attributes:
        count: runs that have ended.
        total, longest: nanoseconds.
        classes: runs by the logarithm of their length.
    """

    count: int = 0
    total: int = 0
    longest: int = 0
    classes: Array = field(default_factory=lambda: np.zeros(_CLASSES, np.int64))

    def add(self, lengths: Array) -> None:
        """Count runs of these lengths."""
        self.count += len(lengths)
        self.total += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))
        found = (np.log2(np.maximum(lengths, 1)) * _PER_OCTAVE).astype(np.int64)
        self.classes += np.bincount(np.minimum(found, _CLASSES - 1), minlength=_CLASSES)

    def quantile(self, part: float) -> float:
        """The length that `part` of the runs do not exceed, within 5 %; nanoseconds."""
        if not self.count:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self.classes), part * self.count))
        return min(float(2 ** ((place + 0.5) / _PER_OCTAVE)), float(self.longest))


class Parts:
    """Amounts over time, from `begin` on."""

    def __init__(self, begin: int) -> None:
        self.begin, self.length = begin, _FIRST_PART_NS
        self.busy = np.zeros(PARTS)  # nanoseconds of all processes together
        self.runners = np.zeros(PARTS)
        self.queued = np.zeros(PARTS)
        self.store = np.zeros(PARTS)
        self._sampled = begin  # the last time

    def fit(self, end: int) -> None:
        """Make the parts long enough for a time."""
        while end >= self.begin + PARTS * self.length:
            self.busy = self._halved(self.busy[0::2] + self.busy[1::2])
            for name in ("runners", "queued", "store"):
                kept = getattr(self, name)
                setattr(self, name, self._halved(np.maximum(kept[0::2], kept[1::2])))
            self.length *= 2

    def cover(self, starts: Array, ends: Array, sign: int) -> None:
        """Add the time between starts and ends to the parts that it lies in."""
        starts, ends = np.maximum(starts, self.begin), np.maximum(ends, self.begin)
        self.fit(int(ends.max(initial=self.begin)))
        first, last = (starts - self.begin) // self.length, (ends - self.begin) // self.length
        inside = first == last
        self.busy += sign * np.bincount(first[inside], (ends - starts)[inside], PARTS)
        for start, end, one, other in zip(starts[~inside], ends[~inside], first[~inside], last[~inside], strict=True):
            self.busy[one] += sign * (self.begin + (one + 1) * self.length - start)
            self.busy[one + 1 : other] += sign * self.length
            self.busy[other] += sign * (end - self.begin - other * self.length)

    def sample(self, now: int, runners: int, queued: int, store: int) -> None:
        """Keep the greatest amounts of each part; they hold since the last sample."""
        self.fit(now)
        first, last = ((at - self.begin) // self.length for at in (self._sampled, now))
        self._sampled = now
        for kept, value in ((self.runners, runners), (self.queued, queued), (self.store, store)):
            kept[first + 1 : last] = value
            kept[last] = max(kept[last], value)

    @staticmethod
    def _halved(sums: Array) -> Array:
        return np.concatenate([sums, np.zeros(PARTS - len(sums))])


class Usage:
    """Adds up a session's records from now on; one thread at a time.

    Args:
        store: any process's attachment.

    Attributes:
        begin, end: times of the first and the last reading.
        functions: by name.
        lost: records that were overwritten before they were read.
        most_bytes: of the store, at any reading.
        moved: bytes moved to files and back since `begin`, by name.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = store.client
        self.names = Names(store)
        self.begin = self.end = trace.now()
        self.parts = Parts(self.begin)
        self.functions: dict[str, Lengths] = {}
        self.lost = 0
        self.most_bytes = 0
        self._moved = self._totals()
        self.moved: dict[str, int] = {}
        self._named: dict[tuple[int, int, int], str] = {}
        self._open: dict[int, Array] = {}  # by slot: numbers of records without an end
        self._running: dict[int, Array] = {}  # by slot: ids of the tasks among them
        self._since = {slot: trace.copied(self._client, slot, (1 << 64) - 1)[2] for slot in self._slots()}

    def read(self) -> None:
        """Add the new records up. Call it before a process has written 16,384 new ones."""
        self.end = now = trace.now()
        kinds = {row["client"]: row["kind"] for row in clients.table(self._client.segment)}
        for slot in self._slots():
            rows = self._new(slot)
            if len(rows):
                self._add(slot, rows, kinds.get(slot) in _RUNNERS)
        used = arena.room(self._client)[0]
        self.most_bytes = max(self.most_bytes, used)
        runners = sum(kind in _RUNNERS for kind in kinds.values())
        self.parts.sample(now, runners, tasks.queued(self._client), used)
        self.moved = {name: value - self._moved[name] for name, value in self._totals().items()}

    def settle(self, patience_s: float) -> None:
        """Read until the runs of all ended tasks have ends: a process stores them after the result can be read."""
        until = time.monotonic() + patience_s
        self.read()
        while any(map(self._has_ended, self._open_tasks())) and time.monotonic() < until:
            time.sleep(0.001)
            self.read()

    def _open_tasks(self) -> list[int]:
        """The ids of tasks whose run has no end yet, in processes that are there."""
        used = {row["client"] for row in clients.table(self._client.segment)}
        return [int(task) for slot, tasks in self._running.items() if slot in used for task in tasks]

    def _has_ended(self, task: int) -> bool:
        return not pages.page_tasks(self._client, id=task, limit=1)[0]

    @property
    def unfinished(self) -> int:
        """Actions that have begun and not ended."""
        return sum(map(len, self._open.values()))

    def _slots(self) -> range:
        return range(clients.slots(self._client.segment))

    def _totals(self) -> dict[str, int]:
        return dict(spill.totals(self._client))

    def _new(self, slot: int) -> Array:
        """The records of a process that have ended since the last call, in nanoseconds."""
        since, pending = self._since.get(slot, 0), self._open.get(slot)
        oldest = int(pending[0]) if pending is not None and len(pending) else since
        first, data, following, (ticks, ns, pace) = trace.copied(self._client, slot, oldest)
        self._since[slot] = following
        rows: Array = np.frombuffer(data, _RECORD).copy()
        if not len(rows) and pending is None:
            return rows
        numbers = np.arange(first, first + len(rows))
        self.lost += max(0, first - since)
        wanted = numbers >= since
        if pending is not None and len(pending):
            self.lost += int(np.count_nonzero(pending < first))
            wanted[pending[pending >= first] - first] = True
        wanted &= np.isin(rows["kind"], (trace.TASK, trace.WAIT))
        has_end = rows["end"] != 0
        self._open[slot] = numbers[wanted & ~has_end]
        self._running[slot] = rows["id"][wanted & ~has_end & (rows["kind"] == trace.TASK)]
        rows = rows[wanted & has_end]
        for name in ("start", "end"):
            rows[name] = ns + ((rows[name] - ticks) * pace).astype(np.int64)
        return rows

    def _add(self, slot: int, rows: Array, is_runner: bool) -> None:
        rows = rows[rows["end"] >= rows["start"]]
        ran = rows[rows["kind"] == trace.TASK]
        if is_runner:  # a driver's waits are no time of a worker
            waited = rows[rows["kind"] == trace.WAIT]
            self.parts.cover(ran["start"], ran["end"], 1)
            self.parts.cover(waited["start"], waited["end"], -1)
        if not len(ran):
            return
        keys = ran["actor"].astype(np.uint64) << np.uint64(32) | ran["what"]
        order = np.argsort(keys, kind="stable")
        found, firsts = np.unique(keys[order], return_index=True)
        lengths = (ran["end"] - ran["start"])[order]
        for key, part in zip(found.tolist(), np.split(lengths, firsts[1:]), strict=True):
            self._of(slot, key >> 32, key & 0xFFFFFFFF).add(part)

    def _of(self, slot: int, actor: int, what: int) -> Lengths:
        key = (slot if actor else -1, actor, what)
        name = self._named.get(key)
        if name is None:
            self.names.refresh()
            if actor:
                name = f"{self.names.actor(actor - 1)}.{self.names.method(actor - 1, what)}"
            else:
                name = self.names.by_index.get(what, "?")
            self._named[key] = name
        if name not in self.functions and len(self.functions) >= FUNCTIONS_MAX:
            name = OTHERS
        return self.functions.setdefault(name, Lengths())
