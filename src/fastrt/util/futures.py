"""The future of an executor's call: `concurrent.futures.Future` over a reference.

It is settled by whoever comes first: the process's one watching thread, or a thread that waits for just this result
and so needs no other. It stays PENDING until then, whatever its task does: how far that is, is asked of the task.
"""

from __future__ import annotations

import concurrent.futures
from concurrent.futures._base import CANCELLED
from typing import Any, Protocol

from fastrt._core.objects import pending
from fastrt.errors import FastrtError, GetTimeoutError, TaskCancelledError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.waiter import when_ready
from fastrt.tasks.cancel import cancel_in
from fastrt.util.calls import as_raised, withdraw


class Owner(Protocol):
    """Who is told what becomes of a future."""

    def drop_queued(self, future: TaskFuture) -> bool:
        """Take a future back whose task is not submitted yet; False when it is, or is about to be."""

    def finished(self, future: TaskFuture) -> None:
        """Nothing of the future's task goes on any more."""

    def raised(self, exc: BaseException) -> None:
        """A call ended with an error."""


class TaskFuture(concurrent.futures.Future[Any]):
    """What `fastrt.Executor.submit` returns.

    A call can be cancelled until a worker has begun with it. Inside a task, `result` and `exception` give the
    worker's place to others while they wait, so that calls may wait for calls.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner
        self._task: tuple[Store, ObjectRef] | None = None

    def bind(self, store: Store, ref: ObjectRef) -> None:
        """The task is submitted: its result will be `ref`."""
        self._task = (store, ref)
        try:
            when_ready(store, ref, self._told)
        except FastrtError as exc:  # the session has just ended
            self._told(ref, exc)

    def cancel(self) -> bool:
        """Cancel the call if no worker has begun with it; whether it is cancelled."""
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
        """Whether a worker has begun with the call and not ended it."""
        task = self._task
        if task is None or self.done():
            return False
        try:
            return pending.stage(task[0].client, task[1]) == pending.RUNNING
        except FastrtError:
            return False

    def result(self, timeout: float | None = None) -> Any:
        """Return what the call returned; see `concurrent.futures.Future.result`."""
        self._wait(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the call raised, or None; see `concurrent.futures.Future.exception`."""
        self._wait(timeout)
        return super().exception(timeout)

    def _wait(self, timeout: float | None) -> None:
        """Wait in this thread, without the watching one."""
        task = self._task
        if task is None or self.done():
            return
        store, ref = task
        try:
            store.wait_ready([ref], timeout, store.spin_s)
        except GetTimeoutError:
            raise concurrent.futures.TimeoutError from None
        except FastrtError:
            return  # the session has ended: the watching thread says so to all
        if not self._done_callbacks:  # type: ignore[attr-defined]  # these belong into the watching thread
            self._settle(store, ref)

    def _told(self, ref: ObjectRef, ended: BaseException | None) -> None:
        """In the watching thread: the result is there, or will never be."""
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
        except BaseException as exc:  # whatever the call raised is its result
            self._owner.raised(exc)
            self._fail(as_raised(exc))
        else:
            try:
                self.set_result(value)
            except concurrent.futures.InvalidStateError:
                return  # another thread was quicker

    def _fail(self, exc: BaseException) -> None:
        try:
            self.set_exception(exc)
        except concurrent.futures.InvalidStateError:
            return

    def _cancelled(self) -> None:
        super().cancel()
        with self._condition:  # two threads may come here, and only one may notify
            if self._state == CANCELLED:
                self.set_running_or_notify_cancel()
