"""The event log of a scheduler: a restarted scheduler replays it and continues where the killed one stopped.

Each accepted event is a record, with a checksum of its effects. Replayed, it must have the same effects; a log where it
does not was written by another version, and is rejected. From time to time a snapshot replaces the log, and the process
continues with the state loaded from that snapshot, so that a later process that loads it decides in the same way. A
snapshot is written when the log has grown larger than the previous snapshot: its cost is spread over as many events.

Orders to stores (aliases, deallocations) are separate records until the store has answered, and are sent again after a
restart; so are deliveries under way and calls that no worker has confirmed. All of them may then arrive twice, which
does no harm.

Source: the records of `fastrt.coordination` in `fastrt.durable`. Here events are kept instead of changes, because an
event is shorter than the records it changes.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from fastrt.durable import DamagedStateError, DiskFullError, Journal, StateDirectoryError
from fastrt.foreign_text import STATE_BYTES_MAX, read_json
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Effect, Event
from fastrt.scheduler.snapshot import dump, load
from fastrt.scheduler.state import SchedulerState, Settings
from fastrt.scheduler.wire import METHODS, parse_request

_log = logging.getLogger(__name__)

_FORMAT = 2
_FACTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (ev.WorkerLost, ev.ObjStoreLost, ev.InvokeTaken, ev.InvokeRefused, ev.DeliveryFailed)
}
_SNAPSHOT_BYTES_MIN = 4 << 20
# Bytes of a record on disk beside its value.
_RECORD_BYTES = 64

Order = ev.NotifyAlias | ev.DeallocateObject


class EventLog:
    """The records of one scheduler. Not thread-safe.

    Args:
        journal: the store of the records.
        snapshot_bytes_min: a log shorter than this is not replaced by a snapshot.

    Attributes:
        losses: records that were lost and accepted as lost; see `Journal`.

    Raises:
        StateDirectoryError: the records have another format, or are inconsistent.
    """

    def __init__(self, journal: Journal, settings: Settings, snapshot_bytes_min: int = _SNAPSHOT_BYTES_MIN) -> None:
        self._journal = journal
        self._settings = settings
        self._snapshot_bytes_min = snapshot_bytes_min
        self._records: dict[tuple[str, str], bytes | None] = {}
        self._next_event = 0
        self._next_order = 0
        self._log_bytes = 0
        self._snapshot_bytes = 0
        self.losses = journal.losses
        self.orders: dict[int, Order] = {}  # sent and not answered, by number
        self.state = self._restore()

    def keep(self, event: Event, wire: tuple[str, bytes] | None, effects: Sequence[Effect]) -> None:
        """Keep an accepted event for the next write.

        Args:
            event: the event.
            wire: path and body of its request, None for a fact that this process noticed.
            effects: its effects.
        """
        key = f"{self._next_event:016d}"
        self._next_event += 1
        record = _packed(event, wire, effects)
        self._log_bytes += len(record) + _RECORD_BYTES
        self._records["event", key] = record

    def order(self, order: Order) -> int:
        """Keep an order to a store until it is answered; returns the order's number, for `answered`."""
        number = self._next_order
        self._next_order += 1
        self.orders[number] = order
        self._records["order", str(number)] = json.dumps([type(order).__name__, *ev.parts(order)]).encode()
        return number

    def answered(self, number: int) -> None:
        """Drop an order that its store has carried out, or whose store is lost."""
        if self.orders.pop(number, None) is not None:
            if ("order", str(number)) in self._records:
                del self._records["order", str(number)]  # not written yet
            else:
                self._records["order", str(number)] = None

    def write(self) -> bool:
        """Write the kept records; they are durable when this returns.

        Returns:
            Whether a snapshot was written, so that `state` is another object from now on.
        Raises:
            DiskFullError: there is no room; the records are kept for the next try.
            StateDirectoryError: they could not be written.
        """
        if not self._records:
            return False
        due = self._log_bytes > max(self._snapshot_bytes_min, self._snapshot_bytes)
        due = due and self._journal.has_room(2 * self._snapshot_bytes + self._log_bytes)
        if due:
            self._records.update(self._snapshot())
        try:
            self._journal.write(self._records)
        except DiskFullError as error:
            if due:  # `state` was loaded from the snapshot already, so the records cannot be tried again
                raise StateDirectoryError(str(error)) from error
            raise
        self._records = {}
        return due

    def has_room(self, nbytes: int) -> bool:
        """Whether a request of so many bytes can be kept; see `Journal.has_room`."""
        return self._journal.has_room(nbytes + sum(len(value or b"") for value in self._records.values()))

    def close(self) -> None:
        """Release the state directory."""
        self._journal.close()

    def _snapshot(self) -> dict[tuple[str, str], bytes | None]:
        """The records that replace all events so far by a snapshot; `state` is loaded from it."""
        saved = dump(self.state)
        self.state = load(self._settings, saved)
        self._snapshot_bytes = sum(map(len, saved.values()))
        self._log_bytes = 0
        for key in [key for key in self._records if key[0] == "event"]:
            del self._records[key]
        records: dict[tuple[str, str], bytes | None] = {
            ("event", key): None for kind, key, _ in self._journal.records() if kind == "event"
        }
        records.update({("snapshot", name): data for name, data in saved.items()})
        records["about", "scheduler"] = self._about()
        return records

    def _about(self) -> bytes:
        about = {"format": _FORMAT, "next_event": self._next_event, "next_order": self._next_order}
        return json.dumps(about).encode()

    def _restore(self) -> SchedulerState:
        saved: dict[str, bytes] = {}
        log: list[tuple[str, bytes]] = []
        for kind, key, value in self._journal.records():
            if kind == "snapshot":
                saved[key] = value
            elif kind == "event":
                log.append((key, value))
            elif kind == "order":
                self.orders[int(key)] = _order(value)
            elif kind == "about":
                self._take_up(read_json(value, "a record of the scheduler", own=True, bytes_max=STATE_BYTES_MAX))
        if not saved and not log:
            self._records["about", "scheduler"] = self._about()
        self.orders = dict(sorted(self.orders.items()))
        self._next_order = max(self._next_order, *self.orders, -1) + (1 if self.orders else 0)
        try:
            state = load(self._settings, saved) if saved else SchedulerState(self._settings)
        except (ValueError, KeyError) as error:
            raise StateDirectoryError(f"The snapshot in {self._journal.directory} is damaged: {error}.") from error
        self._snapshot_bytes = sum(map(len, saved.values()))
        log.sort()
        whole = self._until_a_gap(log)
        for key, record in whole:
            self._next_event = int(key) + 1
            self._log_bytes += len(record) + _RECORD_BYTES
            if not _replayed(state, record):
                raise StateDirectoryError(
                    f"Event {key} in {self._journal.directory} has other effects than when it was written. Use "
                    "the fastrt that wrote it, or another state directory."
                )
        return state

    def _until_a_gap(self, log: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """The events before the first lost one: those behind it cannot be replayed without it."""
        first = self._next_event
        whole = [event for number, event in enumerate(log, first) if int(event[0]) == number]
        behind = log[len(whole) :]
        if behind:
            words = (
                f"event {first + len(whole)} of the scheduler is lost, and {len(behind)} events behind it cannot be "
                "replayed without it"
            )
            if not self._journal.accept_loss:
                raise DamagedStateError(f"The state in {self._journal.directory} is damaged: {words}.")
            self.losses.append(words)
            _log.warning("going on after a loss: %s", words)
            self._journal.write({("event", key): None for key, _ in behind})
        return whole

    def _take_up(self, about: dict[str, int]) -> None:
        if about["format"] != _FORMAT:
            raise StateDirectoryError(
                f"{self._journal.directory} holds a scheduler's log of format {about['format']}, and this fastrt knows "
                f"format {_FORMAT}. Use the fastrt that wrote it, or another state directory."
            )
        self._next_event, self._next_order = about["next_event"], about["next_order"]


def _packed(event: Event, wire: tuple[str, bytes] | None, effects: Iterable[Effect]) -> bytes:
    """Checksum of the effects, then a request's path and body, or a fact as JSON."""
    mark = _checksum(effects).to_bytes(4, "little")
    if wire is not None:
        path, body = wire
        return mark + path.encode() + b"\0" + body
    name = type(event).__name__
    if name not in _FACTS:
        raise TypeError(f"{name} cannot be kept as a fact; send it as a request.")
    return mark + b"\0" + json.dumps([name, *ev.parts(event)]).encode()


def _replayed(state: SchedulerState, record: bytes) -> bool:
    """Replay one event; False when its effects differ."""
    path, _, rest = record[4:].partition(b"\0")
    event: Event
    if path:
        if path.decode() not in METHODS:
            return False
        event = parse_request(path.decode(), rest, 0)
    else:
        name, *values = read_json(rest, "an event of the scheduler", own=True, bytes_max=STATE_BYTES_MAX)
        event = _FACTS[name](*values)
    return _checksum(state.handle(event)).to_bytes(4, "little") == record[:4]


def _checksum(effects: Iterable[Effect]) -> int:
    """The checksum of effects, without the numbers of calls, which differ each time."""
    parts = [
        (type(e).__name__, _plain(e.value) if isinstance(e, ev.Answer) else [_plain(part) for part in ev.parts(e)])
        for e in effects
    ]
    return zlib.crc32(repr(parts).encode())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, range | tuple | list) else value


def _order(value: bytes) -> Order:
    name, *values = read_json(value, "a record of the scheduler", own=True, bytes_max=STATE_BYTES_MAX)
    return ev.NotifyAlias(*values) if name == "NotifyAlias" else ev.DeallocateObject(*values)
