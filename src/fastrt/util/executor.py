"""`fastrt.Executor`: a `concurrent.futures.Executor` whose calls are tasks.

It starts no workers and no threads: the session's workers run the calls, and one thread of the process watches for
their results; `map` does not even need that thread. An executor with fewer workers than the cluster has CPUs queues the
calls beyond its limit in this process; all other calls are submitted to shared memory at once.
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
from typing import TYPE_CHECKING, Any

from fastrt.errors import ForkedRuntimeError, TaskError
from fastrt.runtime.nodes import cluster_resources
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.util.batch import Batch, chunks_of, flat
from fastrt.util.calls import Calls, InitializerFailedError, run_chunk
from fastrt.util.futures import TaskFuture

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec, TypeVar, overload

    from fastrt.store.ref import ObjectRef

    _P = ParamSpec("_P")
    _V = TypeVar("_V")
    _A0 = TypeVar("_A0")
    _A1 = TypeVar("_A1")

_RETRIES = 3
_LOOK_S = 1.0  # at its end the program waits for calls in steps, so that an interrupt can end the wait
_exiting = False


class Executor(concurrent.futures.Executor):
    """Runs calls in the workers of the session, which it starts if there is none.

    Calls are pickled by cloudpickle, so lambdas, closures and functions of `__main__` work; a function that depends
    only on globals is sent once, and again when the program assigns one of them. In each worker the initializer and
    the functions of one module share their globals. A call whose worker dies is retried; after the last retry it raises
    `WorkerCrashedError`, and the executor stays usable. An exception keeps its type, with the remote traceback (a
    `TaskError`) as its cause. Inside a task, wait by `result` or `exception`.

    Args:
        max_workers: how many calls may run at once; default: as many as the cluster has CPUs.
        initializer: called in each worker before the first call there. If it raises, the executor is broken.
        initargs: arguments of the initializer, a tuple.
        max_retries: how often a call is retried after its worker died.
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
        self._limited_in: Store | None = None  # the session for which `_limit` was computed
        self._calls = Calls(max_retries, initializer, tuple(initargs), remote_args)
        self._lock = threading.Lock()
        self._queued: dict[TaskFuture, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}
        self._unfinished: set[TaskFuture] = set()
        self._batches: set[Batch] = set()
        self._busy = 0  # submitted tasks that have not ended
        self._closed = False
        self._broken = ""
        self._pid = os.getpid()
        _live.add(self)

    if TYPE_CHECKING:

        @overload
        def submit(self, fn: Callable[_P, _V], /, *args: _P.args, **kwargs: _P.kwargs) -> TaskFuture[_V]: ...
        @overload
        def submit(
            self,
            fn: Callable[Concatenate[_A0, _P], _V],
            a0: ObjectRef[_A0],
            /,
            *args: _P.args,
            **kwargs: _P.kwargs,
        ) -> TaskFuture[_V]: ...
        @overload
        def submit(
            self,
            fn: Callable[Concatenate[_A0, _A1, _P], _V],
            a0: _A0 | ObjectRef[_A0],
            a1: ObjectRef[_A1],
            /,
            *args: _P.args,
            **kwargs: _P.kwargs,
        ) -> TaskFuture[_V]: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture[Any]:
        """Call `fn(*args, **kwargs)` in a worker.

        Args:
            fn: anything that can be called and pickled.
            *args, **kwargs: its arguments. ObjectRefs among them are replaced by their values; workers read large
                arrays from the store without a copy.
        Returns:
            A future of the result. An error that prevents the submission becomes the future's exception.
        Raises:
            RuntimeError: the executor is shut down, or the program ends.
            BrokenExecutor: the initializer has failed.
            ForkedRuntimeError: the executor belongs to the process that this one was forked from.
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
        fn: Callable[..., _V],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[_V]:
        """Call `fn` with one item of each iterable, for as many as the shortest has.

        Args:
            fn: anything that can be called and pickled.
            *iterables: read to their end before this returns.
            timeout: seconds from now until the last result must be ready; None waits without a limit.
            chunksize: number of calls in one task. A task costs some 3 us, so only tiny calls gain by it.
        Returns:
            An iterator of the results, in order. If a call raised, the iterator raises its exception and ends; calls
            that no worker has begun by then are cancelled.
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
        """Stop accepting calls.

        Args:
            wait: whether to wait until all calls have ended. The program waits for them at its end in any case.
            cancel_futures: whether to cancel the calls that no worker has begun.
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
        """Stop accepting calls, cancel all unfinished ones, and end the workers that run them."""
        with self._lock:
            self._closed = True
        for future in self._all():
            future.kill()
        for batch in list(self._batches):
            batch.withdraw()

    def wait_idle(self) -> None:
        """Wait until all submitted calls have ended."""
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

    # ---- called by futures ----

    def drop_queued(self, future: TaskFuture) -> bool:
        """Drop a future whose task is not submitted yet; False if the task is submitted, or is about to be."""
        with self._lock:
            found = self._queued.pop(future, None) is not None
            if found:
                self._unfinished.discard(future)
            return found

    def finished(self, future: TaskFuture) -> None:
        """Submit the next call after a task has ended."""
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
        """Break the executor if a call ended because the initializer failed."""
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
        except Exception as exc:  # wrong arguments, or they cannot be pickled; a full store; no session
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
        """Forget a `map` whose calls have all ended."""
        with self._lock:
            self._batches.discard(batch)

    def _all(self) -> list[TaskFuture]:
        with self._lock:
            return list(self._unfinished)

    def _find_limit(self) -> int | None:
        """The limit of unfinished tasks; None if the number of workers is the only limit."""
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
        """Drop the reference to a session that has ended, so that its segment can be unmapped."""
        self._limited_in = None

    def _check_open(self) -> None:
        if self._broken:
            raise InitializerFailedError(self._broken)
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if _exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if os.getpid() != self._pid:
            raise ForkedRuntimeError("this executor belongs to the process that forked this one; create another here")


_live: weakref.WeakSet[Executor] = weakref.WeakSet()


def _at_exit() -> None:
    """Run all submitted calls to their end before the program exits, like the executors of the standard library."""
    global _exiting
    _exiting = True
    for executor in list(_live):
        if executor._pid == os.getpid():
            executor.wait_idle()


atexit.register(_at_exit)  # registered after the runtime's handler, which the package imports: it runs before that
