"""The pages, the files and the requests of buttons, by their names in addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastrt.dashboard.pages import actors, deeds, failures, machines, memory, overview, stacks, tasks, timeline
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.store.client import Store

LOGS, SERVICES = "logs", "services"  # pages that the desk makes also without a session
NO_SESSION = (
    "No session runs here. Start a program that calls fastrt.init(), or `fastrt start`: this page shows it by itself."
)
View = Callable[[Watched, Store, Mapping[str, str]], list[Section]]

VIEWS: dict[str, View] = {
    "overview": overview.overview,
    "tasks": tasks.tasks,
    "rows": tasks.rows,
    "task": tasks.task,
    "actors": actors.actors,
    "actor": actors.actor,
    "workers": machines.workers,
    "process": machines.process,
    "memory": memory.memory,
    "timeline": timeline.timeline,
    "nodes": machines.nodes,
}
# Pages that a session still has when it has ended: they need no store.
LASTING: dict[str, Callable[[Watched, Mapping[str, str]], list[Section]]] = {
    "failures": failures.failures,
    "failure": failures.failure,
}
FILES: dict[str, Callable[[Watched, Store, Mapping[str, str]], tuple[bytes, str]]] = {
    "timeline.pftrace": timeline.saved,
    "timeline.json": timeline.saved_json,
}
DEEDS: dict[str, Callable[[Watched, Store, Mapping[str, Any]], str]] = {
    "do/record": timeline.record,
    "do/stop": timeline.stop,
    "do/stack": stacks.read,
    "act/cancel": deeds.cancel,
    "act/kill": deeds.kill,
}
