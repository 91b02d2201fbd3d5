"""Retries of tasks that raised: whether a task runs again, when, and in which process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import submission, tally
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError, TaskCancelledError
from fastrt.worker.alarms import Clock
from fastrt.worker.policies import Policies

if TYPE_CHECKING:
    from fastrt.store.client import Store

_POLL_S = 0.05  # how soon a delayed retry notices that its task was cancelled


class Retries:
    """Runs tasks again that raised.

    A task is queued for any worker. An actor's call is run again by the actor's process: no other process has the
    instance.

    Args:
        store: this process's attachment.
        policies: of the tasks that this process runs.
        clock: queues tasks whose retry has a delay.
        keep: keeps the failure of an attempt that another one follows.

    Attributes:
        in_place: whether this process runs its calls again itself, because it is an actor.
    """

    in_place = False

    def __init__(
        self, store: Store, policies: Policies, clock: Clock, keep: Callable[[int, BaseException], object]
    ) -> None:
        self._store = store
        self._keep = keep
        self._client = store.client
        self._policies = policies
        self._clock = clock
        self._leaving = False

    def wanted(self, task: int, exc: BaseException) -> bool:
        """Whether a task runs again after an exception that its code raised."""
        kind = type(exc)  # `isinstance` would call the exception's own `__class__`, which is user code
        if not issubclass(kind, Exception) or not core.info(self._client, task)["flags"] & core.RETRY_ERRORS:
            return False
        named = self._policies.of_failed(task).retry_on
        matches = not issubclass(kind, FastrtError) if named in ((), (Exception,)) else issubclass(kind, named)
        return matches and self._attempts_left(task)

    def requeue(self, task: int, exc: BaseException) -> bool:
        """Queue a task that raised for another attempt, now or after its delay.

        Returns:
            False if the task does not run again, or is run again by its own process.
        """
        if self.in_place or not self.wanted(task, exc):
            return False
        self._keep(task, exc)
        delay = self._delay_of(task, 0)
        if not delay:
            return core.retry(self._client, task)
        if not self._attempts_left(task):
            return False
        until = time.monotonic() + delay
        submission.park(self._client, task)

        def queue_when_due() -> float | None:
            with contextlib.suppress(FastrtError):  # the session has ended, or is broken
                left = until - time.monotonic()
                if left > 0 and not core.cancelled(self._client, task) and not self._leaving:
                    return min(left, _POLL_S)
                if not core.retry(self._client, task):
                    cancelled = TaskCancelledError("the task was cancelled while it waited to run again")
                    self._store.put_error(task, cancelled)
                    core.finish(self._client, task, tally.CANCELLED)
            return None

        self._clock.start(min(delay, _POLL_S), queue_when_due)
        return True

    def flush(self) -> None:
        """Queue all tasks that wait for their delay now: this process leaves."""
        self._leaving = True
        self._clock.flush()

    def around(self, task: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls an actor's method until it does not fail, or has no attempts left."""

        def call(*args: Any, **kwargs: Any) -> Any:
            while True:
                try:
                    return function(*args, **kwargs)
                except Exception as exc:
                    if not self._begin_again(task, exc):
                        raise
                threading.Event().wait(self._delay_of(task, 1))
                if core.cancelled(self._client, task):
                    raise TaskCancelledError("the call was cancelled while it waited to run again")

        return call

    async def wait_on_loop(self, task: int, exc: BaseException) -> bool:
        """Wait for the delay of a call that raised on an event loop; False if the call does not run again."""
        if not self._begin_again(task, exc):
            return False
        import asyncio  # here: workers that need no event loop start sooner without it

        await asyncio.sleep(self._delay_of(task, 1))
        return True

    def _begin_again(self, task: int, exc: BaseException) -> bool:
        """Count one more attempt of an actor's call."""
        if not self.wanted(task, exc):
            return False
        self._keep(task, exc)
        return bool(submission.again(self._client, task))

    def _delay_of(self, task: int, begun: int) -> float:
        """Seconds before the next attempt; `begun` is 1 when that attempt has been counted already."""
        return self._policies.of(task).delay(core.info(self._client, task)["attempts"] - begun)

    def _attempts_left(self, task: int) -> bool:
        info = core.info(self._client, task)
        return bool(info["attempts"] <= info["retries"]) and not info["cancelled"]
