"""The first page: how fast the program runs, what it waits for, and what went wrong last."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from fastrt.dashboard import causes, sections
from fastrt.dashboard.causes import Load
from fastrt.dashboard.pages import failures
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Rates, Watched
from fastrt.errors import AttachError
from fastrt.node.advisor import on_tiny_values
from fastrt.observe import ended, reading
from fastrt.runtime.nodes import demand_at
from fastrt.store.client import Store

_POINTS = 150  # of a chart
_FUNCTIONS, _FAILURES = 8, 5
_SAMPLE = 100  # waiting tasks


def overview(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Throughput, queue, workers, store and processors; the limiting cause, advice, and the last failures."""
    if not session.samples:
        return [sections.text("wait", "The first figures come in a second.")]
    now, rates = session.samples[-1], session.rates
    counts = reading.counts(store, objects=False)
    states = counts.task_states
    waiting = states.get("waiting", 0)
    held = _held(store, waiting)
    load = Load(
        now.workers, now.busy, now.blocked, now.queued, waiting - held, held, _impossible(store) if held else 0,
        now.calls, rates.tasks, now.used, now.room, rates.spilled > 0,
    )  # fmt: skip
    outcomes = ended.outcomes(store)
    words = [*causes.advice(load, outcomes), *filter(None, [on_tiny_values(store.client)])]
    return [
        sections.text("limit", causes.limit(load), "big"),
        *([sections.points("advice", "Advice", (one[:1].upper() + one[1:] for one in words))] if words else []),
        sections.facts("now", [
            ("tasks ended", sum(one.ended for one in outcomes), "count"),
            ("failed", sum(one.failed + one.crashed for one in outcomes), "count"), ("a second", rates.tasks, "number"),
            ("ready", now.queued, "count"), ("waiting", waiting, "count"),
            ("workers busy", f"{now.busy} of {now.workers}", "text"), ("blocked in get", now.blocked, "count"),
            ("store in use", now.used, "bytes"), ("store size", now.room, "bytes"),
            ("processors", rates.cpus, "number"), ("memory of processes", now.rss, "bytes"),
        ]),
        *_charts(session),
        sections.table(
            "functions", "Functions with unfinished tasks", [("function", "text"), ("tasks", "parts"), ("", "count")], (
                (sections.link(one.name, "rows", name=one.name), sections.parts(one.states), one.total)
                for one in counts.tasks[:_FUNCTIONS]
            ), "No task is unfinished.",
        ),
        failures.last(session, _FAILURES),
    ]  # fmt: skip


def _held(store: Store, waiting: int) -> int:
    """About how many of the waiting tasks lack resources, by the first of them."""
    if not waiting:
        return 0
    some = reading.page(store, "tasks", {"state": "waiting"}, limit=_SAMPLE).rows
    held = sum(row["waits_for"] == "resources" for row in some)
    return int(waiting * held // max(1, len(some)))


def _impossible(store: Store) -> int:
    """How many tasks and actors wait for resources that no node has; 0 if the daemon does not answer."""
    try:
        return sum(row["count"] for row in demand_at(store.socket_path)["tasks"] if not row["is_feasible"])
    except AttachError:
        return 0


def _charts(session: Watched) -> list[Section]:
    samples = list(session.samples)[-_POINTS - 1 :]
    rates = [Rates.between(before, after) for before, after in pairwise(samples)]
    later = samples[1:]
    return [
        sections.chart("rate", "Tasks a second", "number", {"tasks": [one.tasks for one in rates]}),
        sections.chart("queue", "Ready tasks", "count", {"ready": [one.queued for one in later]}),
        sections.chart("workers", "Workers", "count", {
            "busy": [one.busy for one in later], "blocked": [one.blocked for one in later],
        }, max((one.workers for one in later), default=0)),
        sections.chart("store", "Object store", "bytes", {"used": [one.used for one in later]},
                       later[-1].room if later else 0),
        sections.chart("cpus", "Processors in use", "number", {"processors": [one.cpus for one in rates]}, 1.0),
    ]  # fmt: skip
