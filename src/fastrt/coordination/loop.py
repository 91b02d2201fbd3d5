"""An event loop in a separate thread, which runs the coroutines of blocking callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastrt.coordination.errors import CoordinationError

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread.

    Args:
        ended: the error message of calls after `stop`.
    """

    def __init__(self, ended: str) -> None:
        self._ended = ended
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastrt-coordination", daemon=True)
        self._thread.start()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; an interrupt of the caller cancels it.

        Raises:
            CoordinationError: the loop has ended, belongs to another process, or is the caller itself.
        """
        problem = self._problem()
        if problem is not None:
            work.close()
            raise CoordinationError(problem, "FAILED_PRECONDITION")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop, soon.

        Raises:
            CoordinationError: the loop has ended, or belongs to another process.
        """
        problem = self._problem()
        if problem is not None and threading.current_thread() is not self._thread:
            raise CoordinationError(problem, "FAILED_PRECONDITION")
        self._loop.call_soon_threadsafe(function, *arguments)

    def _problem(self) -> str | None:
        """The reason why the loop cannot run a call, None when it can."""
        if self.is_inherited:
            return (
                "This connection belongs to the process that this one was forked from. Connect in a process that is "
                'started as a new one: subprocess, or multiprocessing.get_context("spawn").'
            )
        if self._loop.is_closed():
            return self._ended
        if threading.current_thread() is self._thread:
            return "A callback of on_error called its own agent, which would wait for itself. Use another thread."
        return None

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
