"""Records a session's timeline while a page shows it, and draws the last seconds of it."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastrt._core.memory import trace
from fastrt.errors import FastrtError
from fastrt.observe.drawing import Drawing, Record
from fastrt.observe.timeline import Recording
from fastrt.store.client import Store

KEPT_S = 30.0
_RECORDS_MAX = 100_000  # of all processes; of a fast program that is less than KEPT_S
_POLL_S = 0.05  # a ring of 16,384 records is full after 0.1 s at the greatest rates
_LEASE_S = 5.0  # recording ends so long after the last look
_SLICES_MAX = 300  # that are sent to a page
_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Slice:
    """A task or call that a process ran: begin and end in nanoseconds."""

    start: int
    end: int
    name: str


class Recorder:
    """Records while it is looked at. One thread calls `look`, `slices` and `drawing`; another reads the rings.

    Args:
        store: the attachment to the session.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recording = Recording(store, from_now=True)
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._stop = threading.Event()
        trace.switch(store.client, True)
        self._thread = threading.Thread(target=self._read, name="fastrt-recorder", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """Whether it still records."""
        return self._thread.is_alive() and not self._stop.is_set()

    @property
    def lost(self) -> int:
        """Records that were overwritten before they were read."""
        return self._recording.lost

    def look(self) -> None:
        """Go on recording: a page is open."""
        self._looked_at = time.monotonic()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def slices(self) -> dict[int, list[Slice]]:
        """The kept tasks and calls, by client slot, in the order of their beginnings."""
        now, names = trace.now(), self._recording.names
        with self._lock:
            records = {slot: list(known.values()) for slot, known in self._recording.records.items()}
        found = {}
        for slot, some in records.items():
            tasks = [Slice(one.start, one.end or now, _name(one, names)) for one in some if one.kind == trace.TASK]
            if tasks:
                found[slot] = sorted(tasks, key=lambda one: one.start)
        return found

    def drawing(self) -> Drawing:
        """The kept records as slices."""
        with self._lock:
            return self._recording.drawing()

    def _read(self) -> None:
        try:
            while not self._stop.wait(_POLL_S) and time.monotonic() - self._looked_at < _LEASE_S:
                with self._lock:
                    self._recording.read()
                    oldest = trace.now() - int(KEPT_S * 1e9)
                    _forget(self._recording.records, oldest)
                    self._recording.samples = [one for one in self._recording.samples if one.at >= oldest]
        except FastrtError:
            return  # the session has ended
        finally:
            self._stop.set()
            try:
                trace.switch(self._store.client, False)
            except FastrtError:
                pass


def _forget(records: dict[int, dict[int, Record]], oldest: int) -> None:
    """Drop records that ended before `oldest`, and the oldest ones where there are too many."""
    most = _RECORDS_MAX // max(1, len(records))
    for known in records.values():
        excess = len(known) - most
        for number in list(known):
            if excess <= 0 and not 0 < known[number].end < oldest:
                break
            del known[number]
            excess -= 1


def _name(one: Record, names: Any) -> str:
    if not one.actor:
        return str(names.by_index.get(one.what, "task"))
    return f"{names.actor(one.actor - 1)}.{names.method(one.actor - 1, one.what)}"


def drawn(slices: Iterable[Slice], begin: int, end: int, most: int) -> list[list[Any]]:
    """The slices of one process between two times, as (start, length, colour, title) in parts of that time; pure.

    Slices that begin in the same small part of the time are drawn as one.

    Args:
        slices: in the order of their beginnings.
        begin, end: nanoseconds.
        most: the largest number of slices.
    """
    span = max(1, end - begin)
    found: list[list[Any]] = []
    piece, names = -1, {}  # type: ignore[var-annotated]
    for one in slices:
        if one.end < begin or one.start > end:
            continue
        start, stop = max(one.start, begin), min(one.end, end)
        here = (start - begin) * most // span
        if here != piece:
            piece, names = here, {}
            found.append([start, stop, names])
        names[one.name] = names.get(one.name, 0) + 1
        found[-1][1] = max(found[-1][1], stop)
    return [
        [round((start - begin) / span, 4), round((stop - start) / span, 4), colour(max(names, key=names.__getitem__)),
         _title(names, stop - start)]
        for start, stop, names in found
    ]  # fmt: skip


def colour(name: str) -> int:
    """The number of a function's colour, the same in all processes."""
    return zlib.crc32(name.encode()) % _COLOURS


def share_of(lanes: int) -> int:
    """How many slices one of so many lanes may have."""
    return max(10, _SLICES_MAX // max(1, lanes))


def _title(names: dict[str, int], length: int) -> str:
    words = ", ".join(
        name[:40] if count == 1 else f"{count:,} x {name[:40]}" for name, count in list(names.items())[:3]
    )
    return f"{words}: {length / 1e6:,.3g} ms"
