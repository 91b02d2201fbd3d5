"""`ray.util.multiprocessing.Pool`: the interface of `multiprocessing.Pool` over actors, one for each process."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from typing import Any

from fastrt.errors import ConfigError
from fastrt.ray.session import find_session, init
from fastrt.ray.util.annotations import RayDeprecationWarning
from fastrt.runtime.driver import is_initialized
from fastrt.runtime.nodes import cluster_resources
from fastrt.store import client as store_client
from fastrt.store.client import get
from fastrt.tasks.actor_handle import kill
from fastrt.tasks.decorator import remote
from fastrt.util import pool
from fastrt.util.calls import Kept, call_kept
from fastrt.util.futures import TaskFuture

AsyncResult = pool.AsyncResult

__all__ = ["AsyncResult", "Pool"]


class _Process:
    def __init__(self, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
        if initializer is not None:
            initializer(*initargs)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)


class _Processes:
    """Runs calls in actors, in turn; each runs its calls one after the other.

    Args:
        count: of the actors.
        make: makes one.
        most: how many calls one runs before another takes its place; None: any number.
    """

    def __init__(self, count: int, make: Callable[[], Any], most: int | None) -> None:
        self._make, self._most = make, most
        self._actors: list[Any] = [make() for _ in range(count)]
        self._calls = [0] * count  # that each was given
        self._next = 0
        self._lock = threading.Lock()
        self._unfinished: set[TaskFuture] = set()
        get([actor.__ray_ready__.remote() for actor in self._actors])

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture:
        """Call `fn(*args, **kwargs)` in the next process."""
        future: TaskFuture = TaskFuture(self)
        run: Any = fn
        if isinstance(run, Kept):
            run, args = call_kept, (run.refs(), *args)
        with self._lock:
            ref = self._take().run.remote(run, *args, **kwargs)
            self._unfinished.add(future)
        future.bind(store_client.require(), ref)
        return future

    def _take(self) -> Any:
        """Return the actor for the next call."""
        k, self._next = self._next, (self._next + 1) % len(self._actors)
        if self._calls[k] == self._most:
            self._actors[k], self._calls[k] = self._make(), 0  # the one before it ends after its calls
        self._calls[k] += 1
        return self._actors[k]

    def kill(self) -> None:
        """End all actors."""
        for actor in self._actors:
            kill(actor)

    def wait_idle(self) -> None:
        """Wait until all calls have ended."""
        with self._lock:
            futures = list(self._unfinished)
        for future in futures:
            with contextlib.suppress(CancelledError):
                future.exception()

    def drop_queued(self, future: TaskFuture) -> bool:
        """Return False: calls are submitted at once."""
        return False

    def finished(self, future: TaskFuture) -> None:
        """Forget a call that has ended."""
        with self._lock:
            self._unfinished.discard(future)

    def raised(self, exc: BaseException) -> None:
        """Do nothing: the error of a call is its result."""


class Pool(pool.Pool):
    """The interface of `multiprocessing.Pool` over actors. It starts a session if there is none.

    Args:
        processes: how many actors; default: as many as the cluster has CPUs.
        initializer: called in each actor.
        initargs: its arguments.
        maxtasksperchild: how many tasks an actor runs before another takes its place.
        context: ignored.
        ray_address: of the session to join, if this process uses none.
        ray_remote_args: options of the actors.
    Raises:
        ValueError: the session has fewer CPUs than `processes`.
        ActorDiedError: the initializer has raised.
    Source:
        The semantics of `ray.util.multiprocessing.Pool`.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] | None = None,
        maxtasksperchild: int | None = None,
        context: Any = None,
        ray_address: str | None = None,
        ray_remote_args: dict[str, Any] | None = None,
    ) -> None:
        if not is_initialized():
            found = ray_address or find_session(None)
            if found is None or found == "local":
                init("local", num_cpus=processes)
            else:
                init(found)
        cpus = int(cluster_resources().get("CPU", 0))
        if processes is not None and (processes < 1 or processes > cpus):
            raise ConfigError(f"processes is {processes}; it must be from 1 to the number of CPUs, {cpus}")
        make = functools.partial(
            remote(**{"num_cpus": 0, **(ray_remote_args or {})})(_Process).remote, initializer, tuple(initargs or ())
        )
        processes = processes or max(1, cpus)
        self._begin(_Processes(processes, make, maxtasksperchild), processes)

    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: dict[str, Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func(*args, **kwargs)` in an actor and return its result; `kwds` is another name of `kwargs`."""
        return super().apply(func, args or (), kwargs or kwds)

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: dict[str, Any] | None = None,
        callback: pool.Callback | None = None,
        error_callback: pool.Callback | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> pool.AsyncResult:
        """Call `func` in an actor, like `apply`, without waiting; the callbacks as for `fastrt.util.Pool`."""
        return super().apply_async(func, args or (), kwargs or kwds, callback, error_callback)

    def _imap(self, func: Callable[..., Any], iterable: Any, chunksize: int, in_order: bool) -> pool.ImapIterator:
        """Give the exception of a call as its result, as Ray does: it ends no other call of its chunk."""
        if not isinstance(iterable, Iterable):
            words = "Passing a non-iterable argument to imap or imap_unordered is deprecated"
            warnings.warn(words, RayDeprecationWarning, stacklevel=3)
            iterable = [iterable]
        return super()._imap(functools.partial(_caught, func), iterable, chunksize, in_order)


def _caught(func: Callable[..., Any], item: Any) -> Any:
    try:
        return func(item)
    except Exception as exc:
        return exc
