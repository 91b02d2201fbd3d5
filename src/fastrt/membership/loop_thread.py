"""An event loop in a thread, for blocking calls from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from fastrt.errors import FastrtError
from fastrt.membership.options import ClusterTimeoutError

T = TypeVar("T")
_JOIN_S = 5.0


class LoopThread:
    """Runs coroutines of a member in one thread, between `start` and `stop`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._loop is not None

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastrt-member", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the loop."""
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        self._loop.close()
        self._loop = self._thread = None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; any other thread may call this.

        Raises:
            FastrtError: the loop does not run.
        """
        if self._loop is None:
            work.close()
            raise FastrtError("The member is not started, or closed.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and return its result; any other thread may call this.

        Raises:
            ClusterTimeoutError: it has not ended in time; it is cancelled.
            FastrtError: the loop does not run, or stops meanwhile.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise ClusterTimeoutError(f"no answer within {timeout_s:g} s.") from None
        except CancelledError:
            raise FastrtError("The member has been closed.") from None

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine in the background; called on the loop."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel_spawned(self) -> None:
        """Cancel what `spawn` started and still runs, but for the caller; called on the loop."""
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
