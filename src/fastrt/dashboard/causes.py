"""Says in one sentence what limits a program now, and what would make it better; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastrt.dashboard.sections import many
from fastrt.observe.ended import Outcome

_NEARLY_FULL = 0.9  # of the store
_OFTEN = 0.1  # of a function's attempts
_FUNCTIONS = 3  # that an advice names


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
        impossible: tasks and actors that wait for resources that no node has, also when it is idle.
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
    impossible: int = 0
    calls: int = 0
    rate: float = 0.0
    used: int = 0
    room: int = 0
    is_spilling: bool = False


def limit(load: Load) -> str:
    """Name the most telling cause that keeps the program from being faster."""
    store = " The store is full, and values go to files: raise object_store_memory or drop references."
    return _limit(load) + (store if load.is_spilling else "")


def advice(load: Load, outcomes: Iterable[Outcome]) -> list[str]:
    """Advice about causes of lost time that the figures show, the most urgent first.

    Args:
        load: of this moment.
        outcomes: how the tasks have ended, by function.
    """
    found = []
    if load.impossible:
        found.append(
            f"{many(load.impossible, 'task or actor', 'tasks and actors')} can never start: no node has the resources "
            "that they demand. The page Nodes shows which; lower the demand or add a node."
        )
    some = list(outcomes)
    crashed = sorted((one for one in some if one.crashed), key=lambda one: -one.crashed)
    if crashed:
        names = ", ".join(f"{one.name} ({one.crashed:,})" for one in crashed[:_FUNCTIONS])
        found.append(
            f"Processes died while they ran tasks of {names}. The page Failures has the signals, and the log of the "
            "process its last lines."
        )
    again = [one for one in some if one.retried > _OFTEN * (one.ended + one.retried)]
    if again:
        names = ", ".join(one.name for one in sorted(again, key=lambda one: -one.retried)[:_FUNCTIONS])
        found.append(f"More than a tenth of the attempts of {names} failed and ran again: their time is lost.")
    if load.room and load.used > _NEARLY_FULL * load.room and not load.is_spilling:
        found.append(
            f"The store is {100 * load.used / load.room:.0f} % full; when it is full, values go to files. The page "
            "Memory shows what holds them."
        )
    return found


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
            f"{_are(load.for_values, 'task')} waiting for values of {many(running, 'running task')}: the program "
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


def _are(number: int, what: str) -> str:
    return f"{many(number, what)} {'is' if number == 1 else 'are'}"
