"""`fastrt.Executor`: a `concurrent.futures.Executor` whose calls are tasks.

It has no workers and no threads of its own: the session's workers run the calls, one thread of the process watches
for their results, and `map` needs not even that. One with fewer workers than there are processors keeps the calls
that would be too many in a queue of its own; all others go straight into the shared memory.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastrt.errors import ForkedRuntimeError, TaskError
from fastrt.runtime.nodes import cluster_resources
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.util.batch import Batch, chunks_of, flat
from fastrt.util.calls import Calls, InitializerFailedError, run_chunk
from fastrt.util.futures import TaskFuture

_RETRIES = 3
_LOOK_S = 1.0  # the end of the program waits for calls in steps: an interrupt shall end that
_exiting = False


class Executor(concurrent.futures.Executor):
    """Runs calls in the workers of the session, which it starts if there is none.

    Calls are pickled by cloudpickle, so lambdas, closures and functions of `__main__` will do; a function that
    depends on nothing but globals is sent once, and again when the program assigns one of them. In each worker the
    initializer and the functions of one module share their globals. A call whose worker dies runs again, in the end
    it has `WorkerCrashedError`, and the executor goes on. An exception arrives as it was raised, with the remote
    traceback (a `TaskError`) as its cause. Inside a task, wait by `result` or `exception`.

    Args:
        max_workers: how many calls may run at once; default: as many as the cluster has CPUs.
        initializer: called in each worker before the first call there. If it raises, the executor is broken.
        initargs: its arguments, a tuple.
        max_retries: how often a call runs again after its worker died.
        remote_args: further settings of the calls, as for `fastrt.remote`: {"num_cpus": 2}.
    Raises:
        TypeError, ValueError: an argument is wrong.
    Source:
        `concurrent.futures.ProcessPoolExecutor`.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_retries: int = _RETRIES,
        remote_args: Mapping[str, Any] | None = None,
    ) -> None:
        if max_workers is not None and (isinstance(max_workers, bool) or not isinstance(max_workers, int)):
            raise TypeError(f"max_workers is {max_workers!r}; it must be a whole number or None")
        if max_workers is not None and max_workers <= 0:
            raise ValueError(f"max_workers must be greater than 0; it is {max_workers}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, not {type(initializer).__name__}")
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or not 0 <= max_retries <= 250:
            raise ValueError(f"max_retries is {max_retries!r}; it must be a whole number from 0 to 250")
        self._max_workers = max_workers
        self._limit: int | None = max_workers  # None: the calls need not be counted
        self._limited_in: Store | None = None  # the session that this was found out in
        self._calls = Calls(max_retries, initializer, tuple(initargs), remote_args)
        self._lock = threading.Lock()
        self._queued: dict[TaskFuture, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}
        self._unfinished: set[TaskFuture] = set()
        self._batches: set[Batch] = set()
        self._busy = 0  # tasks that are submitted and not ended
        self._closed = False
        self._broken = ""
        self._pid = os.getpid()
        _live.add(self)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture:
        """Call `fn(*args, **kwargs)` in a worker.

        Args:
            fn: anything that can be called and pickled.
            *args, **kwargs: its arguments. ObjectRefs among them are replaced by their values; large arrays go
                through the store without a copy at the other side.
        Returns:
            A future of the result. What keeps the call from being sent is its exception, too.
        Raises:
            RuntimeError: the executor is shut down, or the program ends.
            BrokenExecutor: its initializer has failed.
            ForkedRuntimeError: it belongs to the process that this one was forked from.
        """
        future = TaskFuture(self)
        limit = self._find_limit()
        with self._lock:
            self._check_open()
            self._unfinished.add(future)
            if limit is not None and self._busy >= limit:
                self._queued[future] = (fn, args, kwargs)
                return future
            self._busy += 1
        self._start(future, fn, args, kwargs)
        return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[Any]:
        """Call `fn` with one item of each iterable, for as many as the shortest has.

        Args:
            fn: anything that can be called and pickled.
            *iterables: read to their end before this returns.
            timeout: seconds from now until the last result must be there; None waits for ever.
            chunksize: how many calls make one task. A task costs some 3 us, so only tiny calls gain by it.
        Returns:
            An iterator of the results, in order. What a call raised is raised in its place, and ends the iterator; the
            calls that nobody has begun with then are cancelled.
        Raises:
            ValueError: chunksize is below 1.
            TimeoutError: from the iterator.
            RuntimeError, BrokenExecutor, ForkedRuntimeError: as for `submit`.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize must be >= 1; it is {chunksize}")
        if chunksize == 1:
            return self._map(fn, iterables, timeout)
        chunks = chunks_of(zip(*iterables, strict=False), chunksize)
        return flat(self._map(functools.partial(run_chunk, fn), (chunks,), timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        Args:
            wait: whether to wait until all calls have ended. The end of the program waits for them in any case.
            cancel_futures: whether to cancel the calls that no worker has begun with.
        """
        with self._lock:
            self._closed = True
        if cancel_futures:
            for future in self._all():
                future.cancel()
            for batch in list(self._batches):
                batch.withdraw()
        if wait:
            self.wait_idle()

    def kill(self) -> None:
        """Take no more calls, cancel those there are, and end the workers that run them."""
        with self._lock:
            self._closed = True
        for future in self._all():
            future.kill()
        for batch in list(self._batches):
            batch.withdraw()

    def wait_idle(self) -> None:
        """Wait until all calls that were made have ended."""
        for batch in list(self._batches):
            batch.wait()
        for future in self._all():
            while True:
                try:
                    future.exception(_LOOK_S)
                    break
                except concurrent.futures.CancelledError:
                    break
                except concurrent.futures.TimeoutError:
                    continue

    # ---- told by futures ----

    def drop_queued(self, future: TaskFuture) -> bool:
        """Take a future back whose task is not submitted yet; False when it is, or is about to be."""
        with self._lock:
            found = self._queued.pop(future, None) is not None
            if found:
                self._unfinished.discard(future)
            return found

    def finished(self, future: TaskFuture) -> None:
        """A task has ended: submit the next."""
        with self._lock:
            self._unfinished.discard(future)
            self._busy -= 1
            if not self._queued:
                return
            following = next(iter(self._queued))
            call = self._queued.pop(following)
            self._busy += 1
        self._start(following, *call)

    def raised(self, exc: BaseException) -> None:
        """A call ended with an error: is it that none can be run?"""
        if not isinstance(exc, InitializerFailedError):
            return
        text = str(exc.cause if isinstance(exc, TaskError) else exc)
        with self._lock:
            first, self._broken = not self._broken, text
            queued, self._queued = self._queued, {}
            self._unfinished.difference_update(queued)
        if first:
            logging.getLogger("concurrent.futures").critical("Exception in initializer: %s", text)
        for future in queued:
            future.set_exception(InitializerFailedError(self._broken))

    # ---- helpers ----

    def _start(self, future: TaskFuture, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            ref = self._calls.start(fn, args, kwargs)
        except Exception as exc:  # arguments that do not fit, or cannot be pickled; no room; no session
            future.set_exception(exc)
            self.finished(future)
            return
        future.bind(store_client.require(), ref)

    def _map(
        self, fn: Callable[..., Any], iterables: tuple[Iterable[Any], ...], timeout: float | None
    ) -> Iterator[Any]:
        if self._find_limit() is not None:
            return super().map(fn, *iterables, timeout=timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._check_open()
        batch = Batch(self, store_client.require(), self._calls.start_each(fn, zip(*iterables, strict=False)))
        with self._lock:
            self._batches.add(batch)
        batch.watch()
        return batch.results(deadline, timeout)

    def batch_ended(self, batch: Batch) -> None:
        """All calls of a `map` have ended."""
        with self._lock:
            self._batches.discard(batch)

    def _all(self) -> list[TaskFuture]:
        with self._lock:
            return list(self._unfinished)

    def _find_limit(self) -> int | None:
        """How many tasks there may be at once; None when the workers alone see to that."""
        if self._max_workers is None:
            return None
        store = store_client.require()
        if store is not self._limited_in:
            cpus = cluster_resources().get("CPU", 0.0)
            self._limit = None if self._max_workers >= cpus else self._max_workers
            self._limited_in = store
            store.users.add(self)
        return self._limit

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        self._limited_in = None

    def _check_open(self) -> None:
        if self._broken:
            raise InitializerFailedError(self._broken)
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if _exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if os.getpid() != self._pid:
            raise ForkedRuntimeError("this executor belongs to the process that forked this one; make another here")


_live: weakref.WeakSet[Executor] = weakref.WeakSet()


def _at_exit() -> None:
    """The program ends: calls that were made are run, as by the executors of the standard library."""
    global _exiting
    _exiting = True
    for executor in list(_live):
        if executor._pid == os.getpid():
            executor.wait_idle()


atexit.register(_at_exit)  # after that of the runtime below, so it comes first
