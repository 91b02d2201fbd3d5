"""`fastrt.util.Pool`: the interface of `multiprocessing.Pool` over the session's workers.

Its processes are the session's workers: the pool starts none and ends none. So the globals of a worker outlive the
pool, and `maxtasksperchild` is rejected.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol

from fastrt.runtime.nodes import cluster_resources
from fastrt.util.batch import chunks_of
from fastrt.util.calls import Kept, run_chunk, run_each
from fastrt.util.executor import Executor
from fastrt.util.futures import TaskFuture

_CHUNKS_PER_WORKER = 4  # as in the standard library
_AHEAD = 1000  # tasks that an imap submits before their results are requested

Callback = Callable[[Any], object]


class Runner(Protocol):
    """Runs the calls of a pool."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture:
        """Call `fn(*args, **kwargs)` in another process."""

    def kill(self) -> None:
        """End all calls that have not ended."""

    def wait_idle(self) -> None:
        """Wait until all calls have ended."""


class AsyncResult:
    """Pending results, which the `_async` methods of a pool return."""

    def __init__(
        self,
        futures: list[TaskFuture],
        collect: Callable[[list[Any]], Any],
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> None:
        self._futures = futures
        self._collect = collect
        self._callback = callback
        self._error_callback = error_callback
        self._missing = len(futures)
        self._lock = threading.Lock()
        if callback is not None or error_callback is not None:
            for future in futures:
                future.add_done_callback(self._one_done)
            if not futures and callback is not None:
                callback(collect([]))

    def get(self, timeout: float | None = None) -> Any:
        """Wait until all calls have ended; return the results, or raise the exception of the first failed call.

        Args:
            timeout: seconds to wait at most; None waits without a limit.
        Raises:
            multiprocessing.TimeoutError: the timeout passed.
        """
        self.wait(timeout)
        if not self.ready():
            raise multiprocessing.TimeoutError
        return self._collect([future.result() for future in self._futures])

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the results are ready, or the timeout has passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for future in self._futures:
            try:
                future.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except concurrent.futures.TimeoutError:
                return
            except concurrent.futures.CancelledError:
                continue

    def ready(self) -> bool:
        """Whether all calls have ended."""
        return all(future.done() for future in self._futures)

    def successful(self) -> bool:
        """Whether no call raised.

        Raises:
            ValueError: not all have ended.
        """
        if not self.ready():
            raise ValueError(f"{self!r} is not ready: wait for it first")
        return all(not future.cancelled() and future.exception() is None for future in self._futures)

    def _one_done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        try:
            value = self.get(0)
        except BaseException as exc:  # the exception of the call
            if self._error_callback is not None:
                self._error_callback(exc)
        else:
            if self._callback is not None:
                self._callback(value)


class ImapIterator:
    """The iterator of `imap` and `imap_unordered`. It submits some tasks before their results are requested."""

    def __init__(
        self, start: Callable[[Any], TaskFuture], chunks: Iterator[Any], in_order: bool, in_chunks: bool
    ) -> None:
        self._start = start
        self._chunks = chunks
        self._in_order = in_order
        self._in_chunks = in_chunks  # else each task is one call
        self._lock = threading.RLock()
        self._pending: deque[TaskFuture] = deque()  # in order
        self._out: set[TaskFuture] = set()  # not in order
        self._done: deque[TaskFuture] = deque()
        self._came = threading.Semaphore(0)
        self._values: deque[Any] = deque()
        self.fill(_AHEAD)

    def __iter__(self) -> ImapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, or raise the exception of its call.

        Args:
            timeout: seconds to wait at most; None waits without a limit.
        Raises:
            StopIteration: there are no more.
            multiprocessing.TimeoutError: the timeout passed.
        """
        if not self._in_chunks:
            return self._next_ended(timeout).result()
        while not self._values:
            self._values.extend(self._next_ended(timeout).result())
        return self._values.popleft()

    def fill(self, most: float) -> None:
        """Submit tasks until `most` results are pending."""
        with self._lock:
            while len(self._pending) + len(self._out) + len(self._done) < most:
                try:
                    chunk = next(self._chunks)
                except StopIteration:
                    return
                future = self._start(chunk)
                if self._in_order:
                    self._pending.append(future)
                else:
                    self._out.add(future)
                    future.add_done_callback(self._one_done)

    def _next_ended(self, timeout: float | None) -> TaskFuture:
        self.fill(_AHEAD)
        if self._in_order:
            if not self._pending:
                raise StopIteration
            try:
                self._pending[0].exception(timeout)
            except concurrent.futures.TimeoutError:
                raise multiprocessing.TimeoutError from None
            except concurrent.futures.CancelledError:
                pass  # `result` raises it
            return self._pending.popleft()
        with self._lock:
            if not self._out and not self._done:
                raise StopIteration
        if not self._came.acquire(timeout=timeout):
            raise multiprocessing.TimeoutError
        return self._done.popleft()

    def _one_done(self, future: Any) -> None:
        with self._lock:
            self._out.discard(future)
            self._done.append(future)
        self._came.release()


class Pool:
    """Runs calls in the workers of the session, which it starts if there is none.

    Args:
        processes: how many tasks may run at once; default: as many as the cluster has CPUs.
        initializer: called in each worker before its first task of this pool. If it raises, every call raises
            `BrokenExecutor`; the standard library restarts processes endlessly.
        initargs: arguments of the initializer.
        maxtasksperchild: must be None, because the pool cannot end the session's workers.
    Raises:
        TypeError, ValueError: an argument is wrong.
    Source:
        `multiprocessing.pool.Pool`.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
    ) -> None:
        if maxtasksperchild is not None:
            raise ValueError(
                f"maxtasksperchild={maxtasksperchild!r} is not supported: a pool's tasks run in the workers of the "
                "session, which other code uses too; for processes that end, use actors"
            )
        if processes is not None and (not isinstance(processes, int) or processes < 1):
            raise ValueError(f"processes is {processes!r}; it must be a whole number from 1 on")
        self._begin(Executor(processes, initializer=initializer, initargs=tuple(initargs)), processes)

    def _begin(self, executor: Runner, processes: int | None) -> None:
        self._executor = executor
        self._processes = processes
        self._state = "running"
        self._imaps: weakref.WeakSet[ImapIterator] = weakref.WeakSet()

    def __enter__(self) -> Pool:
        self._check_running()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.terminate()

    def __repr__(self) -> str:
        return f"<fastrt.util.Pool {self._state}, processes={self._processes}>"

    def __reduce__(self) -> Any:
        raise NotImplementedError("a pool cannot be sent to another process; create one there")

    def apply(self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: dict[str, Any] | None = None) -> Any:
        """Call `func(*args, **kwds)` in a worker and return its result."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: dict[str, Any] | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Call `func` in a worker, like `apply`, without waiting.

        Args:
            func, args, kwds: the call.
            callback: called with the result, in a thread of this process; it must not block.
            error_callback: called with the exception instead.
        """
        self._check_running()
        future = self._executor.submit(func, *args, **(kwds or {}))
        return AsyncResult([future], lambda values: values[0], callback, error_callback)

    def map(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = None) -> list[Any]:
        """Call `func` with each item; return a list of the results.

        Args:
            func: anything that can be called and pickled.
            iterable: the items.
            chunksize: number of calls in one task; by default there are 4 tasks for each worker.
        """
        return self.map_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def map_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Call `func` with each item, like `map`, without waiting; callbacks as for `apply_async`."""
        return self._map(functools.partial(run_each, func), list(iterable), chunksize, callback, error_callback)

    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """Call `func`, like `map`; each item holds the arguments of a call."""
        return self.starmap_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Call `func`, like `starmap`, without waiting; callbacks as for `apply_async`."""
        rows = [tuple(item) for item in iterable]
        return self._map(functools.partial(run_chunk, func), rows, chunksize, callback, error_callback)

    def imap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> ImapIterator:
        """Iterate over the results of `map`; `iterable` is read some way ahead of the results."""
        return self._imap(func, iterable, chunksize, True)

    def imap_unordered(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> ImapIterator:
        """Iterate over the results, like `imap`, in the order in which they become ready."""
        return self._imap(func, iterable, chunksize, False)

    def close(self) -> None:
        """Stop accepting calls."""
        if self._state == "running":
            self._state = "closed"

    def terminate(self) -> None:
        """Stop accepting calls, cancel all unfinished ones, and end the workers that run them (others replace them)."""
        self._state = "terminated"
        self._executor.kill()

    def join(self) -> None:
        """Wait until all calls have ended.

        Raises:
            ValueError: the pool still accepts calls: `close` or `terminate` it first.
        """
        if self._state == "running":
            raise ValueError("Pool is still running; close or terminate it first")
        if self._state == "closed":
            for imap in list(self._imaps):
                imap.fill(float("inf"))
        self._executor.wait_idle()

    def _map(
        self,
        run_some: Callable[[list[Any]], list[Any]],
        items: list[Any],
        chunksize: int | None,
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> AsyncResult:
        self._check_running()
        if chunksize is None:
            workers = self._processes or int(cluster_resources().get("CPU", 1)) or 1
            chunksize = max(1, -(-len(items) // (workers * _CHUNKS_PER_WORKER)))
        _check_chunksize(chunksize)
        run: Any = Kept(run_some)
        futures = [self._executor.submit(run, items[at : at + chunksize]) for at in range(0, len(items), chunksize)]
        return AsyncResult(futures, lambda values: list(itertools.chain(*values)), callback, error_callback)

    def _imap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int, in_order: bool) -> ImapIterator:
        self._check_running()
        _check_chunksize(chunksize)
        shared: Any = Kept(func if chunksize == 1 else functools.partial(run_chunk, func))
        start = functools.partial(self._executor.submit, shared)
        parts = iter(iterable) if chunksize == 1 else chunks_of(((item,) for item in iterable), chunksize)
        made = ImapIterator(start, parts, in_order, chunksize > 1)
        self._imaps.add(made)
        return made

    def _check_running(self) -> None:
        if self._state != "running":
            raise ValueError(f"Pool not running: it is {self._state}")


def _check_chunksize(chunksize: Any) -> None:
    if isinstance(chunksize, bool) or not isinstance(chunksize, int) or chunksize < 1:
        raise ValueError(f"chunksize is {chunksize!r}; it must be a whole number from 1 on")
