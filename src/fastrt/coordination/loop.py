"""The event loop that runs the coroutines of a connection's blocking callers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastrt.coordination.errors import CoordinationError
from fastrt.net.loop_thread import LoopThread

T = TypeVar("T")


class ConnectionLoop(LoopThread):
    """The event loop of a connection, in a thread.

    Args:
        ended: the error message of calls after `stop`.
    """

    def __init__(self, ended: str) -> None:
        super().__init__("fastrt-coordination")
        self._ended = ended
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and return its result, as `LoopThread.run`.

        Raises:
            CoordinationError: the loop has ended, belongs to another process, or is the caller itself.
        """
        problem = self._problem()
        if problem is not None:
            work.close()
            raise CoordinationError(problem, "FAILED_PRECONDITION")
        return super().run(work, timeout_s)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop, soon.

        Raises:
            CoordinationError: the loop has ended, or belongs to another process.
        """
        problem = self._problem()
        if problem is not None and not self.is_current:
            raise CoordinationError(problem, "FAILED_PRECONDITION")
        self.loop.call_soon_threadsafe(function, *arguments)

    def _problem(self) -> str | None:
        """The reason why the loop cannot run a call, None when it can."""
        if self.is_inherited:
            return (
                "This connection belongs to the process that this one was forked from. Connect in a process that is "
                'started as a new one: subprocess, or multiprocessing.get_context("spawn").'
            )
        if self.loop.is_closed():
            return self._ended
        if self.is_current:
            return "A callback of on_error called its own agent, which would wait for itself. Use another thread."
        return None
