"""Timeouts of tasks and calls: an attempt that runs for too long is interrupted, or its process is killed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import cancel
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError, TaskTimeoutError
from fastrt.store import debugging
from fastrt.worker.alarms import Clock
from fastrt.worker.retries import Retries

if TYPE_CHECKING:
    from fastrt.store.client import Store

_GRACE_S = 5.0  # for a task to end after its timeout
_REPEAT_S = 0.1  # between interrupts: one is lost while another task runs on top of it, or native code runs


class Answered(BaseException):
    """Raised in a thread whose call has its answer already: its result is dropped."""


class Timeouts:
    """Ends attempts of tasks that run for longer than their timeout.

    Args:
        store: this process's attachment.
        clock: calls back when a timeout is over.
        retries: decides whether the task runs again when its process has to be killed.
        name_of: gives a task's name for messages.
        runs: whether a task's code is the innermost that runs on the main thread.
        fail: seals an exception as a task's result.

    Attributes:
        in_threads: calls run in threads other than the main one, where no signal can interrupt them.
    """

    in_threads = False

    def __init__(
        self,
        store: Store,
        clock: Clock,
        retries: Retries,
        name_of: Callable[[int], str],
        runs: Callable[[int], bool],
        fail: Callable[[int, BaseException], None],
    ) -> None:
        self.client = store.client
        self._debuggers = debugging.folder_of(store.socket_path)
        self.clock = clock
        self.retries = retries
        self.runs = runs
        self.name_of = name_of
        self._fail = fail
        self._timers: dict[int, _Timer] = {}  # by task
        self._answered: set[int] = set()  # threads whose call has been answered with a timeout and still runs

    def around(self, task: int, timeout_s: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a task's function with an end.

        On the main thread an exception is raised in it; if that does not help, the process is killed. In one of
        several threads nothing can interrupt it: its caller gets the error, and the call runs on.
        """
        if self.in_threads:
            return self._answering(task, timeout_s, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            timer = self._timers[task] = _Timer(self, task, timeout_s)
            try:
                return function(*args, **kwargs)
            finally:  # not reached if the timeout interrupts it here; the timer then notices the end by itself
                timer.stop()

        return call

    def error(self, task: int, timeout_s: float) -> TaskTimeoutError:
        """Return the exception for a task that did not end in time."""
        return _late(self.name_of(task), timeout_s)

    def left_s(self, task: int, began: float, timeout_s: float) -> float:
        """How long a timeout goes on that would be over now: it stands still while a debugger has the program.

        Args:
            task: the task, which runs.
            began: the attempt, by the monotonic clock.
            timeout_s: of the attempt.
        Returns:
            Seconds until the next look; 0: it is over.
        """
        still = debugging.stood_still(self._debuggers, core.info(self.client, task)["job"], began)
        left = max(0.0, began + timeout_s + still.seconds - time.monotonic())
        return max(left, debugging.LOOK_S) if still.now else left

    def raise_if_over(self, task: int) -> None:
        """Raise in a task whose timeout is over; called by the handler of SIGINT.

        Raises:
            TaskTimeoutError: it is over.
        """
        timer = self._timers.get(task)
        if timer is not None and timer.is_over():
            raise timer.error()

    def is_answered_here(self) -> bool:
        """Whether the call that runs on this thread has been answered with a timeout."""
        return threading.get_ident() in self._answered

    def end_call_here(self) -> None:
        """Let this thread take another call."""
        self._answered.discard(threading.get_ident())

    def _answering(self, task: int, timeout_s: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            thread, lock, ended = threading.get_ident(), threading.Lock(), False
            began = time.monotonic()

            def answer() -> float | None:
                with lock, contextlib.suppress(FastrtError):  # the session has ended
                    if ended:
                        return None
                    left_s = self.left_s(task, began, timeout_s)
                    if left_s:
                        return left_s
                    self._answered.add(thread)  # before the record can be another call's
                    self._fail(task, self.error(task, timeout_s))
                return None

            alarm = self.clock.start(timeout_s, answer)
            try:
                return function(*args, **kwargs)
            finally:
                alarm.stop()
                with lock:
                    ended = True
                if thread in self._answered:
                    raise Answered

        return call


class _Timer:
    """Interrupts one attempt of a task on the main thread.

    Args:
        timeouts: its owner.
        task: the task, which runs on this thread.
        timeout_s: of the attempt.
    """

    def __init__(self, timeouts: Timeouts, task: int, timeout_s: float) -> None:
        self._timeouts, self._task, self._timeout_s = timeouts, task, timeout_s
        self._name = timeouts.name_of(task)
        self._thread = threading.get_ident()
        self._attempt = self._attempt_now()
        self._interrupts = 0  # that reached the task itself, and not another one on top of it
        self._over = self._stopped = False
        self._began = time.monotonic()
        self._alarm = timeouts.clock.start(timeout_s, self._interrupt)

    def stop(self) -> None:
        """Note that the attempt has ended."""
        self._stopped = True
        self._alarm.stop()

    def is_over(self) -> bool:
        """Whether the attempt still runs although its time is over."""
        return self._over and not self._stopped and self._attempt_now() == self._attempt

    def error(self) -> TaskTimeoutError:
        """Return the exception to raise in the attempt."""
        return _late(self._name, self._timeout_s)

    def _attempt_now(self) -> tuple[int, int]:
        info = core.info(self._timeouts.client, self._task)
        return info["id"], info["attempts"]

    def _interrupt(self) -> float | None:
        """On the clock's thread: interrupt the attempt until it ends; after a grace period kill the process."""
        with contextlib.suppress(FastrtError):  # the session has ended
            if not self._over and not self._stopped:
                left_s = self._timeouts.left_s(self._task, self._began, self._timeout_s)
                if left_s:
                    return left_s
            self._over = True
            if not self.is_over():
                return None
            if self._timeouts.runs(self._task):
                self._interrupts += 1
            if self._interrupts * _REPEAT_S > _GRACE_S:
                again = self._timeouts.retries.wanted(self._task, self.error())
                cancel.end_for(self._timeouts.client, self._task, self._attempt[0], again)
            signal.pthread_kill(self._thread, signal.SIGINT)
            return _REPEAT_S
        return None


def _late(name: str, timeout_s: float) -> TaskTimeoutError:
    return TaskTimeoutError(f"task {name!r} did not end within its timeout of {timeout_s:g} s")
