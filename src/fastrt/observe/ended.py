"""Tasks that have ended: counts by function and outcome, and the failures that a session keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fastrt._core.tasks import failures as core_failures
from fastrt._core.tasks import tally
from fastrt.observe.listing import Names
from fastrt.store.client import Store

_PLACE = re.compile(r'^ *(?:[|+] *)*File "([^"]+)", line (\d+)', re.MULTILINE)  # bars: of an exception group


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the tasks of one function, or the calls of one method, have ended on this node since the session began.

    Attributes:
        name: of the function, or class and method; "other" counts functions beyond a process's table.
        succeeded, failed: of a function that returned, or whose last attempt raised.
        cancelled: before or while they ran.
        crashed: their last attempt ended with its process.
        retried: attempts that raised or crashed and were followed by another one.
        forwarded: tasks of this node that ended on another one, which counts how.
    """

    name: str
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    crashed: int = 0
    retried: int = 0
    forwarded: int = 0

    @property
    def ended(self) -> int:
        """Tasks that have ended on this node, however."""
        return self.succeeded + self.failed + self.cancelled + self.crashed


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt of a task, or one call, that failed.

    Attributes:
        number: of the failure in this session, from 1; pass the last one as `after` for newer ones.
        time: seconds since the epoch.
        task_id: as in `list_tasks`.
        result: the number of the task's first result, 16 hex digits; "": it has none.
        name: of the task.
        actor: the actor's id; None: it is no call.
        type: the exception's class, such as "ValueError" or "WorkerCrashedError".
        message: its text, cut to a kilobyte.
        traceback: of user code; its beginning is cut if it is longer than the record.
        attempt, max_retries: the number of this attempt, and how many more the task may have had.
        retried: whether another attempt followed.
        mended: whether a later attempt succeeded.
        signal: that ended the process; 0: none.
        pid: of the process that ran it; 0: no node could run it.
        node: the name of the other node that ran it; "": this one.
    """

    number: int
    time: float
    task_id: str
    result: str
    name: str
    actor: int | None
    type: str
    message: str
    traceback: str
    attempt: int
    max_retries: int
    retried: bool
    mended: bool
    signal: int
    pid: int
    node: str

    @property
    def place(self) -> str:
        """The line that raised, as `path:line`; "" if no traceback was kept, as after a process's death."""
        found = _PLACE.findall(self.traceback)
        return f"{found[-1][0]}:{found[-1][1]}" if found else ""


def grouped(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Group failures by function, exception, line and signal; the group that failed last is the first.

    Args:
        failures: oldest first; each group has that order, too.
    """
    groups: dict[tuple[str, str, str, int], list[Failure]] = {}
    for one in failures:
        groups.setdefault((one.name, one.type, one.place, one.signal), []).append(one)
    return sorted(groups.values(), key=lambda group: -group[-1].number)


def outcomes(store: Store) -> list[Outcome]:
    """Count the tasks that have ended on this node by function and outcome, the most first.

    The counts are exact. A scalar result is counted before it can be read; any other result up to microseconds later.
    """
    names = Names(store)
    sums: dict[str, list[int]] = {}
    for objref, number, actor, name, numbers in tally.outcomes(store.client):
        if objref == 0 or not any(numbers):  # a promise, which is no task of a user
            continue
        full = "other" if objref is None else _name_of_ended(names, objref, number, actor, name)
        sums[full] = [one + more for one, more in zip(sums.get(full, [0] * len(numbers)), numbers, strict=True)]
    found = [Outcome(name, *numbers) for name, numbers in sums.items()]
    return sorted(found, key=lambda one: (-one.ended, one.name))


def failures(store: Store, *, after: int | None = None, limit: int = 100) -> list[Failure]:
    """Read the failures that the session keeps: the last 1,024.

    Args:
        store: any process's attachment.
        after: only failures of a larger number; None: the newest ones.
        limit: the largest number of failures; 0: all.
    Returns:
        The failures, oldest first.
    """
    names = Names(store)
    return [
        Failure(
            row["number"], row["time_ns"] / 1e9, f"{row['id']:016x}",
            f"{row['result']:016x}" if row["result"] else "",
            row["name"] or _name_of_ended(names, row["function"][0], row["function"][1], row["actor"], ""),
            row["actor"], row["type"],
            row["message"], row["traceback"], row["attempt"], row["retries"], row["retried"], row["mended"],
            row["signal"], row["pid"], row["node"],
        )
        for row in core_failures.read(store.client, after, limit)
    ]  # fmt: skip


def _name_of_ended(names: Names, objref: int, number: int, actor: int | None, name: str) -> str:
    """The name of a function, or of a class and method, also if the function or the actor is gone.

    Args:
        objref, number, actor: as for `Names.of_function`.
        name: the function's or the method's own name, if it was kept.
    """
    if actor is None:
        return name or names.by_objref.get(objref, "?")
    if not name and names.is_of_class(actor, objref):
        name = names.method(actor, number)
    return f"{names.by_objref.get(objref, '?')}.{name or f'method {number}'}"
