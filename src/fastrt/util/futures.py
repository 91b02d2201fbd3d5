"""The future of an executor's call: `concurrent.futures.Future` over a reference.

The first of two threads sets the result: the process's one watching thread, or a thread that waits for this result.
Until then the future stays PENDING in every state of its task; the task itself is asked for its state.
"""

from __future__ import annotations

import concurrent.futures
from concurrent.futures._base import CANCELLED
from typing import TYPE_CHECKING, Any, Protocol

from fastrt._core.objects import pending
from fastrt.errors import FastrtError, GetTimeoutError, TaskCancelledError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.waiter import when_ready
from fastrt.tasks.cancel import cancel_in
from fastrt.util.calls import as_raised, withdraw

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _V = TypeVar("_V", default=Any)
else:
    from typing import TypeVar

    _V = TypeVar("_V")


class Owner(Protocol):
    """Owns a future's queued call, and is notified when the call ends."""

    def drop_queued(self, future: TaskFuture) -> bool:
        """Drop a future whose task is not submitted yet; False if the task is submitted, or is about to be."""

    def finished(self, future: TaskFuture) -> None:
        """Called when the future's task has ended."""

    def raised(self, exc: BaseException) -> None:
        """Called when a call has ended with an error."""


class TaskFuture(concurrent.futures.Future[_V]):
    """The future that `fastrt.Executor.submit` returns.

    A call can be cancelled until a worker has begun it. Inside a task, `result` and `exception` let another worker run
    while they wait, so that calls may wait for calls.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner
        self._task: tuple[Store, ObjectRef] | None = None

    def bind(self, store: Store, ref: ObjectRef) -> None:
        """Set the reference to the result of the submitted task."""
        self._task = (store, ref)
        try:
            when_ready(store, ref, self._on_ready)
        except FastrtError as exc:  # the session has just ended
            self._on_ready(ref, exc)

    def cancel(self) -> bool:
        """Cancel the call if no worker has begun it; return whether it is cancelled."""
        if self.done():
            return self.cancelled()
        task = self._task
        if task is None:
            if self._owner.drop_queued(self):
                self._cancelled()
            return self.cancelled()
        try:
            withdraw(*task, self._cancelled)
        except FastrtError:  # the session has ended, and the future gets that error
            return False
        return self.cancelled()

    def kill(self) -> None:
        """Cancel the call, and if it runs, end its worker."""
        task = self._task
        if not self.cancel() and task is not None and not self.done():
            try:
                cancel_in(*task, force=True)
            except FastrtError:
                return  # the session has ended

    def running(self) -> bool:
        """Whether a worker has begun the call and not ended it."""
        task = self._task
        if task is None or self.done():
            return False
        try:
            return pending.stage(task[0].client, task[1]) == pending.RUNNING
        except FastrtError:
            return False

    def result(self, timeout: float | None = None) -> _V:
        """Return the result of the call; see `concurrent.futures.Future.result`."""
        self._wait(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception of the call, or None; see `concurrent.futures.Future.exception`."""
        self._wait(timeout)
        return super().exception(timeout)

    def _wait(self, timeout: float | None) -> None:
        """Wait in this thread, without the watching thread."""
        task = self._task
        if task is None or self.done():
            return
        store, ref = task
        try:
            store.wait_ready([ref], timeout, store.spin_s)
        except GetTimeoutError:
            raise concurrent.futures.TimeoutError from None
        except FastrtError:
            return  # the session has ended: the watching thread fails all futures
        if not self._done_callbacks:  # type: ignore[attr-defined]  # callbacks must run in the watching thread
            self._settle(store, ref)

    def _on_ready(self, ref: ObjectRef, ended: BaseException | None) -> None:
        """Called in the watching thread when the result is ready, or the session has ended before."""
        task = self._task
        if ended is not None:
            self._fail(ended)
        elif task is not None:
            self._settle(*task)
        self._task = None
        self._owner.finished(self)

    def _settle(self, store: Store, ref: ObjectRef) -> None:
        if self.done():
            return
        try:
            value = store.load(ref)
        except TaskCancelledError:
            self._cancelled()
        except BaseException as exc:  # every exception of the call is its result
            self._owner.raised(exc)
            self._fail(as_raised(exc))
        else:
            try:
                self.set_result(value)
            except concurrent.futures.InvalidStateError:
                return  # the other thread was faster

    def _fail(self, exc: BaseException) -> None:
        try:
            self.set_exception(exc)
        except concurrent.futures.InvalidStateError:
            return

    def _cancelled(self) -> None:
        super().cancel()
        with self._condition:  # two threads may run this, and only one may notify
            if self._state == CANCELLED:
                self.set_running_or_notify_cancel()
