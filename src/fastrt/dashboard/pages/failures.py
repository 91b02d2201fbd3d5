"""Failures: grouped by function, exception and line, and one with its traceback. They stay when the session ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastrt.dashboard import sections
from fastrt.dashboard.sections import Section, many
from fastrt.dashboard.watched import Watched
from fastrt.observe.ended import Failure, grouped

_GROUPS, _ROWS, _FIRST = 100, 50, 15
_ALL = sections.link("all failures", "failures")
COLUMNS = [
    ("error", "message"), ("function", "text"), ("attempt", "count"), ("outcome", "state"), ("process", "code"),
    ("when", "time"),
]  # fmt: skip


def failures(session: Watched, args: Mapping[str, str]) -> list[Section]:
    """The kept failures by function, exception and line; those of one function or of one group by themselves."""
    found = session.failures()
    groups = grouped(found)
    chosen = {name: args[name] for name in ("name", "type", "place") if args.get(name)}
    if chosen:
        return _of_group([one for one in found if chosen.items() <= _names(one).items()])
    return [
        sections.table(
            "groups", f"{many(len(found), 'kept failure')} in {many(len(groups), 'group')}", [
                ("error", "message"), ("function", "text"), ("line", "place"), ("failures", "count"),
                ("retried", "count"), ("mended by a retry", "count"), ("last", "time"),
            ], (
                (
                    _to_group(some), some[-1].name, _short(some[-1]), len(some), sum(one.retried for one in some),
                    sum(one.mended for one in some), some[-1].time,
                ) for some in groups[:_GROUPS]
            ), "Nothing has failed. The last 1,024 failures of the session are kept and will be here.",
        ),
        _newest(found, _FIRST),
    ]  # fmt: skip


def failure(session: Watched, args: Mapping[str, str]) -> list[Section]:
    """One failure: the exception, its traceback, the attempt, and the way to the task's log."""
    number = args.get("number", "")
    one = next((one for one in session.failures() if str(one.number) == number), None)
    if one is None:
        words = "This failure is not kept any more: only the last 1,024 of a session are."
        return [sections.way("way", [_ALL]), sections.text("gone", words, "warn")]
    endings = {"mended": "a later attempt succeeded", "retried": "it was tried again", "failed": "the task has failed"}
    return [
        sections.way("way", [_ALL, sections.link(one.name, "failures", **_names(one))]),
        sections.text("error", f"{one.type}: {one.message}", "bad"),
        sections.facts("failure", [
            ("function", one.name, "text"), ("when", one.time, "time"), ("outcome", endings[_outcome(one)], "text"),
            ("attempt", one.attempt, "count"), ("retries allowed", one.max_retries, "count"),
            ("process", one.pid, "code"), ("signal", one.signal or "none", "text"),
            ("node", one.node or "this one", "text"), ("task", one.task_id, "code"),
        ]),
        sections.lines("traceback", "Traceback", one.traceback, "There is none: the process ended during the task."),
        sections.links("more", [
            *([] if one.node else [sections.link("log of this task", "logs", task=one.task_id)]),
            sections.link("log of its process", "logs", worker=one.pid, **({"node": one.node} if one.node else {})),
            sections.link("its task", "task", task=one.task_id), sections.link("its process", "process", pid=one.pid),
        ]),
    ]  # fmt: skip


def last(session: Watched, count: int) -> Section:
    """A table of the last failures, for other pages."""
    found = session.failures(count)
    return sections.table(
        "failures", "The last failures", COLUMNS, map(_row, reversed(found)),
        "Nothing has failed. Failures will be here, with their tracebacks.",
        sections.link("all failures, in groups", "failures") if found else None,
    )  # fmt: skip


def of_task(session: Watched, task_id: str) -> list[Section]:
    """A table of the kept failures of one task; nothing if there are none."""
    found = [one for one in session.failures() if one.task_id == task_id]
    return [sections.table("failures", "Its failures", COLUMNS, map(_row, reversed(found)), "")] if found else []


def _of_group(found: Sequence[Failure]) -> list[Section]:
    if not found:
        words = "No failure of this group is kept any more: only the last 1,024 of a session are."
        return [sections.way("way", [_ALL]), sections.text("gone", words, "warn")]
    newest = found[-1]
    return [
        sections.way("way", [_ALL]),
        sections.text("error", f"{newest.name}: {newest.type}: {newest.message}", "bad"),
        sections.facts("group", [
            ("failures", len(found), "count"), ("retried", sum(one.retried for one in found), "count"),
            ("mended by a retry", sum(one.mended for one in found), "count"), ("first", found[0].time, "time"),
            ("last", newest.time, "time"),
        ]),
        sections.lines("traceback", "Traceback of the newest", newest.traceback,
                       "There is none: the process ended during the task."),
        _newest(found, _ROWS),
    ]  # fmt: skip


def _newest(found: Sequence[Failure], most: int) -> Section:
    title = f"The newest {most}" if len(found) > most else "One by one, the newest first"
    return sections.table("newest", title, COLUMNS, map(_row, reversed(found[-most:])), "None.")


def _row(one: Failure) -> tuple[object, ...]:
    line = f"{one.type}: {one.message}".partition("\n")[0]
    process = one.pid if one.node else sections.link(one.pid, "process", pid=one.pid)
    return sections.link(line, "failure", number=one.number), one.name, one.attempt, _outcome(one), process, one.time


def _to_group(some: Sequence[Failure]) -> Section:
    line = f"{some[-1].type}: {some[-1].message}".partition("\n")[0]
    return sections.link(line, "failures", **_names(some[-1]))


def _names(one: Failure) -> dict[str, str]:
    """The arguments of the address of a failure's group."""
    return {"name": one.name, "type": one.type, "place": one.place or f"signal {one.signal}"}


def _short(one: Failure) -> str:
    """The line that raised, without the folder; of a dead process its signal."""
    return one.place.rpartition("/")[2] or (f"signal {one.signal}" if one.signal else "")


def _outcome(one: Failure) -> str:
    return "mended" if one.mended else "retried" if one.retried else "failed"
