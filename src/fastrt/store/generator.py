"""`ObjectRefGenerator`: the result of a generator task, which returns references to items while the task runs."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Generic

from fastrt._core.memory.clients import ForkedHandle
from fastrt._core.objects import handles
from fastrt._core.tasks import generators
from fastrt.errors import FastrtError, GetTimeoutError
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef, T, Waitable

if TYPE_CHECKING:
    import asyncio

_NAP_S = 0.05


class ObjectRefGenerator(Waitable, Generic[T]):
    """References to the items that a generator task yields, in order: `for ref in f.remote(): fastrt.get(ref)`.

    Made by `.remote(...)` of a generator function or method.

    `next` and `async for` wait for the next item; the task runs meanwhile. If the task raises an exception, the last
    reference holds it, and its `get` raises it. Handles can be passed to tasks and actors and put into values; several
    readers share the items, and each item goes to one of them. When the last handle is gone, unread items are freed
    and the generator is closed at its next `yield`, unless a reference from `completed()` is still alive.

    Source:
        The semantics of `ray.ObjectRefGenerator`.
    """

    __slots__ = ("__weakref__", "_end", "_over", "_stream")

    def __init__(self, stream: ObjectRef, end: ObjectRef) -> None:
        self._stream = stream
        self._end = end
        self._over = False

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        store = store_client.current()
        if store is None or self._over:
            return self.next()
        try:  # the fast path of `next`, with as few steps as possible
            found = generators.take(store.client, self._stream, self._end, 0, store.spin_s)
        except ForkedHandle:
            return self.next()
        if found is False:
            return self.next()
        if found is None or found is self._end:
            self._over = True
            if found is None:
                raise StopIteration
        return found  # type: ignore[no-any-return]

    def next(self, timeout: float | None = None) -> ObjectRef[T]:
        """Wait for the next item.

        Args:
            timeout: seconds to wait at most; None waits without a limit, 0 only checks.
        Returns:
            A reference to the item, which is ready.
        Raises:
            StopIteration: there are no more.
            GetTimeoutError: the timeout passed.
            StaleReferenceError: its session has ended.
        """
        if timeout is not None:
            store_client.check_timeout(timeout)
        try:
            found = self._take(timeout)
        except ForkedHandle:
            found = self._take(timeout)
        if found is False:
            raise GetTimeoutError(f"{self!r} had no further item after {timeout} s; wait again, or cancel it")
        if found is None:
            raise StopIteration
        return found  # type: ignore[return-value]

    def waited_for(self) -> tuple[ObjectRef, ObjectRef]:
        """Return the two references that `fastrt.wait` polls: the stream, and its end."""
        return self._stream, self._end

    def completed(self) -> ObjectRef:
        """Return a reference that is ready when the task has ended; it holds None, or the error that ended the task."""
        return self._end

    def next_ready(self) -> bool:
        """Whether `next` would return a reference at once; False when everything has been read."""
        return not self.is_finished() and bool(generators.is_ready(self._store().client, self._stream, self._end))

    def close(self) -> None:
        """Read no further items. The task is closed at its next `yield` when the last handle is gone."""
        self._over = True

    def is_finished(self) -> bool:
        """Whether all items have been read."""
        if not self._over:
            store = self._store()
            ended = handles.is_ready(store.client, self._end)
            about = generators.info(store.client, self._stream)
            more = about["unread"] or about["limit"] == generators.ELSEWHERE
            self._over = ended and not more and not handles.describe(store.client, self._end)["error"]
        return self._over

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        while True:
            found = self._look()
            if found is None:
                raise StopAsyncIteration
            if found is not False:
                return found  # type: ignore[return-value]
            await _readers.wait(self)

    def __repr__(self) -> str:
        return f"ObjectRefGenerator({self._stream.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectRefGenerator, (self._stream, self._end)

    def _store(self) -> Store:
        if store_client.current() is None:
            store_client.refuse_stale(self._stream)
        return store_client.require()

    def _take(self, timeout: float | None) -> ObjectRef | bool | None:
        store = self._store()
        found = self._look(store.spin_s)
        if found is False and timeout != 0:
            with store.blocked():
                found = self._taken(generators.take(store.client, self._stream, self._end, timeout, 0.0))
        return found

    def _look(self, spin_s: float = 0.0) -> ObjectRef | bool | None:
        """The next item; None at the end, False when it is not there yet."""
        if self._over:
            return None
        return self._taken(generators.take(self._store().client, self._stream, self._end, 0, spin_s))

    def _taken(self, found: ObjectRef | bool | None) -> ObjectRef | bool | None:
        self._over = found is None or found is self._end
        return found


class _Readers:
    """Waits in one thread for items that event loops await; the thread ends when no reader waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[ObjectRefGenerator, asyncio.Future[None]]] = []
        self._running = False

    async def wait(self, reader: ObjectRefGenerator) -> None:
        """Wait until `reader` has an item or has ended."""
        import asyncio  # here: a program without an event loop need not load it

        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((reader, future))
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, name="fastrt-readers", daemon=True).start()
        else:
            client = store_client.require().client
            client.wake(client.index)  # the thread sleeps, and must add this reader to its wait
        await future

    def _run(self) -> None:
        while True:
            with self._lock:
                self._waiting = [one for one in self._waiting if not one[1].done()]
                waiting = list(self._waiting)
                if not waiting:
                    self._running = False
                    return
            try:
                client = store_client.require().client
                pairs = [(reader._stream, reader._end) for reader, _ in waiting]
                generators.wait_some(client, pairs, 1, _NAP_S, 0.0)
                ready = [one for one, pair in zip(waiting, pairs, strict=True) if generators.is_ready(client, *pair)]
            except FastrtError:
                ready = waiting  # the session is gone: each reader's next call raises the error
            for one in ready:
                _settle(one[1])
            if ready:
                with self._lock:
                    self._waiting = [one for one in self._waiting if one not in ready]


def _settle(future: asyncio.Future[None]) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(None)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        pass  # its loop is closed, so no coroutine waits


_readers = _Readers()


def _forget_after_fork() -> None:
    global _readers
    _readers = _Readers()  # the parent's thread does not exist here, and its lock may be held


os.register_at_fork(after_in_child=_forget_after_fork)
