"""The calls of one `Executor.map`: a list of references. Futures are not needed, because no other code sees the calls.

The iterating thread waits for the results in order, so no other thread is needed for that. One reference at a time is
watched for the executor, which must know when all calls have ended.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from fastrt._core.objects import handles, unread
from fastrt.errors import FastrtError, GetTimeoutError, TaskCancelledError, TaskError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.waiter import when_ready
from fastrt.util.calls import as_raised, withdraw


class Owner(Protocol):
    """Is notified when calls of a batch end."""

    def batch_ended(self, batch: Batch) -> None:
        """Called when all calls have ended."""

    def raised(self, exc: BaseException) -> None:
        """Called when a call has ended with an error."""


class Batch:
    """The submitted calls of one `map`.

    Args:
        owner: is notified when calls end.
        store: this process's attachment.
        started: the reference of each call, in order, or the exception that prevented its submission.
    """

    def __init__(self, owner: Owner, store: Store, started: list[Any]) -> None:
        started.reverse()
        self._left = started  # newest first: the next one is popped from the end
        self._owner = owner
        self._store = store

    def watch(self) -> None:
        """Watch for the end of all calls: watch the newest call that has no result yet."""
        try:
            for ref in self._refs():
                if not handles.is_ready(self._store.client, ref):
                    when_ready(self._store, ref, self._on_ready)
                    return
        except FastrtError:
            pass  # the session has ended, and so have the calls
        self._owner.batch_ended(self)

    def results(self, deadline: float | None, timeout: float | None) -> Iterator[Any]:
        """Yield the results in order; see `Executor.map`."""
        try:
            while self._left:
                yield self._next(deadline, timeout)  # in one expression, so that no variable keeps the result alive
        finally:
            left = self.withdraw()
            self._left[:] = left

    def withdraw(self) -> list[ObjectRef]:
        """Cancel the calls that no worker has begun; return the references of those that run."""
        running = []
        try:
            unread.mark(self._store.client, self._refs())  # the error that ends the iteration is the only one reported
            for ref in self._refs():
                if not handles.is_ready(self._store.client, ref) and not withdraw(self._store, ref):
                    running.append(ref)
        except FastrtError:
            return []  # the session has ended
        return running

    def wait(self) -> None:
        """Wait until all have ended."""
        refs = self._refs()
        try:
            if refs:
                self._store.wait(refs, len(refs), None)
        except FastrtError:
            return  # the session has ended

    def _refs(self) -> list[ObjectRef]:
        return [item for item in self._left if isinstance(item, ObjectRef)]

    def _on_ready(self, ref: ObjectRef, ended: BaseException | None) -> None:
        if ended is None:
            self.watch()
        else:
            self._owner.batch_ended(self)

    def _next(self, deadline: float | None, timeout: float | None) -> Any:
        ref = self._left.pop()
        if isinstance(ref, BaseException):
            raise ref
        try:
            return self._store.get(ref, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TaskCancelledError:
            raise concurrent.futures.CancelledError from None
        except BaseException as exc:
            if isinstance(exc, GetTimeoutError) and not isinstance(exc, TaskError):
                self._left.append(ref)  # it runs on, or is cancelled with the others
                raise concurrent.futures.TimeoutError(f"no result within {timeout} s") from None
            self._owner.raised(exc)
            raised = as_raised(exc)
        try:
            raise raised from raised.__cause__  # here its context is not `exc`, which names it: a cycle
        finally:
            del raised  # it refers to this frame: together they would be a cycle, too


def chunks_of(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield lists of `size` rows; the last may be shorter."""
    chunk: list[tuple[Any, ...]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def flat(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    """Yield the items of the lists in order, without keeping those already yielded."""
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()
