"""Reads rows, log lines, memory and stacks of other nodes, by this node's uplink: no worker there takes part.

A node that does not answer in time is named, and the rows of the others are there. Answers of other nodes
are parsed here, with bounds.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastrt.cluster.questions import FORWARDED, ROWS_BYTES_MAX, SOCKET, Answer, Question
from fastrt.errors import AttachError, FastrtError
from fastrt.foreign_text import ForeignTextError, read_json
from fastrt.node.log_files import LogLine, Page
from fastrt.observe.answers import DEBUG, GROUPS, LOG, MEMORY, PROCESSES, ROWS_MAX, STACK, STOPS
from fastrt.observe.debugging import Said, Terminal, Waiting
from fastrt.observe.listing import Row
from fastrt.observe.memory import Summary
from fastrt.observe.stacks import Process, Stack
from fastrt.store import join
from fastrt.store.messages import AskNode, NodePage
from fastrt.tasks.marks import Source

ANSWER_S = 5.0
STACK_S = 20.0  # a busy machine needs a second
_AT_ONCE = 16  # nodes
_SLACK_S = 2.0  # beyond the answer's time, for this node's uplink
ONCE = Terminal("", "another question", stays=False)
_T = TypeVar("_T")
_BY_BUNDLE = ("bundles", "bundles_to_node_id")  # JSON makes texts of their numbers
_FORWARDED_TYPES = (bool, str, int, str)
_LINE_TYPES = (float, bool, int, int, str, int, int, str, str)  # as `answers` writes a line


class NodeSilentError(AttachError):
    """Another node did not answer a question. The message says why; the node may be stopped, lost or too busy."""


@dataclass
class NodeRows:
    """The rows of one node.

    Attributes:
        node: its NodeID.
        name: its name.
        rows: those that came.
        total: all rows of the node that match the filters; None: not counted.
        error: why rows are missing; "": none are.
    """

    node: str
    name: str
    rows: list[Row] = field(default_factory=list)
    total: int | None = None
    error: str = ""


def ask(socket_path: str, node: str, question: Question, timeout_s: float = ANSWER_S) -> Answer:
    """Ask another node for one page.

    Args:
        socket_path: of this node's daemon.
        node: the other node's NodeID.
        question: what to ask.
        timeout_s: how long it has to answer.
    Returns:
        The page as it came.
    Raises:
        NodeSilentError: it did not answer.
    """
    path = str(Path(socket_path).parent / SOCKET)
    message = AskNode(node, *question, math.ceil(timeout_s * 1000))
    try:
        page = join.inquire(path, message, NodePage, timeout_s + _SLACK_S)
    except AttachError as exc:
        raise NodeSilentError(f"the uplink of this node does not answer: {exc}") from None
    if page.error:
        raise NodeSilentError(page.error)
    return Answer(*vars(page).values())


def read(
    socket_path: str, nodes: Mapping[str, str], kind: str, filters: Mapping[str, Any], limit: int, timeout_s: float
) -> list[NodeRows]:
    """Read a table of several nodes at once.

    Args:
        socket_path: of this node's daemon.
        nodes: their names by NodeID.
        kind, filters: as for `reading.page`.
        limit: the largest number of rows of each node; 0: all.
        timeout_s: how long a node has for each page of `ROWS_MAX` rows.
    Returns:
        The rows of each node, in the order of `nodes`.
    """

    def read_one(node: str) -> NodeRows:
        found = NodeRows(node, nodes[node])
        try:
            _read_pages(socket_path, found, kind, json.dumps(dict(filters)), limit, timeout_s)
        except (NodeSilentError, ForeignTextError) as exc:
            found.error = f"{exc}{f', after {len(found.rows)} rows' if found.rows else ''}"
        return found

    with ThreadPoolExecutor(_AT_ONCE, "fastrt-asks") as threads:
        return list(threads.map(read_one, nodes))


def forwarded(socket_path: str, nodes: Iterable[str], timeout_s: float) -> dict[tuple[str, str], tuple[str, str]]:
    """Read which tasks and calls nodes run for others; what a node does not answer in time is left out.

    Args:
        socket_path: of this node's daemon.
        nodes: NodeIDs, also that of this node.
        timeout_s: as for `read`.
    Returns:
        Tasks by the copy that runs: (NodeID, id of the first result) of it, and of the task that its node forwarded.
    """
    question = Question(FORWARDED, "{}", "", 0)
    answers = of_each(nodes, lambda node: _parse(ask(socket_path, node, question, timeout_s)))
    sent: dict[tuple[str, str, int], tuple[str, str]] = {}
    ran: dict[tuple[str, str, int], tuple[str, str]] = {}
    for node, rows in answers.items():
        for row in () if isinstance(rows, FastrtError) else rows:
            if isinstance(row, list) and tuple(map(type, row)) == _FORWARDED_TYPES:
                away, peer, number, objref = row
                (sent if away else ran)[(node, peer, number) if away else (peer, node, number)] = node, objref
    return {there: sent[key] for key, there in ran.items() if key in sent}


def _read_pages(socket_path: str, found: NodeRows, kind: str, filters: str, limit: int, timeout_s: float) -> None:
    after = ""
    while True:
        wanted = limit - len(found.rows) if limit else ROWS_MAX
        answer = ask(socket_path, found.node, Question(kind, filters, after, min(wanted, ROWS_MAX)), timeout_s)
        if not after and answer.total >= 0:
            found.total = answer.total
        rows = _parse(answer)
        if not all(isinstance(row, dict) for row in rows):
            raise ForeignTextError("its rows are no objects")
        found.rows += rows
        is_stuck = answer.after == after
        after = answer.after
        if answer.is_end or is_stuck or (limit and len(found.rows) >= limit):
            del found.rows[limit or len(found.rows) :]
            if answer.is_end:
                found.total = len(found.rows)
            return


def of_each(nodes: Iterable[str], read: Callable[[str], _T]) -> dict[str, _T | FastrtError]:
    """Call a function for several nodes at once, in threads.

    Args:
        nodes: their NodeIDs.
        read: asks one of them, such as `read_memory`.
    Returns:
        The result for each node, or the error because of which there is none.
    """

    def read_one(node: str) -> _T | FastrtError:
        try:
            return read(node)
        except FastrtError as exc:
            return exc

    some = list(nodes)
    with ThreadPoolExecutor(_AT_ONCE, "fastrt-asks") as threads:
        return dict(zip(some, threads.map(read_one, some), strict=True))


def read_memory(socket_path: str, node: str, timeout_s: float = ANSWER_S) -> Summary:
    """Read who holds the memory of another node's store: the largest lines and processes.

    Args:
        socket_path: of this node's daemon.
        node: the other node's NodeID.
        timeout_s: how long it has to answer.
    Raises:
        NodeSilentError: it did not answer.
        ForeignTextError: it sent no summary.
    """
    return Summary.from_rows(_parse(ask(socket_path, node, Question(MEMORY, "{}", "", 0), timeout_s)))


def read_groups(socket_path: str, node: str, timeout_s: float = ANSWER_S) -> list[dict[str, Any]]:
    """Read the placement groups that were made on another node; arguments as for `read_memory`.

    Returns:
        Rows of `placement_group_table`, with `name`.
    Raises:
        NodeSilentError: it did not answer.
        ForeignTextError: it sent something else.
    """
    rows = _parse(ask(socket_path, node, Question(GROUPS, "{}", "", 0), timeout_s))
    try:
        return [{**row, **{part: {int(k): v for k, v in row[part].items()} for part in _BY_BUNDLE}} for row in rows]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ForeignTextError("an answer of another node holds no placement groups") from None


def read_processes(socket_path: str, node: str, timeout_s: float = ANSWER_S) -> list[Process]:
    """List the processes of another node that run user code; arguments and errors as for `read_memory`."""
    return [
        Process.from_row(row) for row in _parse(ask(socket_path, node, Question(PROCESSES, "{}", "", 0), timeout_s))
    ]


def read_stack(
    socket_path: str, node: str, pid: int, *, native: bool = False, timeout_s: float = STACK_S
) -> list[Stack]:  # fmt: skip
    """Read the stacks of a process of another node, as many threads as its answer holds.

    Args:
        socket_path: of this node's daemon.
        node: the other node's NodeID.
        pid: of a worker, actor or driver there.
        native: include the frames of C, C++ and Cython code.
        timeout_s: how long it has to answer.
    Raises:
        NodeSilentError: it did not answer, or the stacks cannot be read there: the text says why.
        ForeignTextError: it sent no stacks.
    """
    question = Question(STACK, json.dumps({"pid": pid, "native": native}), "", 0)
    return [Stack.from_row(row) for row in _parse(ask(socket_path, node, question, timeout_s))]


def read_stops(socket_path: str, node: str, timeout_s: float = ANSWER_S) -> list[Waiting]:
    """List the tasks of another node that wait in a debugger; arguments and errors as for `read_memory`."""
    return [Waiting.from_row(row) for row in _parse(ask(socket_path, node, Question(STOPS, "{}", "", 0), timeout_s))]


def converse(
    socket_path: str, node: str, pid: int, line: str | None = None, *, interrupt: bool = False,
    terminal: Terminal = ONCE, timeout_s: float = ANSWER_S,
) -> Said:  # fmt: skip
    """Talk to the debugger of a process of another node.

    Args:
        socket_path: of this node's daemon.
        node: the other node's NodeID.
        pid: of the process there.
        line: for the debugger, if it waits for one; None: only look.
        interrupt: stop the code that runs.
        terminal: the one that asks.
        timeout_s: how long the node has to answer.
    Raises:
        NodeSilentError: it did not answer.
        ForeignTextError: it sent something else.
    """
    who = {"terminal": terminal.id, "about": terminal.about, "stays": terminal.stays}
    filters = json.dumps({"pid": pid, "line": line, "interrupt": interrupt, **who})
    rows = _parse(ask(socket_path, node, Question(DEBUG, filters, "", 0), timeout_s))
    return Said.from_row(rows[0] if rows else None)


def read_log(
    socket_path: str, node: str, filters: Mapping[str, Any], after: str = "", timeout_s: float = ANSWER_S,
    limit: int = 0,
) -> Page:  # fmt: skip
    """Read a page of the log of another node's session.

    Args:
        socket_path: of this node's daemon.
        node: the other node's NodeID.
        filters: task, actor, worker as for `log_files.read`, and tail: only the last lines, so many at most.
        after: `Page.after` of the page before; empty: from the oldest line on.
        timeout_s: how long it has to answer.
        limit: the greatest number of lines; 0: as many as the node gives.
    Raises:
        NodeSilentError: it did not answer.
        ForeignTextError: it sent no lines.
    """
    answer = ask(socket_path, node, Question(LOG, json.dumps(dict(filters)), after, limit), timeout_s)
    return Page([_line(row) for row in _parse(answer)], answer.after, answer.is_end)


def tail_log(
    socket_path: str, node: str, count: int, filters: Mapping[str, Any], timeout_s: float = ANSWER_S
) -> Page:  # fmt: skip
    """Read the last `count` lines of another node's session; the other arguments and errors are those of `read_log`."""
    if 0 < count <= ROWS_MAX:
        page = read_log(socket_path, node, {**filters, "tail": count}, "", timeout_s)
        if page.is_end:
            return page
    lines: deque[LogLine] = deque(maxlen=count)
    after = ""
    for page in log_pages(socket_path, node, filters, timeout_s):
        lines.extend(page.lines)
        after = page.after
    return Page(list(lines), after, True)


def log_pages(
    socket_path: str, node: str, filters: Mapping[str, Any], timeout_s: float = ANSWER_S
) -> Iterator[Page]:  # fmt: skip
    """Iterate over the pages of another node's log until its present end; arguments and errors as of `read_log`."""
    page = Page([], "", False)
    while not page.is_end:
        before = page.after
        page = read_log(socket_path, node, filters, before, timeout_s)
        yield page
        if page.after == before:
            return


def _parse(answer: Answer) -> list[Any]:
    rows = read_json(answer.rows, "an answer of another node", bytes_max=ROWS_BYTES_MAX)
    if not isinstance(rows, list):
        raise ForeignTextError("an answer of another node is no list")
    return rows


def _line(row: Any) -> LogLine:
    if not isinstance(row, list) or tuple(map(type, row)) != _LINE_TYPES:
        raise ForeignTextError("a line of another node's log is malformed")
    at, is_error, pid, job, name, task, path, actor, text = row
    return LogLine(at, is_error, pid, Source(job, name, task, path, actor), text)
