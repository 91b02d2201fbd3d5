"""The end of a worker's or actor's process: cleanup code of the user runs first, for a limited time.

A process ends because its loop is done, or because SIGTERM orders it. The limit also holds while cleanup code blocks in
native code: the watchdog of `faulthandler` needs no interpreter; it prints all stacks and ends the process.
"""

from __future__ import annotations

import _io
import atexit
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TypeGuard

from fastrt.errors import FastrtError

WORKER_LIMIT_S = 1.0  # of a process that runs tasks; an actor's is the setting `cleanup_timeout_s`
_STDERR = 2


class ProcessEnds(SystemExit):
    """Raised in user code when its process is ordered to end, so that `finally` clauses and `with` blocks run."""


class Ending:
    """Ends this process.

    Args:
        limit_s: seconds for cleanup code, from the order to end or from the end of the last task.

    Attributes:
        code: the exit code.
        ordered: whether SIGTERM was received; then that signal ends the process after the cleanup code.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._limited = False
        self.code = 0
        self.ordered = False

    def order(self) -> None:
        """Note that SIGTERM was received."""
        self.ordered = True
        self.limit()

    def limit(self) -> None:
        """Start the limit, unless it runs already."""
        if not self._limited:
            self._limited = True
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=_STDERR)

    def clean_up(self, steps: Iterable[Callable[[], object]]) -> None:
        """Run cleanup code, one step after the other; an error of one is printed.

        Args:
            steps: in this order.
        """
        self.limit()
        for step in steps:
            try:
                step()
            except BaseException as exc:  # user code, which may raise anything
                traceback.print_exception(exc)

    def leave(self) -> None:
        """End the process by the signal that ordered it, so that its parent sees that; otherwise return."""
        if self.ordered:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def run_exit_functions() -> None:
    """Call the functions registered with `atexit`: this process ends without the interpreter's shutdown."""
    atexit._run_exitfuncs()


def flush_files() -> None:
    """Flush all files that are open for writing, also those referenced only by a module's globals."""
    for one in gc.get_objects():
        if issubclass(type(one), _io._IOBase):
            try:
                if one.writable():
                    one.flush()
            except Exception:  # closed, or its descriptor is
                continue


def is_exit(exc: BaseException) -> TypeGuard[SystemExit]:
    """Whether an exception ends the process in which it was raised, and is not the error of another task."""
    return issubclass(type(exc), SystemExit) and not issubclass(type(exc), FastrtError)


def exit_code(exc: SystemExit) -> int:
    """Return the exit code that was passed to `sys.exit`; a text is printed, as Python does."""
    if exc.code is None or isinstance(exc.code, int):
        return (exc.code or 0) & 255
    sys.stderr.write(f"{exc.code}\n")
    return 1
