"""Handles for operations in the background, and the check for gradients with NaN or infinite values."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from fastrt.ps.errors import NotFiniteError, TableTimeoutError

Array = np.ndarray[Any, Any]


class Handle:
    """A push or pull that runs in the background. `wait` for it, poll `done`, or `await` it.

    Waiting raises the operation's error. Do not change its arrays before it is done.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return the result of the blocking call.

        Args:
            timeout: seconds; None: the operation's own timeout ends the wait.
        Raises:
            TableTimeoutError: the operation is not done in that time; it continues.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if isinstance(error, TableTimeoutError):
                raise
            raise TableTimeoutError(f"the operation is not done after {timeout} s; it continues") from None

    def done(self) -> bool:
        """Whether the operation has ended, with or without an error."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


class Background:
    """Runs operations one after the other, in a thread that starts with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._count = 0  # queued or running

    def run(self, async_op: bool, function: Callable[..., Any], *args: Any) -> Any:
        """Run a call: in the background for a handle, or in this thread once no background call is pending."""
        if not (async_op or self._count):
            return function(*args)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "fastrt-ps-async")
            handle = Handle(self._pool.submit(self._run, function, args))
            self._count += 1
        return handle if async_op else handle.wait()

    def close(self) -> None:
        """Wait for the queued operations, and accept no more."""
        if self._pool is not None:
            self._pool.shutdown()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return function(*args)
        finally:
            with self._lock:
                self._count -= 1


def is_finite(array: Array) -> bool:
    """Whether all values are finite. Checks their sum first, which reads the array once and makes no copy."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def refuse_not_finite(name: str, array: Array) -> None:
    """Apply the policy "raise".

    Raises:
        NotFiniteError: the gradient contains NaN or infinity.
    """
    if not is_finite(array):
        count = int(array.size - np.isfinite(array).sum())
        raise NotFiniteError(
            f"{count} of {array.size} values of a gradient for {name!r} are NaN or infinite; nothing was pushed. "
            'Create the table with nan="drop" or nan="pass" to allow them'
        )
