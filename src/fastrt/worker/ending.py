"""The end of a worker's or actor's process: cleanup code of the user runs first, for a limited time.

A process ends because its loop is done, or because SIGTERM orders it. The limit also holds while cleanup code blocks in
native code: the watchdog of `faulthandler` needs no interpreter; it prints all stacks and ends the process.

Work of fastrt itself (to finish a start, to store a result, to flush files) has a limit of its own, and no stacks are
printed at its end: it is slow only where the machine has too much to do, and its stacks say nothing to users.
"""

from __future__ import annotations

import _io
import atexit
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TypeGuard

from fastrt.errors import FastrtError

WORKER_LIMIT_S = 1.0  # of a process that runs tasks; an actor's is the setting `cleanup_timeout_s`
_OWN_LIMIT_S = 5.0  # of work that is not the user's; at the end of a session the daemon kills workers before that
_LEAST_S = 0.001
_STDERR = 2


class ProcessEnds(SystemExit):
    """Raised in user code when its process is ordered to end, so that `finally` clauses and `with` blocks run."""


class Ending:
    """Ends this process.

    Args:
        limit_s: seconds for code of the user, from the first moment on at which such code runs during the end.

    Attributes:
        code: the exit code.
        ordered: whether SIGTERM was received; then that signal ends the process after the cleanup code.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None
        self._exit_functions = atexit._ncallbacks()
        self.code = 0
        self.ordered = False

    def order(self, in_user_code: bool = True) -> None:
        """Note that SIGTERM was received.

        Args:
            in_user_code: whether code of the user runs.
        """
        self.ordered = True
        if in_user_code or self._until_s is not None:
            self.limit()
        else:
            self._limit_own()

    def limit(self) -> None:
        """Limit code of the user from here on: its time begins, or goes on."""
        now = time.monotonic()
        self._until_s = now + self._limit_s if self._until_s is None else self._until_s
        faulthandler.dump_traceback_later(max(self._until_s - now, _LEAST_S), exit=True, file=_STDERR)

    def _limit_own(self) -> None:
        """Limit fastrt's own work from here on."""
        try:
            silent = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # the process can open no more files
            silent = _STDERR
        faulthandler.dump_traceback_later(_OWN_LIMIT_S, exit=True, file=silent)

    def clean_up(self, steps: Iterable[Callable[[], object]]) -> None:
        """Run cleanup code, one step after the other; an error of one is printed.

        Args:
            steps: in this order.
        """
        for step in steps:
            if step is flush_files or (step is run_exit_functions and atexit._ncallbacks() == self._exit_functions):
                self._limit_own()
            else:
                self.limit()
            try:
                step()
            except BaseException as exc:  # user code, which may raise anything
                traceback.print_exception(exc)
        self._limit_own()

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
