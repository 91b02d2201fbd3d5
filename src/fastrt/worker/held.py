"""Tasks whose packages another process of the node is installing: a worker keeps them, and runs others meanwhile."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from fastrt._core.tasks import submission, tally
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError, TaskCancelledError
from fastrt.tasks.runtime_env import Environment
from fastrt.worker.alarms import Clock

if TYPE_CHECKING:
    from fastrt.store.client import Store

_POLL_S = 0.05


class HeldTasks:
    """Keeps the tasks of environments that are being made, and queues them for any worker when that has ended.

    A task that is kept has not begun: it counts as no attempt, and another worker gets it if this one dies.

    Args:
        store: this process's attachment.
        clock: looks whether the environments are made.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._client = store.client
        self._clock = clock
        self._leaving = False
        self._lock = threading.Lock()
        self._tasks: dict[Environment, list[int]] = {}

    def hold(self, task: int, environment: Environment) -> bool:
        """Keep a task if another process is making its environment now.

        Args:
            task: claimed by this process, and not begun.
            environment: the task's.
        Returns:
            Whether it is kept: this process must not run it.
        """
        if not (environment.pip or environment.uv) or not self._is_being_made(environment):
            return False
        submission.park(self._client, task)
        with self._lock:
            is_first = environment not in self._tasks
            self._tasks.setdefault(environment, []).append(task)
        if is_first:
            self._clock.start(_POLL_S, lambda: self._look(environment))
        return True

    def flush(self) -> None:
        """Queue all kept tasks: this process leaves. The clock's `flush` looks at them."""
        self._leaving = True

    def _is_being_made(self, environment: Environment) -> bool:
        from fastrt.worker import installing  # here: few tasks have packages of their own

        return installing.is_being_made(self._store, environment)

    def _look(self, environment: Environment) -> float | None:
        """Queue an environment's tasks once it is made, and end those that were cancelled; called by the clock."""
        with contextlib.suppress(FastrtError):  # the session has ended, or is broken
            wait = not self._leaving and self._is_being_made(environment)
            with self._lock:
                tasks = self._tasks.pop(environment)
                due = [task for task in tasks if not wait or core.cancelled(self._client, task)]
                if wait:
                    self._tasks[environment] = [task for task in tasks if task not in due]
            for task in due:
                self._give_back(task)
            return _POLL_S if wait else None
        return None

    def _give_back(self, task: int) -> None:
        if not core.give_back(self._client, task):
            cancelled = TaskCancelledError("the task was cancelled while its packages were installed")
            self._store.put_error(task, cancelled)
            core.finish(self._client, task, tally.CANCELLED)
