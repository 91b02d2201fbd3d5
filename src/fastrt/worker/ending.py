"""The end of a worker's or actor's process: cleanup code of the user runs first, for a limited time.

A process ends because its loop is done, or because SIGTERM orders it. The limit holds also where that code blocks in
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
    """Raised in user code when its process has been told to end, so that `finally` clauses and `with` blocks run."""


class Ending:
    """Ends this process.

    Args:
        limit_s: seconds that cleanup code has, from the order to end or from the end of the last task.

    Attributes:
        code: the exit code.
        ordered: whether SIGTERM has come; then that signal ends the process after the cleanup code.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._limited = False
        self.code = 0
        self.ordered = False

    def order(self) -> None:
        """SIGTERM has come."""
        self.ordered = True
        self.limit()

    def limit(self) -> None:
        """Start the time that is left."""
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
        """End the process as its parent is to see it: by the signal that ordered it, or by returning."""
        if self.ordered:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def run_exit_functions() -> None:
    """Call what was registered with `atexit`: this process ends without the interpreter's own end."""
    atexit._run_exitfuncs()


def flush_files() -> None:
    """Flush all files that are open for writing, also those that only a module's globals have."""
    for one in gc.get_objects():
        if issubclass(type(one), _io._IOBase):
            try:
                if one.writable():
                    one.flush()
            except Exception:  # closed, or not to be written to any more
                continue


def is_exit(exc: BaseException) -> TypeGuard[SystemExit]:
    """Whether an exception ends the process in which it was raised, and is not the error of another task."""
    return issubclass(type(exc), SystemExit) and not issubclass(type(exc), FastrtError)


def exit_code(exc: SystemExit) -> int:
    """The exit code that `sys.exit` asked for; a text is printed, as Python does it."""
    if exc.code is None or isinstance(exc.code, int):
        return (exc.code or 0) & 255
    sys.stderr.write(f"{exc.code}\n")
    return 1
