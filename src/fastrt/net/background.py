"""Operations in the background: one thread that keeps their order, and the handle that a caller waits on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

T = TypeVar("T", covariant=True)


class Handle(Generic[T]):
    """An operation that runs in the background. `wait` for it, poll `done`, or `await` it.

    Waiting raises the operation's error. Do not use its arrays before it is done.
    """

    timeout_error: type[TimeoutError] = TimeoutError

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the operation and return the result of the blocking call.

        Args:
            timeout: seconds; None: the operation's own timeout ends the wait.
        Raises:
            TimeoutError: the operation is not done in that time; it continues. The class is `timeout_error`.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if isinstance(error, self.timeout_error):
                raise
            raise self.timeout_error(f"the operation is not done after {timeout} s; it continues") from None

    def done(self) -> bool:
        """Whether the operation has ended, with or without an error."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()


class Line:
    """Runs functions one after the other in one thread, which starts with the first.

    Args:
        name: the name of the thread.
        handle: the class of the handles that `submit` returns.
        waiting: called with the number of functions that are queued or running, each time that changes.

    Attributes:
        count: the number of functions that are queued or running.
    """

    def __init__(self, name: str, handle: type[Handle[Any]], waiting: Callable[[int], None] | None = None) -> None:
        self.count = 0
        self._name = name
        self._waiting = waiting
        self._handle = handle
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Handle[Any]:
        """Queue a call."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, self._name)
            self._add(1)
            return self._handle(self._pool.submit(self._run, function, args))

    def close(self, wait: bool = False) -> None:
        """Accept no more calls. Queued functions still run; `wait=True` waits for them."""
        if self._pool is not None:
            self._pool.shutdown(wait)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return function(*args)
        finally:
            with self._lock:
                self._add(-1)

    def _add(self, change: int) -> None:
        self.count += change
        if self._waiting is not None:
            self._waiting(self.count)
