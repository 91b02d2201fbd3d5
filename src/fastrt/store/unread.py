"""Print unread errors once: errors of tasks, calls and constructors whose references were dropped without a read.

A process prints the errors whose last reference it has dropped itself. The output of workers goes to the drivers as
usual; the daemon and its uplink, which never unpickle a value, forward the bytes to the drivers (`forward`,
`print_one`).
Errors that the program itself caused (cancelled tasks, calls of actors that it has killed, or whose placement group
it has removed) and errors of values that were lost with a node or session are not printed.

A process prints at most PRINTED_MAX errors in WINDOW_S seconds, and afterwards the number of those it left out.
"""

from __future__ import annotations

import _thread
import base64
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.objects import unread, unread_list
from fastrt._core.objects.scalar import CORE_KINDS_END
from fastrt.errors import (
    ActorDiedError,
    ActorUnschedulableError,
    ForkedRuntimeError,
    NotInitializedError,
    ObjectLostError,
    StaleReferenceError,
    TaskCancelledError,
)
from fastrt.store.messages import Unread
from fastrt.store.serialize import deserialize

PRINTED_MAX, WINDOW_S = 10, 5.0
_EXPECTED = (TaskCancelledError, ObjectLostError, StaleReferenceError, NotInitializedError, ForkedRuntimeError)
_DEATHS = (ActorDiedError, ActorUnschedulableError)  # a task that raised one of them has made a class of its own
_FORWARDED_BYTES_MAX = 64 << 10  # of one message to a driver
_SIBLINGS = 64


class Printer:
    """Writes errors to stderr, and no more of them than the limit allows.

    Args:
        write: writes a text; default: to the current `sys.stderr`.
        clock: the time in seconds.
    """

    def __init__(
        self, write: Callable[[str], object] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write or _to_stderr
        self._clock = clock
        self._began = -WINDOW_S
        self._printed = self._beyond = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_SIBLINGS)
        self._lock = threading.Lock()

    def add(self, objref: int, kind: int, data: bytes) -> None:
        """Print one error, given in its stored form, unless the program expects it."""
        content = hash(data)
        sibling = any(before == content and abs(number - objref) == 1 for number, before in self._recent)
        self._recent.append((objref, content))
        if sibling:
            return  # another result of the same task: their numbers are consecutive
        text = _text_of(kind, data)
        if text is not None:
            self.say(text)

    def say(self, text: str) -> None:
        """Print the text of an error, or count it if the limit is reached."""
        with self._lock:
            now = self._clock()
            if now - self._began >= WINDOW_S:
                self._end_window()
                self._began, self._printed = now, 0
            if self._printed >= PRINTED_MAX:
                self._beyond += 1
                return
            self._printed += 1
            self._write(f"fastrt: an error was never read: {text.rstrip()}\n")

    def drop(self, count: int) -> None:
        """Count errors that were not kept."""
        with self._lock:
            self._beyond += count

    def left_s(self) -> float:
        """Seconds until the number of errors beyond the limit can be printed; 0: there are none."""
        with self._lock:
            return max(0.001, self._began + WINDOW_S - self._clock()) if self._beyond else 0.0

    def end(self) -> None:
        """Print how many errors there were beyond the limit."""
        with self._lock:
            self._end_window()

    def _end_window(self) -> None:
        if self._beyond:
            self._write(
                f"fastrt: {self._beyond} more errors were never read; at most {PRINTED_MAX} are printed in "
                f"{WINDOW_S:g} s\n"
            )
        self._beyond = 0


def _text_of(kind: int, data: bytes) -> str | None:
    """Return the text of an error; None for one that the program expects."""
    if kind == unread_list.ACTOR:
        return f"an actor could not be made: {data.decode('utf-8', 'replace')}"
    if kind < CORE_KINDS_END:
        return None
    try:
        error = deserialize(kind, data, ())
        if issubclass(type(error), _EXPECTED):
            return None
        if isinstance(error, ActorDiedError) and type(error) in _DEATHS and error.on_purpose:
            return None
        return str(error) if hasattr(error, "traceback_text") else f"{type(error).__name__}: {error}"
    except Exception as exc:  # the error's own class is missing here, or raises
        return f"it cannot be shown here: {type(exc).__name__}: {exc}"


def _to_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # stderr is closed or replaced by a faulty object; there is no other place to report it
        return


_printer = Printer()
_reporting = False  # a thread of this process prints
_reports = threading.Lock()


def start() -> None:
    """Print the errors that this process frees unread from now on. Drivers, workers and actors call this."""
    unread_list.on_unread(_start_thread)


def report() -> None:
    """Print the errors that this process has freed unread."""
    if not unread_list.waits():
        return
    with _reports:
        errors, dropped = unread_list.take()
        for objref, kind, data in errors:
            _printer.add(objref, kind, data)
        if dropped:
            _printer.drop(dropped)
    if _printer.left_s():
        _start_thread()


def report_all(client: Client) -> None:
    """Print the unread errors, including those that this process still holds, before it leaves the session."""
    unread.keep_held(client)
    report()
    end()


def end() -> None:
    """Print how many errors there were beyond the limit, because the process leaves the session."""
    _printer.end()


def discard() -> None:
    """Drop the errors of a process that died: it cannot read them, and no other process asked for them."""
    unread_list.take()


def forward(post: Callable[[Unread], object]) -> None:
    """Send the errors that this process freed unread to drivers, as messages for `print_one`."""
    if not unread_list.waits():
        return
    for objref, kind, data in unread_list.take()[0]:
        if len(data) <= _FORWARDED_BYTES_MAX:
            post(Unread(objref, kind, base64.b64encode(data).decode()))


def print_one(message: Unread) -> None:
    """Print an error that the daemon has forwarded."""
    try:
        data = base64.b64decode(message.data)
    except ValueError:  # not what `forward` sends
        return
    _printer.add(message.objref, message.kind, data)
    if _printer.left_s():
        _start_thread()


def _start_thread() -> None:
    """Print in a thread: the interpreter can free a reference at any point, even where this thread must not write."""
    global _reporting
    if not _reporting:
        _reporting = True
        try:
            _thread.start_new_thread(_run, ())  # threading.Thread takes locks that this thread may have
        except RuntimeError:  # the interpreter is ending, or there are too many threads: printed later or at the end
            _reporting = False


def _run() -> None:
    global _reporting
    while True:
        report()
        left = _printer.left_s()
        if left:
            time.sleep(left)
            _printer.end()
            continue
        _reporting = False
        if not unread_list.waits():
            return
        _reporting = True


def _forget_after_fork() -> None:
    """Drop the unread errors in a forked child: the parent prints them."""
    global _printer, _reporting, _reports
    _printer, _reporting, _reports = Printer(), False, threading.Lock()
    unread_list.take()


os.register_at_fork(after_in_child=_forget_after_fork)
