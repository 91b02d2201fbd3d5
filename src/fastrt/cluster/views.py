"""The members of a cluster as the head and the nodes see them: pure state, without I/O and without a clock.

`Views` is the head's part: reports come in, and the views that are due go out, each with the changes that its stream
has not seen. `Members` is the reader's part: it applies these views.

The head sends joins and departures to all nodes at once. The load of the nodes changes all the time: if each change
went to each node, bytes would grow with the square of the nodes. So the head serves one stream every `_PACE_S` with
the load that has changed since it was served last, which makes the bytes proportional to the number of nodes. Nodes
that have work to place (`Report.looking`) wait in a line of their own, which is as fast but mostly short.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastrt.cluster.membership import refused_report
from fastrt.net.grpc.descriptors import message_set

_SET = message_set("node")
_View, _Report = _SET.message("fastrt.node.View"), _SET.message("fastrt.node.Report")
# Times the number of nodes: least times between two events of all nodes or of one. So the head writes at most 2,000
# views with joins or departures a second and reads at most 2,000 reports, and a node reads the load of at most 2,000.
_EACH_S = 0.0005
_GATHER_S = 0.02  # joins and departures within this time are sent in one view
_PACE_S = 0.01  # between two streams of a line that are served with load
_REPORT_S = 0.1  # between two reports of one node
_FULL, _LOAD, _LOAD_AND_TOTAL = range(3)  # forms of a row
_ENTRIES_MIN = 64


class Refused(NamedTuple):
    """Why a report was refused; `is_taken`: it is valid, but its node is a member at another address."""

    why: str
    is_taken: bool


class _Row:
    """A member: its last report, the stream that it came on, and the versions at which it has changed."""

    def __init__(self, report: Any, stream: int) -> None:
        self.report = report
        self.stream = stream
        self.member_at = self.load_at = self.total_at = 0
        self.wires: list[bytes | None] = [None, None, None]

    def wire(self, form: int) -> bytes:
        """Return the bytes of a View with this row alone: such bytes joined are the View with all of the rows."""
        found = self.wires[form]
        if found is None:
            report = self.report
            if form == _FULL:
                view = _View(node=[report])
            else:
                total = report.total if form == _LOAD_AND_TOTAL else None
                row = _Report(node=report.node, idle=report.idle, queued=report.queued, free=report.free, total=total)
                view = _View(load=[row])
            found = self.wires[form] = view.SerializeToString()
        return found


@dataclass(eq=False)
class _Stream:
    """A node's stream, and the versions up to which it has received the members and their load; -1: nothing."""

    number: int
    node: str
    line: _Line
    members_at: int = -1
    load_at: int = -1
    served_at: float = 0.0
    is_busy: bool = False


_Entry = tuple[float, int, _Stream]  # when the stream was served, its number, the stream


@dataclass(eq=False)
class _Line:
    """The streams that are served with load in turn, the one that was served longest ago first.

    A later service always brings a stream up to a later version. So if the first stream has nothing to receive, none
    has. A stream that has ended, is in the other line by now, or was served by a view of the members leaves an old
    entry.
    """

    next_at: float = 0.0
    _heap: list[_Entry] = field(default_factory=list)
    _most: int = _ENTRIES_MIN

    def add(self, stream: _Stream) -> None:
        heapq.heappush(self._heap, (stream.served_at, stream.number, stream))
        if len(self._heap) > self._most:  # drop the old entries: their number has no other bound
            self._heap = list({entry[1]: entry for entry in self._heap if self._is_present(entry)}.values())
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _ENTRIES_MIN

    def first(self) -> _Stream | None:
        """Return the stream to be served next."""
        while self._heap:
            if self._is_present(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def _is_present(self, entry: _Entry) -> bool:
        served_at, _, stream = entry
        return stream.line is self and not stream.is_busy and served_at == stream.served_at


class Views:
    """The head's state: the members, and what each stream has received.

    Streams are numbers that the caller chooses; a number is not used again.

    Args:
        cluster: the id of this run of the head.
        first: the address of the first head, if this is a standby, else empty.
    """

    def __init__(self, cluster: str, first: str = "") -> None:
        self.cluster = cluster
        self.first = first
        self._changes: bytes = _View(cluster=cluster, changes=True).SerializeToString()
        self._members: dict[str, _Row] = {}
        self._by_member: dict[str, _Row] = {}  # in the order in which they joined or changed more than their load
        self._by_load: dict[str, _Row] = {}  # in the order in which their load has changed since
        self._left: dict[str, int] = {}  # departures that some stream may not have received
        self._streams: dict[int, _Stream] = {}
        self._looking, self._others, self._gone = _Line(), _Line(), _Line()
        self._version = self._members_at = self._load_at = 0
        self._is_round_open = False  # whether some stream has not received all members
        self._round_at = 0.0

    @property
    def report_s(self) -> float:
        """The time between two reports of one node that the head requests."""
        return max(_REPORT_S, _EACH_S * len(self._members))

    # ---- events ----

    def report(self, number: int, report: Any) -> Refused | None:
        """Take a report that has arrived on a stream; return why it is refused."""
        refused = self._refused(number, report)
        if refused is not None:
            return refused
        row = self._members.get(report.node)
        if row is None:
            row = self._members[report.node] = _Row(report, number)
            self._member_changed(row)
        else:
            self._take(row, report, number)
        stream = self._streams.get(number)
        line = self._looking if report.looking else self._others
        if stream is None:
            self._streams[number] = _Stream(number, report.node, line)
            self._is_round_open = True
        elif stream.line is not line:
            stream.line = line
            if not stream.is_busy:
                line.add(stream)
        return None

    def _refused(self, number: int, report: Any) -> Refused | None:
        there = self._members.get(report.node)
        stream = self._streams.get(number)
        why = refused_report(report, None if there is None else there.report)
        if why is None and stream is not None and stream.node != report.node:
            why = f"this stream belongs to node {stream.node}, but the report names node {report.node}"
        if why is not None:
            return Refused(why, False)
        # A node that lost its stream joins again with the same address.
        if there is not None and there.stream != number and there.report.address != report.address:
            return Refused(f"node {report.node} is a member already, at {there.report.address}", True)
        return None

    def _take(self, row: _Row, report: Any, number: int) -> None:
        before, row.report, row.stream = row.report, report, number
        total_changed = not _equal(before.total, report.total)
        if _identity(before) != _identity(report) or (total_changed and not report.total):
            row.wires = [None, None, None]
            self._member_changed(row)
        elif (
            total_changed
            or (before.idle, before.queued) != (report.idle, report.queued)
            or not _equal(before.free, report.free)
        ):
            row.wires = [None, None, None]
            self._version += 1
            self._by_load.pop(report.node, None)
            self._by_load[report.node] = row
            row.load_at = self._load_at = self._version
            if total_changed:
                row.total_at = self._version

    def _member_changed(self, row: _Row) -> None:
        node = row.report.node
        self._version += 1
        row.member_at = self._members_at = self._version
        self._by_load.pop(node, None)  # all get its whole report
        self._by_member.pop(node, None)
        self._by_member[node] = row
        self._is_round_open = True

    def leave(self, number: int) -> None:
        """Remove a stream that has ended, and its node if the node has not joined again meanwhile."""
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.line = self._gone
        row = self._members.get(stream.node)
        if row is not None and row.stream == number:
            del self._members[stream.node], self._by_member[stream.node]
            self._by_load.pop(stream.node, None)
            self._version += 1
            self._members_at = self._left[stream.node] = self._version
            self._is_round_open = True

    def written(self, number: int) -> None:
        """Note that the last view of a stream is written: it may receive the next one."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.is_busy = False
            stream.line.add(stream)
            self._is_round_open |= stream.members_at < self._members_at

    # ---- views ----

    def next_at(self) -> float | None:
        """Return when the next view is due: a time that may have passed; None: nothing has changed."""
        found = self._round_at if self._is_round_open else None
        for line in (self._looking, self._others):
            stream = line.first()
            if stream is not None and stream.load_at < self._load_at:
                at = max(line.next_at, stream.served_at + _EACH_S * len(self._members))
                found = at if found is None else min(found, at)
        return found

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Return the views to write now, as serialised messages by their streams; each is answered by `written`.

        Args:
            now: seconds of any clock that does not go back.
        """
        found = self._round(now) if self._is_round_open and now >= self._round_at else []
        for line in (self._looking, self._others):
            stream = line.first() if now >= line.next_at else None
            if stream is not None and now >= stream.served_at + _EACH_S * len(self._members):
                rows = self._load_since(stream.load_at)
                self._serve_load(stream, now)
                if rows:
                    line.next_at = now + _PACE_S
                    stream.is_busy = True
                    found.append((stream.number, b"".join([self._changes, *rows])))
                else:
                    line.add(stream)
        return found

    def _round(self, now: float) -> list[tuple[int, bytes]]:
        """Bring all streams up to the current members: many have seen the same version, and get the same bytes."""
        self._is_round_open = False
        self._round_at = now + max(_GATHER_S, _EACH_S * len(self._streams))
        cache: dict[int, bytes] = {}
        found = []
        oldest = self._members_at
        for stream in self._streams.values():
            if stream.members_at >= self._members_at:
                continue
            if stream.is_busy:
                oldest = min(oldest, stream.members_at)
                continue
            if stream.members_at not in cache:
                cache[stream.members_at] = self._members_since(stream.members_at)
            found.append((stream.number, cache[stream.members_at]))
            if stream.members_at < 0:
                self._serve_load(stream, now)
            stream.members_at = self._members_at
            stream.is_busy = True
        self._left = {node: version for node, version in self._left.items() if version > oldest}
        return found

    def _serve_load(self, stream: _Stream, now: float) -> None:
        stream.load_at, stream.served_at = self._version, now

    def _members_since(self, version: int) -> bytes:
        is_full = version < 0
        left = [] if is_full else [node for node, at in self._left.items() if at > version]
        view = _View(cluster=self.cluster, changes=not is_full, left=left, report_ms=round(1000 * self.report_s))
        if is_full:
            view.first = self.first
        parts = [view.SerializeToString()]
        for row in reversed(self._by_member.values()):
            if row.member_at <= version:
                break
            parts.append(row.wires[_FULL] or row.wire(_FULL))
        return b"".join(parts)

    def _load_since(self, version: int) -> list[bytes]:
        parts = []
        for row in reversed(self._by_load.values()):
            if row.load_at <= version:
                break
            form = _LOAD if row.total_at <= version else _LOAD_AND_TOTAL
            parts.append(row.wires[form] or row.wire(form))
        return parts


def _identity(report: Any) -> tuple[Any, ...]:
    return (
        report.address,
        report.native,
        report.standby,
        report.name,
        report.workers,
        report.reads_output,
        dict(report.labels),
    )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two maps are equal; their class compares them at four times the cost."""
    return len(one) == len(other) and all(other.get(name) == parts for name, parts in one.items())


class Change(NamedTuple):
    """The members that a view has changed, and those that have left; `is_full`: there are no others."""

    is_full: bool
    changed: list[Any]
    left: list[str]


class Members:
    """The members as a node knows them from the views of its head.

    Args:
        on_invalid: called with the reason for each invalid report; the report is ignored.

    Attributes:
        reports: the last report of each member.
        report_s: the time between two reports of this node that the head requests.
    """

    def __init__(self, on_invalid: Any) -> None:
        self._on_invalid = on_invalid
        self.reports: dict[str, Any] = {}
        self.report_s = _REPORT_S

    def apply(self, view: Any) -> Change:
        """Apply a view; return what it has changed. The head has checked each report, but no node relies on that."""
        if view.report_ms:
            self.report_s = max(_REPORT_S, view.report_ms / 1000)
        rows = {report.node: report for report in view.node if self._is_valid(report)}
        if not view.changes:
            left = [node for node in self.reports if node not in rows]
            self.reports = rows
            return Change(True, list(rows.values()), left)
        left = [node for node in view.left if self.reports.pop(node, None) is not None and node not in rows]
        for load in view.load:
            before = rows.get(load.node) or self.reports.get(load.node)
            after = None if before is None else _with_load(before, load)
            if after is not None and self._is_valid(after):
                rows[load.node] = after
        self.reports.update(rows)
        return Change(False, list(rows.values()), left)

    def _is_valid(self, report: Any) -> bool:
        why = refused_report(report)
        if why is not None:
            self._on_invalid(why)
        return why is None


def _with_load(report: Any, load: Any) -> Any:
    """Return a member's report with its present load."""
    after = _Report()
    after.CopyFrom(report)
    after.idle, after.queued = load.idle, load.queued
    fields: Iterable[tuple[Any, Any]] = ((after.free, load.free), (after.total, load.total or report.total))
    for field_, parts in fields:
        field_.clear()
        field_.update(parts)
    return after
