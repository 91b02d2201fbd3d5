"""A session's timeline in Chrome's trace format, which opens in https://ui.perfetto.dev.

Each process of the session is a track of slices: tasks and calls by name, waits inside of them, large values written
and read, spilled and fetched; an arrow leads from the submission of a task to its run. The data come from the
processes' trace rings, which keep the last 16,384 records of each process: enough for the end of a run that records all
the time (`trace`), and for a complete recording if the rings are read meanwhile (`Recording`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastrt._core.memory import clients, trace
from fastrt.errors import FastrtError
from fastrt.foreign_text import read_object
from fastrt.observe.chrome import Event, micros, write
from fastrt.observe.listing import KINDS, Names
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.worker.actor import NAMES_FOLDER

_ORDER = {"driver": 0, "daemon": 1, "worker": 2, "actor": 3, "tool": 4}
_VALUES = {trace.PUT: "put", trace.GET: "get", trace.SPILL: "spill", trace.RESTORE: "restore", trace.FETCH: "fetch"}
_SUBMIT_NS = 200  # drawn length of a submission, whose record has no end; in fact it takes longer


class Record(NamedTuple):
    """One record of a ring; see `fastrt._core.memory.trace.drain`."""

    number: int
    start: int
    end: int
    kind: int
    id: int
    what: int
    actor: int


class Recording:
    """Collects the records of a session's processes; it must be read repeatedly before they are overwritten.

    Args:
        store: any process's attachment.
        from_now: leave out earlier records.
    """

    def __init__(self, store: Store, from_now: bool = False) -> None:
        self._store = store
        self._since: dict[int, int] = {}  # per client: the number of the first record that is still to be read
        self.records: dict[int, dict[int, Record]] = {}  # per client, by number
        self.lost = 0
        self.names = Names(store)
        if from_now:
            for slot in range(clients.slots(store.client.segment)):
                self._since[slot] = trace.drain(store.client, slot, (1 << 64) - 1)[1]

    def read(self) -> None:
        """Read the new records. Call it before a process has written 16,384 new ones."""
        for slot in range(clients.slots(self._store.client.segment)):
            since = self._since.get(slot, 0)
            rows, following = trace.drain(self._store.client, slot, since)
            if not rows:
                continue
            known = self.records.setdefault(slot, {})
            self.lost += max(0, rows[0][0] - since) if known else 0
            for row in rows:
                known[row[0]] = Record(*row)
            # A record without an end is read again until it ends, or is overwritten.
            self._since[slot] = next((row[0] for row in rows if not row[2]), following)
        self.names.refresh()

    def events(self) -> list[Event]:
        """The collected records as events in the order of time."""
        return _drawn(self._store, self.records, self.names)


def record(store: Store, seconds: float, poll_s: float = 0.02) -> Recording:
    """Record for some time, even in a session that was started without recording.

    Args:
        store: any process's attachment.
        seconds: length of the recording.
        poll_s: time between two reads of the rings.
    """
    on = trace.enabled(store.client)
    recording = Recording(store, from_now=True)
    trace.switch(store.client, True)
    try:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(poll_s, left))
            recording.read()
    finally:
        trace.switch(store.client, on)
    recording.read()
    return recording


def timeline(filename: str | Path | None = None) -> list[Event]:
    """The recent timeline of this session's processes, for https://ui.perfetto.dev.

    The session must record: `fastrt.init(trace=True)`, or FASTRT_TRACE=1. `fastrt timeline --seconds` records any
    session.

    Args:
        filename: the JSON file to write; None writes none.
    Returns:
        The events of Chrome's trace format, in order of time. Each process has kept its last 16,384 records.
    Raises:
        FastrtError: the session does not record.
    Source:
        The semantics of `ray.timeline`.
    """
    store = store_client.require()
    if not trace.enabled(store.client):
        raise FastrtError(
            "this session does not record a timeline: start it with fastrt.init(trace=True) or FASTRT_TRACE=1, or "
            "run `fastrt timeline out.json --seconds 5` while it runs"
        )
    recording = Recording(store)
    recording.read()
    events = recording.events()
    if filename is not None:
        write(events, filename)
    return events


class _Process:
    """The records of one process, from the time or times in which it used a client slot."""

    def __init__(self, pid: int, kind: str, name: str, alive: bool) -> None:
        self.pid, self.kind, self.name, self.alive = pid, kind, name, alive
        self.records: list[Record] = []
        self.methods: list[str] = []
        self.lanes: list[list[int]] = []

    def lane(self, start: int, end: int) -> tuple[int, int]:
        """Choose the first lane in which a slice partly overlaps no other; return it and the slice's end there."""
        for number, open_ends in enumerate(self.lanes):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                open_ends.append(end)
                return number, end
        self.lanes.append([end])
        return len(self.lanes) - 1, end


def _drawn(store: Store, records: dict[int, dict[int, Record]], names: Names) -> list[Event]:
    processes = list(_processes(store, records))
    times = [one.start for process in processes for one in process.records]
    if not times:
        return []
    zero, now = min(times), trace.now()
    submitted: dict[int, tuple[float, int, int]] = {}  # task -> where its arrow begins
    ran: dict[int, tuple[float, int, int]] = {}
    events: list[Event] = []
    for process in processes:
        last = max(max(one.start, one.end) for one in process.records)
        for one in sorted(process.records, key=lambda one: (one.start, -(one.end or now))):
            end = one.end or (now if process.alive else last)
            event = _event(process, one, end, zero, names)
            if event is None:
                continue
            events.append(event)
            place = (event["ts"], event["pid"], event["tid"])
            if one.kind == trace.SUBMIT:
                submitted[one.id] = place
            elif one.kind == trace.TASK:
                ran.setdefault(one.id, place)
    for task in submitted.keys() & ran.keys():
        for phase, (ts, pid, tid) in (("s", submitted[task]), ("f", ran[task])):
            arrow = {"ph": phase, "id": f"{task:x}", "name": "submit", "cat": "submit"}
            events.append({**arrow, "pid": pid, "tid": tid, "ts": ts, **({"bp": "e"} if phase == "f" else {})})
    events.sort(key=lambda event: event["ts"])
    return [*_titles(processes), *events]


def _event(process: _Process, one: Record, end: int, zero: int, names: Names) -> Event | None:
    """Convert a record to an event; None if it is not drawn."""
    args: dict[str, Any] = {}
    if one.kind == trace.TASK:
        name, category = _name(process, one, names), "actor" if one.actor else "task"
        args = {"task_id": f"{one.id:016x}"}
        if not one.end:
            args["unfinished"] = "still running" if process.alive else "its process ended"
    elif one.kind == trace.SUBMIT:
        name, category, end = "submit", "submit", one.start + _SUBMIT_NS
        args = {"task_id": f"{one.id:016x}"}
    elif one.kind == trace.WAIT:
        name, category = "wait", "wait"
        if one.id:
            args = {"object_id": f"{one.id:016x}"}
    elif one.kind in _VALUES:
        name, category = _VALUES[one.kind], "object"
        args = {"object_id": f"{one.id:016x}", "KiB": one.what}
        if not one.end:
            return None
    elif one.kind == trace.PROCESS:
        name, category, args = "joined", "process", {"pid": one.id}
    else:
        return None
    event: Event = {"name": name, "cat": category, "pid": process.pid, "args": args}
    event["ts"] = micros(one.start - zero)
    if one.kind in (trace.GET, trace.PROCESS):
        return {**event, "ph": "i", "s": "t", "tid": 0}
    if one.kind == trace.SUBMIT:  # it must not end after the task that submitted it
        end = min([end, *(ends[-1] for ends in process.lanes if ends and ends[-1] > one.start)])
    lane, end = process.lane(one.start, end)
    return {**event, "ph": "X", "tid": lane, "dur": micros(end - one.start)}


def _name(process: _Process, one: Record, names: Names) -> str:
    if not one.actor:
        return names.by_index.get(one.what, "task")
    if process.methods:
        return f"{process.name}.{process.methods[one.what % len(process.methods)]}"
    return f"{names.actor(one.actor - 1)}.{names.method(one.actor - 1, one.what)}"


def _processes(store: Store, records: dict[int, dict[int, Record]]) -> Iterator[_Process]:
    """Assign records to processes: a process that reuses a client slot first writes a PROCESS record into its ring."""
    there = {row["client"]: row for row in clients.table(store.client.segment)}
    folder = Path(store.socket_path).parent / NAMES_FOLDER
    for slot, known in records.items():
        rows = [known[number] for number in sorted(known)]
        row = there.get(slot)
        tenants = [one.id for one in rows if one.kind == trace.PROCESS]
        process = None
        if rows[0].kind != trace.PROCESS:
            if row is not None and (not tenants or tenants == [row["pid"]]):
                process = _Process(row["pid"], KINDS.get(row["kind"], "?"), row["name"], True)
            else:
                process = _Process(slot, "?", "one that has ended", False)
        for one in rows:
            if one.kind == trace.PROCESS and (process is None or process.pid != one.id):
                if process is not None:
                    yield process
                alive = row is not None and row["pid"] == one.id
                name = row["name"] if row is not None and alive else ""
                process = _Process(one.id, KINDS.get(one.what, "?"), name, alive)
            assert process is not None
            if not process.records:
                _read_names(process, folder)
            process.records.append(one)
        if process is not None:
            yield process


def _read_names(process: _Process, folder: Path) -> None:
    """Read the names of an actor's class and methods, which its process has written to a file."""
    if process.kind == "actor":
        try:
            about = read_object((folder / str(process.pid)).read_bytes(), "the record of an actor", own=True)
            process.name, process.methods = str(about["class"]), [str(name) for name in about["methods"]]
        except (OSError, ValueError, KeyError, TypeError):
            return


def _titles(processes: list[_Process]) -> Iterator[Event]:
    """Metadata events: the names and the order of tracks."""
    for process in processes:
        named = "" if process.name == process.kind or process.name.startswith("worker-") else process.name
        title = " ".join(filter(None, [process.kind, named, str(process.pid)]))
        base = {"ph": "M", "pid": process.pid, "tid": 0, "ts": 0}
        yield {**base, "name": "process_name", "args": {"name": title}}
        yield {**base, "name": "process_sort_index", "args": {"sort_index": _ORDER.get(process.kind, 5)}}
        for lane in range(max(1, len(process.lanes))):
            title = process.kind if lane == 0 else f"at the same time {lane + 1}"
            yield {**base, "tid": lane, "name": "thread_name", "args": {"name": title}}
