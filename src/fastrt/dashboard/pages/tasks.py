"""Tasks: by function, the rows of one function, and one task with what it waits for."""

from __future__ import annotations

from collections.abc import Mapping

from fastrt.dashboard import sections
from fastrt.dashboard.pages import failures, stacks
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.observe import ended, reading
from fastrt.observe.listing import Row
from fastrt.store.client import Store

_ROWS = 50
_FUNCTIONS = 100
_STATES = ("", "running", "blocked", "ready", "waiting", "claimed", "ending")
_SHOWN = ("running", "blocked", "ready", "waiting")
_OUTCOMES = ("succeeded", "failed", "crashed", "cancelled", "retried", "forwarded")
_ALL = sections.link("all tasks", "tasks")
COLUMNS = [
    ("task", "code"), ("name", "text"), ("state", "state"), ("attempt", "count"), ("waits for", "code"),
    ("worker", "code"), ("priority", "count"),
]  # fmt: skip


def tasks(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Functions and methods: how many unfinished tasks are in which state, and how the others have ended."""
    counted = reading.counts(store, objects=False).tasks
    rows = [
        (
            sections.link(one.name, "rows", name=one.name), sections.parts(one.states), one.total,
            *(one.states.get(state, 0) for state in _SHOWN),
        )
        for one in counted[:_FUNCTIONS]
    ]  # fmt: skip
    return [
        sections.table(
            "functions", f"{len(counted):,} functions and methods with unfinished tasks",
            [("function", "text"), ("unfinished", "parts"), ("", "count"), *((state, "count") for state in _SHOWN)],
            rows, "No task is unfinished: call f.remote(...) of a function with @fastrt.remote.",
        ),
        _ended(store),
    ]  # fmt: skip


def _ended(store: Store) -> Section:
    found = ended.outcomes(store)
    return sections.table(
        "ended", f"{sum(one.ended for one in found):,} tasks have ended since the session began", [
            ("function", "text"), ("outcomes", "parts"), ("ended", "count"), *((word, "count") for word in _OUTCOMES),
        ], (
            (
                sections.link(one.name, "failures", name=one.name) if one.failed or one.crashed or one.retried
                else one.name,
                sections.parts({"succeeded": one.succeeded, "failed": one.failed + one.crashed,
                                "cancelled": one.cancelled}),
                one.ended, *(getattr(one, word) for word in _OUTCOMES),
            ) for one in found[:_FUNCTIONS]
        ), "No task has ended yet. The counts are exact, and stay when the tasks are gone.",
    )  # fmt: skip


def rows(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Unfinished tasks, a page of them, filtered by name, state and worker."""
    wanted = {column: args[column] for column in ("name", "state", "pid") if args.get(column)}
    after = args.get("after", "")
    page = reading.page(store, "tasks", dict(wanted), int(after) if after.isdecimal() else None, _ROWS)
    more = sections.link("next page", "rows", **wanted, after=page.next) if page.next is not None else None
    total = f"{page.total:,} unfinished tasks" if page.total is not None else "unfinished tasks"
    return [
        sections.way("way", [_ALL]),
        sections.choices("filter", [
            ("name", "name, also with * and ?", args.get("name", ""), ()),
            ("state", "state", args.get("state", ""), _STATES),
        ]),
        sections.table(
            "rows", total, COLUMNS, [row_of(row) for row in page.rows],
            "No unfinished task matches.", more,
        ),
    ]  # fmt: skip


def task(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """One task: what it takes, what it waits for, and the process that runs it."""
    number = args.get("task", "")
    found = reading.task(store, number)
    way = sections.way("way", [_ALL])
    if found is None:
        words = "This task has ended: the records of such tasks are used again. Its failures and its log are kept."
        return [way, sections.text("gone", words), *failures.of_task(session, number), _to_log(number)]
    row = found.row
    pid = row["pid"]
    return [
        sections.way("way", [_ALL, sections.link(row["name"], "rows", name=row["name"])]),
        sections.facts("task", [
            ("task", row["task_id"], "code"), ("state", row["state"], "state"), ("attempt", row["attempt"], "count"),
            ("retries left", row["max_retries"], "count"), ("arguments in the record", found.argument_bytes, "bytes"),
            ("priority", row["priority"], "count"), ("cancelled", "yes" if row["cancelled"] else "no", "text"),
        ]),
        sections.buttons("cancel", [
            ("Cancel this task", "act/cancel", {"task": row["task_id"]}, f"Cancel {row['name']}?"),
        ]),
        sections.table(
            "arguments", "Objects that it takes", [
                ("object", "code"), ("state", "state"), ("bytes", "bytes"), ("made by", "code"),
            ], (
                (one.object_id, one.state, one.bytes, _to_task(one.task_id)) for one in found.arguments
            ), "None: its arguments are in its record.",
        ),
        sections.table(
            "chain", "What it waits for, back to the first cause", COLUMNS, [row_of(one) for one in found.chain],
            "It waits for resources that are in use: see Nodes." if row["waits_for"] == "resources"
            else "It waits for no other task.",
        ),
        sections.table(
            "worker", "The process that runs it", [("pid", "code"), ("kind", "text"), ("state", "state"),
                                                   ("memory", "bytes"), ("processor time", "seconds")],
            [] if found.worker is None else [(
                sections.link(pid, "process", pid=pid), found.worker["kind"], found.worker["state"],
                found.worker["rss"], found.worker["cpu_s"],
            )], "No process runs it.",
        ),
        *([] if found.worker is None else stacks.of_process(session, pid, found.worker["kind"])),
        *failures.of_task(session, row["task_id"]),
        _to_log(row["task_id"]),
    ]  # fmt: skip


def _to_log(number: str) -> Section:
    return sections.links("more", [sections.link("log of this task", "logs", task=number)])


def row_of(row: Row) -> tuple[object, ...]:
    """A row of a table with `COLUMNS`, from one of `listing`."""
    pid = row["pid"]
    return (
        _to_task(row["task_id"]), row["name"], row["state"], row["attempt"], row["waits_for"] or "",
        "" if pid is None else sections.link(pid, "process", pid=pid), row["priority"],
    )  # fmt: skip


def _to_task(number: str) -> object:
    return sections.link(number, "task", task=number) if number else ""
