"""The records of a session's trace rings as slices on tracks, apart from any file format.

`chrome` and `perfetto` write a `Drawing`, `spans` exports it. Times are nanoseconds of the monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fastrt._core.memory import clients, trace
from fastrt.errors import AttachError
from fastrt.foreign_text import read_object
from fastrt.observe.listing import KINDS, Names
from fastrt.store import join
from fastrt.store.client import Store
from fastrt.store.messages import ListNodes, NodeList
from fastrt.worker.actor import NAMES_FOLDER

_VALUES = {trace.PUT: "put", trace.GET: "get", trace.SPILL: "spill", trace.RESTORE: "restore", trace.FETCH: "fetch"}
_ORDER = {"driver": 0, "daemon": 1, "worker": 2, "actor": 3, "tool": 4}
_SUBMIT_NS = 200  # drawn length of a submission, whose record has no end; in fact it takes longer
_DAEMON_S = 1.0


class Record(NamedTuple):
    """One record of a ring; see `fastrt._core.memory.trace.drain`."""

    number: int
    start: int
    end: int
    kind: int
    id: int
    what: int
    actor: int


class Sample(NamedTuple):
    """The state of the session at one time: tasks that are ready and not claimed, and bytes of the store in use."""

    at: int
    queued: int
    store_bytes: int


class Slice(NamedTuple):
    """One action of a process, or a moment (`is_point`: the end is the start).

    `process` is an index in `Drawing.processes`; `task` is the id of the task that was submitted or run, else 0.
    """

    process: int
    lane: int
    start: int
    end: int
    name: str
    category: str
    args: Mapping[str, str | int]
    task: int = 0
    is_point: bool = False


class Process:
    """The records of one process, from the time or times in which it used a client slot."""

    def __init__(self, pid: int, kind: str, name: str, alive: bool) -> None:
        self.pid, self.kind, self.name, self.alive = pid, kind, name, alive
        self.records: list[Record] = []
        self.methods: list[str] = []
        self.lanes: list[list[int]] = []

    @property
    def title(self) -> str:
        """Kind, name if it says more than the kind, and pid."""
        named = "" if self.name == self.kind or self.name.startswith("worker-") else self.name
        return " ".join(filter(None, [self.kind, named, str(self.pid)]))

    @property
    def rank(self) -> int:
        """Its place among the processes, for people."""
        return _ORDER.get(self.kind, 5)

    def lane_titles(self) -> list[str]:
        """The names of its lanes; calls that run at the same time lie on lanes of their own."""
        return [self.kind, *(f"at the same time {lane + 2}" for lane in range(len(self.lanes) - 1))]

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


@dataclass(slots=True)
class Drawing:
    """The actions of a node's processes.

    Attributes:
        node: the node's name; "" if its daemon did not answer.
        processes: those with records.
        slices: process by process; those of a process in the order of their beginnings, outer ones first.
        arrows: from the submission of a task to its first run, by the task's id.
        samples: the state of the session at each reading of the rings.
    """

    node: str = ""
    processes: list[Process] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    arrows: dict[int, tuple[Slice, Slice]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def running(self) -> Iterator[tuple[int, int]]:
        """The number of tasks and calls that run, tasks that wait inside of a `get` included: (time, number)."""
        edges = [(at, step) for one in self.slices if one.category in ("task", "actor")
                 for at, step in ((one.start, 1), (one.end, -1))]  # fmt: skip
        number, last = 0, -math.inf
        for at, step in sorted(edges):
            if at > last and last > 0:
                yield int(last), number
            number, last = number + step, at
        if edges:
            yield int(last), number


def draw(store: Store, records: Mapping[int, Mapping[int, Record]], names: Names, samples: list[Sample]) -> Drawing:
    """Draw the records of a session.

    Args:
        store: any process's attachment.
        records: per client slot, by number.
        names: the session's.
        samples: see `Drawing`.
    """
    drawing = Drawing(processes=list(_processes(store, records)), samples=list(samples))
    if not drawing.processes:
        return drawing
    drawing.node = _node(store)
    now = trace.now()
    submitted: dict[int, Slice] = {}
    ran: dict[int, Slice] = {}
    for number, process in enumerate(drawing.processes):
        last = max(max(one.start, one.end) for one in process.records)
        for one in sorted(process.records, key=lambda one: (one.start, -(one.end or now))):
            drawn = _slice(number, process, one, one.end or (now if process.alive else last), names)
            if drawn is None:
                continue
            drawing.slices.append(drawn)
            if one.kind == trace.SUBMIT:
                submitted[one.id] = drawn
            elif one.kind == trace.TASK:
                ran.setdefault(one.id, drawn)
    drawing.arrows = {task: (submitted[task], ran[task]) for task in submitted.keys() & ran.keys()}
    return drawing


def _node(store: Store) -> str:
    try:
        return str(join.inquire(store.socket_path, ListNodes(), NodeList, timeout_s=_DAEMON_S).here.name)
    except AttachError:
        return ""


def _slice(number: int, process: Process, one: Record, end: int, names: Names) -> Slice | None:
    """Convert a record; None if it is not drawn."""
    args: dict[str, str | int] = {}
    task = 0
    if one.kind == trace.TASK:
        name, category, task = _name(process, one, names), "actor" if one.actor else "task", one.id
        args = {"task_id": f"{one.id:016x}"}
        if not one.end:
            args["unfinished"] = "still running" if process.alive else "its process ended"
    elif one.kind == trace.SUBMIT:
        name, category, task = "submit", "submit", one.id
        args = {"task_id": f"{one.id:016x}"}
        # It must not end after the task that submitted it.
        end = min([one.start + _SUBMIT_NS, *(ends[-1] for ends in process.lanes if ends and ends[-1] > one.start)])
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
    if one.kind in (trace.GET, trace.PROCESS):
        return Slice(number, 0, one.start, one.start, name, category, args, is_point=True)
    lane, end = process.lane(one.start, end)
    return Slice(number, lane, one.start, end, name, category, args, task)


def _name(process: Process, one: Record, names: Names) -> str:
    if not one.actor:
        return names.by_index.get(one.what, "task")
    if process.methods:
        return f"{process.name}.{process.methods[one.what % len(process.methods)]}"
    return f"{names.actor(one.actor - 1)}.{names.method(one.actor - 1, one.what)}"


def _processes(store: Store, records: Mapping[int, Mapping[int, Record]]) -> Iterator[Process]:
    """Assign records to processes: a process that reuses a client slot first writes a PROCESS record into its ring."""
    there = {row["client"]: row for row in clients.table(store.client.segment)}
    folder = Path(store.socket_path).parent / NAMES_FOLDER
    for slot, known in records.items():
        rows = [known[number] for number in sorted(known)]
        if not rows:
            continue
        row = there.get(slot)
        tenants = [one.id for one in rows if one.kind == trace.PROCESS]
        process = None
        if rows[0].kind != trace.PROCESS:
            if row is not None and (not tenants or tenants == [row["pid"]]):
                process = Process(row["pid"], KINDS.get(row["kind"], "?"), row["name"], True)
            else:
                process = Process(slot, "?", "one that has ended", False)
        for one in rows:
            if one.kind == trace.PROCESS and (process is None or process.pid != one.id):
                if process is not None:
                    yield process
                alive = row is not None and row["pid"] == one.id
                name = row["name"] if row is not None and alive else ""
                process = Process(one.id, KINDS.get(one.what, "?"), name, alive)
            assert process is not None
            if not process.records:
                _read_names(process, folder)
            process.records.append(one)
        if process is not None:
            yield process


def _read_names(process: Process, folder: Path) -> None:
    """Read the names of an actor's class and methods, which its process has written to a file."""
    if process.kind == "actor":
        try:
            about = read_object((folder / str(process.pid)).read_bytes(), "the record of an actor", own=True)
            process.name, process.methods = str(about["class"]), [str(name) for name in about["methods"]]
        except (OSError, ValueError, KeyError, TypeError):
            return
