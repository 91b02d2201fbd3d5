"""The event loop of a member, for blocking calls from other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from fastrt.errors import FastrtError
from fastrt.membership.options import ClusterTimeoutError
from fastrt.net.loop_thread import LoopThread

T = TypeVar("T")
_JOIN_S = 5.0


class MemberLoop:
    """Runs coroutines of a member in one thread, between `start` and `stop`."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread = LoopThread("fastrt-member")

    def stop(self) -> None:
        """End the thread and close the loop."""
        assert self._thread is not None
        self._thread.stop(_JOIN_S)
        self._thread = None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; any other thread may call this.

        Raises:
            FastrtError: the loop does not run.
        """
        return asyncio.run_coroutine_threadsafe(work, self._running(work).loop)

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and return its result; any other thread may call this.

        Raises:
            ClusterTimeoutError: it has not ended in time; it is cancelled.
            FastrtError: the loop does not run, or stops meanwhile.
        """
        try:
            return self._running(work).run(work, timeout_s)
        except FutureTimeoutError:
            raise ClusterTimeoutError(f"no answer within {timeout_s:g} s.") from None
        except CancelledError:
            raise FastrtError("The member has been closed.") from None

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine in the background; called on the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel_spawned(self) -> None:
        """Cancel what `spawn` started and still runs, but for the caller; called on the loop."""
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    def _running(self, work: Coroutine[Any, Any, Any]) -> LoopThread:
        if self._thread is None:
            work.close()
            raise FastrtError("The member is not started, or closed.")
        return self._thread
