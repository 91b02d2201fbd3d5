"""Says in one sentence what limits a program now; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a session is at one moment.

    Attributes:
        workers: worker processes.
        busy: those that run a task; a worker that waits inside of its task is not busy.
        blocked: those that wait inside of a task.
        ready: tasks that only lack a worker.
        for_values: tasks that wait for a value of another task.
        for_resources: tasks that wait for resources.
        calls: running calls of actors.
        rate: tasks and calls that ended in the last second.
        used, room: bytes of the store.
        is_spilling: whether values went to files in the last second.
    """

    workers: int
    busy: int = 0
    blocked: int = 0
    ready: int = 0
    for_values: int = 0
    for_resources: int = 0
    calls: int = 0
    rate: float = 0.0
    used: int = 0
    room: int = 0
    is_spilling: bool = False


def limit(load: Load) -> str:
    """Name the most telling cause that keeps the program from being faster."""
    store = " The store is full, and values go to files: raise object_store_memory or drop references."
    return _limit(load) + (store if load.is_spilling else "")


def _limit(load: Load) -> str:
    free = load.workers - load.busy - load.blocked
    running = load.busy + load.calls
    if load.blocked and load.ready and 2 * load.blocked >= load.workers:
        return (
            f"{_are(load.blocked, 'worker')} waiting in fastrt.get inside of tasks, while {_are(load.ready, 'task')} "
            "ready. Pass references as arguments instead of getting them inside."
        )
    if load.ready and load.workers and free <= 0:
        return f"All {load.workers} workers are busy, and {_are(load.ready, 'task')} ready and waiting for one."
    if load.for_resources and free > 0 and not load.ready:
        return (
            f"{_are(load.for_resources, 'task')} waiting for resources that other tasks, actors or placement groups "
            f"hold, while {_are(free, 'worker')} idle."
        )
    if load.for_values and free > 0 and not load.ready:
        return (
            f"{_are(load.for_values, 'task')} waiting for values of {_many(running, 'running task')}: the program "
            "itself allows no more at once."
        )
    if load.rate >= 1 and free > 0:
        return (
            f"The driver: {_are(free, 'worker')} idle, because tasks end as fast as they are submitted. Larger tasks, "
            "or fastrt.util.batch, make better use of the workers."
        )
    if running:
        return f"{_are(running, 'task')} running and none waits: the program submits no more work."
    if load.blocked:
        return f"{_are(load.blocked, 'task')} waiting in fastrt.get, and nothing else runs."
    return "Nothing runs: no task is running or queued."


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _are(number: int, what: str) -> str:
    return f"{_many(number, what)} {'is' if number == 1 else 'are'}"
