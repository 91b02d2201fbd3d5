"""`ray.util.multiprocessing.Pool`: fastrt's, with Ray's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastrt.errors import UnsupportedError
from fastrt.ray.refusals import refuse
from fastrt.ray.session import init
from fastrt.runtime.driver import is_initialized
from fastrt.util import pool

AsyncResult = pool.AsyncResult

__all__ = ["AsyncResult", "Pool"]


class Pool(pool.Pool):
    """The interface of `multiprocessing.Pool` over the session's workers.

    Args:
        processes, initializer, initargs, maxtasksperchild: as for `fastrt.util.Pool`.
        context: ignored.
        ray_address: of the session to join, if this process uses none.
        ray_remote_args: must be empty: the pool makes no actors.
    Raises:
        UnsupportedError: arguments of actors are given.
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
        if ray_address is not None and not is_initialized():
            init(ray_address)
        if ray_remote_args:
            raise UnsupportedError(refuse("option 'ray_remote_args' of Pool", "its tasks run in the session's workers"))
        super().__init__(processes, initializer, tuple(initargs or ()), maxtasksperchild)

    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: dict[str, Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func(*args, **kwargs)` in a worker and return its result; `kwds` is another name of `kwargs`."""
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
        """Call `func` in a worker, like `apply`, without waiting; the callbacks as for `fastrt.util.Pool`."""
        return super().apply_async(func, args or (), kwargs or kwds, callback, error_callback)
