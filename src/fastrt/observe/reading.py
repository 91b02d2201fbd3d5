"""Counts and pages of one node's tables, for tables of millions of records.

Each function reads the session's shared memory through one joined client: a driver's or worker's own attachment
(`store.client.require()`), or that of a tool (`cli.look.joined`). It asks no process and takes no lock. A pass over a
table is made by the core, without an object for each record: filters come first, then the limit, and only the rows of
the page become Python objects.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastrt._core.objects import spill
from fastrt._core.repair import inspect, pages
from fastrt.observe import listing
from fastrt.observe.ended import failures
from fastrt.observe.listing import Names, Row
from fastrt.store.client import Store
from fastrt.tasks import call_sites

FAILED = "failed"  # the state of tasks that lists the kept failures
CHAIN_MAX = 32  # tasks in the chain of `task`
_PASS_ROWS = 2000  # read together when a filter has to see the rows
_REMOTE_STATE = 15  # in `pages.count_objects`: a value that another node keeps
_KINDS = 1 << 16
_FUNCTIONS_MOST = 2000  # in a filter of the core
_WHATS = {pages.VALUE: "value", pages.RESULT: "result", pages.ACTOR: "actor", pages.FUNCTION: "function"}


@dataclass(frozen=True, slots=True)
class TaskCount:
    """The unfinished tasks of one function, or calls of one method.

    Attributes:
        name: of the function, or class and method; "other" counts functions beyond the first 2,048.
        states: how many are "waiting", "ready", "claimed", "running", "blocked", "ending"; only those above 0.
    """

    name: str
    states: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.states.values())


@dataclass(frozen=True, slots=True)
class ObjectCount:
    """Objects of one state, use and type.

    Attributes:
        state: "pending", "sealed", "spilled", "remote", ...
        what: "value", "result", "actor" or "function".
        type: as in the rows of `list_objects`; "" while pending.
        count: how many.
        bytes: of their values.
    """

    state: str
    what: str
    type: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The records of a node's tables, counted.

    Attributes:
        tasks: by function, the most first.
        objects: by state, use and type.
        actors: by state: "starting", "alive", "restarting", "dead", "away".
        queued: tasks that are ready and not claimed.
    """

    tasks: list[TaskCount]
    objects: list[ObjectCount]
    actors: dict[str, int]
    queued: int = 0

    @property
    def task_states(self) -> dict[str, int]:
        """The unfinished tasks of all functions, by state."""
        states: dict[str, int] = {}
        for one in self.tasks:
            for state, count in one.states.items():
                states[state] = states.get(state, 0) + count
        return states


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of a table.

    Attributes:
        rows: as of `list_tasks`, `list_actors`, `list_objects` or `list_workers`.
        next: pass it as `after` for the next page; None: there are no more rows.
        total: all records of the table that match the filters; None if they were not counted, because a filter needs
            the rows (of `task_id`, `results` and others with wildcards, of `waits_for`, `max_retries`, `site`, ...).
    """

    rows: list[Row]
    next: int | None
    total: int | None


class Rows(list[Row]):
    """Rows of a table, as a list.

    Args:
        rows: those that are shown.
        total: see below.

    Attributes:
        total: all rows that match the filters, also those that a limit has left out; None if they were not counted,
            see `Page`, or a node has not answered.
    """

    def __init__(self, rows: Iterable[Row] = (), total: int | None = None) -> None:
        super().__init__(rows)
        self.total = total

    @property
    def note(self) -> str:
        """A sentence about the rows that are left out; "" if none are."""
        if self.total == len(self):
            return ""
        return (
            f"showing {len(self):,} of {self.total:,}" if self.total is not None else f"showing the first {len(self):,}"
        )


@dataclass(frozen=True, slots=True)
class Argument:
    """One object that a task takes.

    Attributes:
        object_id: its id.
        state: as in `list_objects`.
        bytes: of the value; 0 while pending.
        task_id: the unfinished task that makes it; "" if there is none.
    """

    object_id: str
    state: str
    bytes: int
    task_id: str


@dataclass(frozen=True, slots=True)
class TaskView:
    """One unfinished task.

    Attributes:
        row: its row, as of `list_tasks`.
        argument_bytes: of the arguments that are in its record.
        arguments: the objects that it takes.
        chain: the rows of the tasks that it waits for: the one that makes the argument it waits for, the one that this
            one waits for in turn, and so on, at most CHAIN_MAX.
        worker: the row of the process that runs it, as of `list_workers`; None while none does.
    """

    row: Row
    argument_bytes: int
    arguments: list[Argument]
    chain: list[Row] = field(default_factory=list)
    worker: Row | None = None


def counts(store: Store, *, tasks: bool = True, objects: bool = True) -> Counts:
    """Count the records of a node's tables: one pass over each.

    Args:
        store: any process's attachment.
        tasks, objects: whether to make the pass over this table. A pass over a million records takes about 10 ms.
    """
    from fastrt._core.tasks.tasks import queued

    client, names = store.client, Names(store)
    actors: dict[str, int] = {}
    for row in listing.actor_states(store):
        actors[row] = actors.get(row, 0) + 1
    found = _count_tasks(store, names) if tasks else []
    sums = pages.count_objects(client, bytes(_type_classes())) if objects else []
    return Counts(
        sorted((TaskCount(name, states) for name, states in found), key=lambda one: (-one.total, one.name)),
        [
            ObjectCount(_object_state(state), _WHATS[what], _TYPE_NAMES[kind], count, nbytes)
            for state, what, kind, count, nbytes in sums
        ],
        actors,
        queued(client),
    )


def page(
    store: Store, kind: str, filters: Mapping[str, Any] | None = None, after: int | None = None, limit: int = 100,
    budget_s: float = math.inf,
) -> Page:  # fmt: skip
    """Read some rows of a table, ordered by id.

    Args:
        store: any process's attachment.
        kind: "tasks", "actors", "objects" or "workers".
        filters: values by column; text may have the wildcards * and ?, and matches numbers, too. Tasks of the state
            "failed" are the kept failures, newest first, with columns of their own: `listing.COLUMNS["failures"]`.
        after: `next` of the page before; None: from the beginning.
        limit: the largest number of rows; 0: all.
        budget_s: a page whose filters need the rows ends after so many seconds, with fewer rows.
    Raises:
        ValueError: there is no such table or column, or the limit is negative.
    """
    if kind not in _PAGES:
        raise ValueError(f"there is no table {kind!r}; there are: {', '.join(_PAGES)}")
    if limit < 0:
        raise ValueError(f"limit={limit}: a page has 0 or more rows")
    wanted = dict(filters or {})
    check_columns(kind, wanted)
    if _wants_failures(kind, wanted):
        return _failed(store, wanted, after or 0, limit)
    return _PAGES[kind](store, wanted, after or 0, limit, time.monotonic() + budget_s)


def rows(store: Store, kind: str, filters: Mapping[str, Any], limit: int) -> Rows:
    """Read the first rows of a table, and count all that match; arguments and errors as for `page`."""
    found = page(store, kind, filters, limit=limit)
    return Rows(found.rows, len(found.rows) if found.next is None else found.total)


def task(store: Store, task_id: str) -> TaskView | None:
    """Look at one task.

    Args:
        store: any process's attachment.
        task_id: as in the rows of `list_tasks`.
    Returns:
        None if it has ended, or never was.
    Raises:
        ValueError: the id is not a hexadecimal number.
    """
    client, number = store.client, _number(task_id)
    if number is None:
        raise ValueError(f"a task's id has 16 hexadecimal digits, not {task_id!r}")
    rows, _, _ = pages.page_tasks(client, id=number, limit=1) if number else ([], 0, 0)
    if not rows:
        return None
    names, pids = Names(store), listing.pids_of(store)
    nbytes, objects = inspect.dependencies(client, rows[0]["task"])
    makers = {objref: inspect.task(client, maker - 1) if maker else None for objref, _, _, _, maker in objects}
    arguments = [
        Argument(
            f"{objref:016x}", state, 0 if state == "pending" else size,
            f"{maker['id']:016x}" if (maker := _maker(makers[objref], objref)) else "",
        )
        for objref, _, state, size, _ in objects
    ]  # fmt: skip
    chain: list[Row] = []
    last = rows[0]
    while last["waits_for"] is not None and len(chain) < CHAIN_MAX:
        found = [maker for objref, *_, maker in inspect.dependencies(client, last["task"])[1]
                 if objref == last["waits_for"] and maker]  # fmt: skip
        following = _maker(inspect.task(client, found[0] - 1) if found else None, last["waits_for"])
        if following is None:
            break
        last = following
        chain.append(listing.task_row(last, names, pids))
    row = listing.task_row(rows[0], names, pids)
    workers = page(store, "workers", {"pid": row["pid"]}).rows if row["pid"] is not None else []
    return TaskView(row, nbytes, arguments, chain, workers[0] if workers else None)


def _failed(store: Store, wanted: Mapping[str, Any], after: int, limit: int) -> Page:
    """Kept failures as rows, newest first; those of numbers below `after`, if it is not 0."""
    found: list[Row] = []
    for one in reversed(failures(store, limit=0)):
        row: Row = {name: FAILED if name == "state" else getattr(one, name) for name in listing.COLUMNS["failures"]}
        if all(fits(row[name], value) for name, value in wanted.items()):
            found.append(row)
    rest = [row for row in found if not after or row["number"] < after]
    rows = rest[:limit] if limit else rest
    return Page(rows, rows[-1]["number"] if len(rows) < len(rest) else None, len(found))


def check_columns(kind: str, filters: Mapping[str, Any]) -> None:
    """Check that a table has the columns of the filters, also when it has no rows.

    Raises:
        ValueError: a filter names no column.
    """
    columns = listing.COLUMNS["failures" if _wants_failures(kind, filters) else kind]
    for name in filters:
        if name not in columns:
            there = ", ".join(columns)
            raise ValueError(f"there is no column {name!r} to filter by; there are: {there}")


def _wants_failures(kind: str, filters: Mapping[str, Any]) -> bool:
    return kind == "tasks" and filters.get("state") == FAILED


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value matches a filter; a list does if one of its members does."""
    if isinstance(value, list):
        return any(fits(one, wanted) for one in value)
    if isinstance(wanted, str):
        return fnmatch.fnmatchcase("" if value is None else str(value), wanted)
    return bool(value == wanted)


def _maker(row: Row | None, objref: int) -> Row | None:
    """The row of a task if it still makes the object."""
    return row if row is not None and objref in row["returns"] else None


def _number(text: Any) -> int | None:
    """The number that an id of 16 hexadecimal digits, or fewer, stands for."""
    try:
        return int(text, 16) if isinstance(text, str) and len(text) <= 16 else None
    except ValueError:
        return None


def _count_tasks(store: Store, names: Names) -> Iterator[tuple[str, dict[str, int]]]:
    for objref, number, actor, states in pages.count_tasks(store.client)[0]:
        name = "other" if objref is None else names.of_function(objref, number, actor)
        yield name, {word: states[state] for state, word in inspect.TASK_STATES.items() if states[state]}


# ---- filters: what the core can decide, and the rest, which sees the rows ----


def _states(words: Mapping[int, str], wanted: Any) -> int:
    return sum(1 << state for state, word in words.items() if fits(word, wanted))


def _tasks(store: Store, wanted: dict[str, Any], after: int, limit: int, until: float) -> Page:
    names, pids = Names(store), listing.pids_of(store)
    core: dict[str, Any] = {}
    if "state" in wanted:
        core["states"] = _states(inspect.TASK_STATES, wanted.pop("state"))
    if "name" in wanted:
        core["functions"] = _functions_named(store, names, wanted.pop("name"))
    if "task_id" in wanted and (number := _number(wanted["task_id"])):
        core["id"] = number
        del wanted["task_id"]
    for column, argument in (("actor", "actor"), ("attempt", "attempts")):
        if column in wanted and (number := _small(wanted[column])) is not None:
            core[argument] = number
            del wanted[column]
    if isinstance(wanted.get("cancelled"), bool) or wanted.get("cancelled") in ("True", "False"):
        core["cancelled"] = wanted.pop("cancelled") in (True, "True")
    if not _pid(wanted, "pid", pids, core, "client_index"):
        return Page([], None, 0)

    def read(after: int, limit: int) -> tuple[list[Row], int, int]:
        rows, total, following = pages.page_tasks(store.client, after=after, limit=limit, **core)
        return [listing.task_row(row, names, pids) for row in rows], total, following

    return _read(read, wanted, after, limit, until)


def _functions_named(store: Store, names: Names, wanted: Any) -> list[tuple[int, int, bool]]:
    """The functions and methods of unfinished tasks that have a name; perhaps further functions with this name.

    The table of functions has the names of tasks. Those of methods, and of unknown functions, take a pass.
    """
    text, client = str(wanted), store.client
    may_be_method = "." in text or (set(text) & set("*?[") and inspect.actors(client) != [])
    if not may_be_method and not any(fits(name, wanted) for name in listing.UNNAMED):
        found = [(objref, index, False) for objref, index, name in inspect.functions(client) if fits(name, wanted)]
        if len(found) <= _FUNCTIONS_MOST:
            return found
    return [
        (objref, number, actor is not None)
        for objref, number, actor, _ in pages.count_tasks(store.client)[0]
        if objref is not None and fits(names.of_function(objref, number, actor), wanted)
    ]


def _small(wanted: Any) -> int | None:
    """The number that a filter wants; None if it is not one."""
    if isinstance(wanted, str) and wanted.isdecimal():
        wanted = int(wanted)
    return wanted if type(wanted) is int and 0 <= wanted < 1 << 30 else None


def _pid(
    wanted: dict[str, Any], column: str, pids: Mapping[int | None, int], core: dict[str, Any], argument: str
) -> bool:
    """Let the core filter by a process; False if no process of the session fits."""
    if column not in wanted or wanted[column] is None or wanted[column] == "":
        return True
    indexes = [index for index, pid in pids.items() if fits(pid, wanted[column])]
    if len(indexes) == 1:
        core[argument] = indexes[0]
        del wanted[column]
    return bool(indexes)


def _objects(store: Store, wanted: dict[str, Any], after: int, limit: int, until: float) -> Page:
    names, pids, lines = Names(store), listing.pids_of(store), call_sites.read(store.socket_path)
    core: dict[str, Any] = {}
    if "state" in wanted:
        state = wanted.pop("state")
        core["states"], core["remote"] = _states(inspect.OBJECT_STATES, state), fits("remote", state)
    if "type" in wanted:
        kind = wanted.pop("type")
        fitting = [fits(name, kind) for name in _TYPE_NAMES]
        core["kinds"] = bytes([fits("", kind), *(fitting[number] for number in _type_classes())])
    if "what" in wanted:
        what = wanted.pop("what")
        core["whats"] = [n for n, word in _WHATS.items() if n != pages.FUNCTION and fits(word, what)]
        core["functions"] = [i for i, name in names.by_index.items() if fits(f"function {name}", what)]
    if "object_id" in wanted and (number := _number(wanted["object_id"])):
        core["objref"] = number
        del wanted["object_id"]
    if isinstance(wanted.get("error"), bool) or wanted.get("error") in ("True", "False"):
        core["error"] = wanted.pop("error") in (True, "True")
    for column, argument in (("refs", "holder"), ("pins", "pinner")):
        if not _pid(wanted, column, pids, core, argument):
            return Page([], None, 0)

    def read(after: int, limit: int) -> tuple[list[Row], int, int]:
        rows, total, following = pages.page_objects(store.client, after=after, limit=limit, **core)
        return [listing.object_row(row, names, pids, lines) for row in rows], total, following

    return _read(read, wanted, after, limit, until)


def _read(
    read: Callable[[int, int], tuple[list[Row], int, int]], rest: Mapping[str, Any], after: int, limit: int,
    until: float,
) -> Page:  # fmt: skip
    """Read a page through the core; filters that it does not know see the rows, a part of the table at a time.

    Args:
        read: gives rows after a number, the total and the number to go on after.
        rest: filters that the core does not know.
        after, limit: as for `page`.
        until: when a page with such filters ends; by `time.monotonic()`.
    """
    found: list[Row] = []
    total: int | None = None
    while True:
        most = pages.ROWS_MAX if not limit else _PASS_ROWS if rest else min(limit - len(found), pages.ROWS_MAX)
        rows, matching, following = read(after, most)
        total = matching if total is None else total
        for row in rows:
            if all(fits(row[name], wanted) for name, wanted in rest.items()):
                found.append(row)
                if limit and len(found) == limit and rest:
                    return Page(found, _id_of(row), None)
        if not following:
            return Page(found, None, len(found) if rest and not after else None if rest else total)
        after = following
        if (limit and len(found) >= limit) or (rest and time.monotonic() >= until):
            return Page(found, after, None if rest else total)


def _id_of(row: Row) -> int:
    return int(row.get("task_id") or row["object_id"], 16)


def _short_table(rows: Callable[[Store], list[Row]]) -> Callable[[Store, dict[str, Any], int, int, float], Page]:
    """Pages of a table of thousands of rows at most: all are made, and the number of a row is its place."""

    def read(store: Store, wanted: dict[str, Any], after: int, limit: int, until: float) -> Page:
        found = [row for row in rows(store) if all(fits(row[name], value) for name, value in wanted.items())]
        end = after + limit if limit else len(found)
        return Page(found[after:end], end if end < len(found) else None, len(found))

    return read


_PAGES: dict[str, Callable[[Store, dict[str, Any], int, int, float], Page]] = {
    "tasks": _tasks, "actors": _short_table(listing.actors), "objects": _objects,
    "workers": _short_table(listing.workers),
}  # fmt: skip


def _object_state(state: int) -> str:
    return "remote" if state == _REMOTE_STATE else inspect.OBJECT_STATES.get(state, "?")


_TYPE_NAMES = ["", *dict.fromkeys([*(listing.type_name(kind) for kind in range(32)), "lost", "pickled"])]


def _type_classes() -> list[int]:
    """The place in _TYPE_NAMES of each encoding."""
    few = max(256, spill.KIND_LOST + 1)
    return [_TYPE_NAMES.index(listing.type_name(kind)) for kind in range(few)] + [_TYPE_NAMES.index("pickled")] * (
        _KINDS - few
    )
