"""Operations in the background: one thread for what must stay in order, and the handle that a caller waits on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from fastrt.errors import CollectiveTimeout


class Handle:
    """An operation that goes on in the background. `wait` for it, ask `done`, or `await` it.

    What it raises is what the operation raises. The arrays it was given belong to it until then.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """The operation's result, as the blocking call returns it.

        Args:
            timeout: seconds; by default as long as the operation itself may take.
        Raises:
            CollectiveTimeout: it is not done in that time; it goes on.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if isinstance(error, CollectiveTimeout):
                raise
            raise CollectiveTimeout(f"the operation is not done after {timeout} s; it goes on") from None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


class Line:
    """Runs functions one after the other in a thread of its own, which starts with the first.

    Args:
        name: of the thread.
        waiting: told how many are queued or running, each time that changes.
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
        """Take no more; what is queued is still done."""
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
