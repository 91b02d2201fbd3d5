"""The calls of one `Executor.map`: a list of references instead of futures, which nobody else can get hold of.

Whoever iterates waits for them in order, so no thread is needed for that; one reference at a time is watched for
the executor, which must know when all have ended.
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
    """Who is told what becomes of the calls."""

    def batch_ended(self, batch: Batch) -> None:
        """All of them have ended."""

    def raised(self, exc: BaseException) -> None:
        """One of them ended with an error."""


class Batch:
    """Calls that are submitted.

    Args:
        owner: who is told.
        store: this process's attachment.
        started: the reference of each call, in order, or the exception that kept it from being submitted.
    """

    def __init__(self, owner: Owner, store: Store, started: list[Any]) -> None:
        started.reverse()
        self._left = started  # newest first: the next one is popped from the end
        self._owner = owner
        self._store = store

    def watch(self) -> None:
        """Look out for the end: for the newest that has no result yet."""
        try:
            for ref in self._refs():
                if not handles.is_ready(self._store.client, ref):
                    when_ready(self._store, ref, self._told)
                    return
        except FastrtError:
            pass  # the session has ended, and so have they
        self._owner.batch_ended(self)

    def results(self, deadline: float | None, timeout: float | None) -> Iterator[Any]:
        """Yield the results in order; see `Executor.map`."""
        try:
            while self._left:
                yield self._next(deadline, timeout)  # in one expression: what was yielded is not kept
        finally:
            left = self.withdraw()
            self._left[:] = left

    def withdraw(self) -> list[ObjectRef]:
        """Cancel the calls that nobody has begun with; return those that run."""
        running = []
        try:
            unread.mark(self._store.client, self._refs())  # an error that ends the iteration stands for the others
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

    def _told(self, ref: ObjectRef, ended: BaseException | None) -> None:
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
                self._left.append(ref)  # it goes on, or is cancelled with the others
                raise concurrent.futures.TimeoutError(f"no result within {timeout} s") from None
            self._owner.raised(exc)
            raised = as_raised(exc)
            try:
                raise raised from raised.__cause__
            finally:
                del raised  # it knows this frame: together they would be garbage that only the cycle collector finds


def chunks_of(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Lists of `size` rows; the last may be shorter."""
    chunk: list[tuple[Any, ...]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def flat(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    """What is in the lists, one after the other, without keeping what was handed out."""
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()
