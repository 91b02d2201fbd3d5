"""Operations in the background: a thread that runs them in order, and the handle that the caller waits on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from fastrt.errors import CollectiveTimeout


class Handle:
    """An operation that runs in the background. `wait` for it, poll `done`, or `await` it.

    Waiting raises the operation's error. Do not change its arrays before it is done.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return the result of the blocking call.

        Args:
            timeout: seconds; None: the operation's own timeout ends the wait.
        Raises:
            CollectiveTimeout: the operation is not done in that time; it continues.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if isinstance(error, CollectiveTimeout):
                raise
            raise CollectiveTimeout(f"the operation is not done after {timeout} s; it continues") from None

    def done(self) -> bool:
        """Whether the operation has ended, with or without an error."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


class Line:
    """Runs functions one after the other, in its own thread that starts with the first of them.

    Args:
        name: the thread's name.
        waiting: called with the number of queued and running functions whenever it changes.
    """

    def __init__(self, name: str, waiting: Callable[[int], None] | None = None) -> None:
        self._name = name
        self._waiting = waiting
        self._count = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Handle:
        """Queue a call."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, self._name)
            self._add(1)
            return Handle(self._pool.submit(self._run, function, args))

    def close(self) -> None:
        """Accept no more calls; queued ones are still run."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return function(*args)
        finally:
            with self._lock:
                self._add(-1)

    def _add(self, change: int) -> None:
        self._count += change
        if self._waiting is not None:
            self._waiting(self._count)
