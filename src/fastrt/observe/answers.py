"""Answers questions of other nodes: a page of this node's tables or of its log, its memory, stacks, or a package.

The uplink calls `answer` in a thread. A question names a table and columns, never a file: what can be read is this
session's shared memory, this session's folder of log files, the stacks of its processes, and the packages that it has
made for other nodes. Long texts and lists are shortened, so that each row fits into a page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastrt.cluster.questions import Answer, Question
from fastrt.foreign_text import read_object
from fastrt.node.log_files import LOGS_FOLDER, LogLine, Wanted, read_page, tail_page
from fastrt.observe import reading
from fastrt.store.client import Store
from fastrt.tasks import packages

LOG, MEMORY, PROCESSES, STACK, STOPS, DEBUG = "log", "memory", "processes", "stack", "stops", "debug"
GROUPS = "groups"
ROWS_MAX = 1000  # of one page
BYTES_MAX = 256 << 10  # of one page
_TEXT_MAX = 16 << 10  # characters of one text; of a line of the log: 64 KiB
_LINE_MAX = 64 << 10
_MEMBERS_MAX = 1000  # of one list
_BUDGET_S = 1.0  # for a page whose filters need to see each row
_Rows = list[Any]


def answer(store: Store, question: Question) -> Answer:
    """Answer a question of another node.

    Args:
        store: the uplink's attachment.
        question: as it came.
    Returns:
        The page. One that is not the last can have fewer rows than the limit, or none.
    Raises:
        ValueError: there is no such table or column, or a field is malformed.
        FastrtError, OSError: the rows cannot be read.
    """
    filters = read_object(question.filters, "the filters of another node")
    limit = min(question.limit or ROWS_MAX, ROWS_MAX)
    if question.kind == LOG:
        return _log(store, filters, question.after, limit)
    if question.kind == packages.QUESTION:
        return _package(store, filters, question.after)
    if question.kind in _WHOLE:
        return _whole(_WHOLE[question.kind](store, filters))
    while True:
        page = reading.page(store, question.kind, filters, _place(question.after), limit, _BUDGET_S)
        text = json.dumps([_shortened(row) for row in page.rows])
        if len(text) <= BYTES_MAX:
            after = "" if page.next is None else str(page.next)
            return Answer(text, after, page.next is None, -1 if page.total is None else page.total)
        limit = max(1, min(limit, len(page.rows)) * BYTES_MAX // (2 * len(text)))


def _place(after: str) -> int | None:
    if not after:
        return None
    if not (after.isascii() and after.isdecimal() and len(after) <= 20):
        raise ValueError(f"{after[:40]!r} is no place in a table: give the `after` of an earlier page")
    return int(after)


def _log(store: Store, filters: dict[str, Any], after: str, limit: int) -> Answer:
    """Answer with lines of the session's log.

    Args:
        store: the uplink's attachment.
        filters: task, actor, worker as of `log_files.read`; tail: only the last lines, so many. The page is the end
            if it has them all.
        after, limit: as of a question.
    """
    path = Path(store.socket_path)
    folder = path.parent.parent / LOGS_FOLDER / path.parent.name
    task, actor, worker, tail = (filters.get(name, default) for name, default in _FILTERS.items())
    if filters.keys() - _FILTERS.keys() or [type(one) for one in (task, actor, worker, tail)] != [str, str, int, int]:
        raise ValueError(f"a log is filtered by {', '.join(_FILTERS)}")
    wanted = Wanted(task.lower(), actor, worker)
    while True:
        page = read_page(folder, wanted, after, limit) if not tail else tail_page(folder, wanted, min(tail, limit))
        text = json.dumps([_row(line) for line in page.lines])
        if len(text) <= BYTES_MAX:
            is_whole = not tail or len(page.lines) >= tail or min(tail, limit) == tail
            return Answer(text, page.after, page.is_end and is_whole)
        limit = max(1, len(page.lines) * BYTES_MAX // (2 * len(text)))


def _whole(rows: _Rows) -> Answer:
    """Answer with all rows on one page, or as many of the first as it holds; `total` counts all."""
    texts, size = [], 2
    for row in rows[:ROWS_MAX]:
        text = json.dumps(_shortened(row) if len(rows) > 1 else row)
        size += len(text) + 2
        if size > BYTES_MAX:
            break
        texts.append(text)
    return Answer(f"[{', '.join(texts)}]", total=len(rows))


def _memory(store: Store, filters: dict[str, Any]) -> _Rows:
    from fastrt.observe import memory

    _allow(filters)
    return memory.summary(store).to_rows()


def _processes(store: Store, filters: dict[str, Any]) -> _Rows:
    from fastrt.observe import stacks

    _allow(filters)
    return [asdict(process) for process in stacks.processes(store)]


def _groups(store: Store, filters: dict[str, Any]) -> _Rows:
    """The placement groups that were made on this node, with their names."""
    from fastrt.tasks import placement_group

    _allow(filters)
    names = placement_group.names_of_groups(store)
    return [{**row, "name": names.get(group, "")} for group, row in placement_group.groups_of(store).items()]


def _stack(store: Store, filters: dict[str, Any]) -> _Rows:
    """The stacks of the threads of one process of this session, as many as a page holds."""
    from fastrt.observe import stacks

    _allow(filters, pid=int, native=bool)
    process = stacks.process(store, filters["pid"])
    return [one.to_row() for one in stacks.read(process, native=filters["native"])]


def _stops(store: Store, filters: dict[str, Any]) -> _Rows:
    from fastrt.observe import debugging

    _allow(filters)
    return [asdict(debugging.Waiting.of(stop)) for stop in debugging.waiting(Path(store.socket_path))]


def _debug(store: Store, filters: dict[str, Any]) -> _Rows:
    """Pass a line, if there is one, to the debugger of a process of this session."""
    from fastrt.observe import debugging

    _allow(filters, pid=int, line=(str, type(None)), interrupt=bool, terminal=str, about=str, stays=bool)
    terminal = debugging.Terminal(filters["terminal"], filters["about"], filters["stays"])
    path = Path(store.socket_path)
    return [asdict(debugging.converse(path, filters["pid"], filters["line"], filters["interrupt"], terminal))]


_WHOLE: dict[str, Callable[[Store, dict[str, Any]], _Rows]] = {
    MEMORY: _memory, PROCESSES: _processes, GROUPS: _groups, STACK: _stack, STOPS: _stops, DEBUG: _debug,
}  # fmt: skip


def _allow(filters: dict[str, Any], **kinds: type | tuple[type, ...]) -> None:
    """Check that a question has exactly these fields.

    Raises:
        ValueError: it has others.
    """
    some = {name: kind if isinstance(kind, tuple) else (kind,) for name, kind in kinds.items()}
    if filters.keys() != kinds.keys() or any(type(filters[name]) not in kind for name, kind in some.items()):
        raise ValueError(f"the question has the fields {', '.join(kinds) or '(none)'}")


def _package(store: Store, filters: dict[str, Any], after: str) -> Answer:
    """Answer with a part of a package that this node has made, as base64; with no row at its end."""
    digest = filters.get("digest")
    if not isinstance(digest, str):
        raise ValueError("a package is named by its digest")
    part = packages.read_part(Path(store.socket_path).parent, digest, _place(after) or 0)
    rows = [base64.b64encode(part).decode()] if part else []
    return Answer(json.dumps(rows), is_end=not part)


_FILTERS: dict[str, Any] = {"task": "", "actor": "", "worker": 0, "tail": 0}


def _row(line: LogLine) -> list[Any]:
    return [line.time, line.is_error, line.pid, *line.source, line.text[:_LINE_MAX]]


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _TEXT_MAX else value[:_TEXT_MAX] + "..."
    if isinstance(value, (list, tuple)):
        return [_shortened(one) for one in value[:_MEMBERS_MAX]]
    if isinstance(value, dict):
        return {name: _shortened(one) for name, one in value.items()}
    return value
