"""Python's pdb for a task, a call or a thread of a worker; its terminal is a client of the `Door`.

The debugger sees the frames of the user's code: those of fastrt below them are left out, and are not traced. It ends
with the task: a step out of the outermost frame lets the task go on, and breakpoints are forgotten.
"""

from __future__ import annotations

import bdb
import dis
import inspect
import io
import pdb
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import IO, Any, Protocol, cast

_PACKAGE = "fastrt"
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class LeftError(BaseException):
    """Ends a wait for a line because the task was cancelled; no part of pdb catches it."""


class Owner(Protocol):
    """The debugger of a process, as a `TaskPdb` needs it; `worker.debugger.Debugger` describes the methods."""

    def begin_stop(self, one: TaskPdb, frame: FrameType, error: str) -> None:
        """A thread is about to stand still."""

    def end_stop(self, one: TaskPdb) -> None:
        """A thread goes on."""

    def over(self, one: TaskPdb) -> None:
        """A thread goes on without a debugger."""

    def write(self, text: str) -> None:
        """Show text to the client."""

    def ask(self, one: TaskPdb, prompt: str) -> str:
        """Wait for a line."""

    def check(self, task: int | None) -> None:
        """End the wait of a task that was cancelled."""

    def belongs(self, task: int | None, id: int) -> bool:
        """Whether a task still runs on this thread."""


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs code of fastrt."""
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] == _PACKAGE


def first_user_frame(frame: FrameType) -> FrameType:
    """The innermost frame from `frame` on that is the user's; `frame` itself if there is none."""
    found: FrameType | None = frame
    while found is not None and is_own(found):
        found = found.f_back
    return found or frame


class Terminal(io.TextIOBase):
    """Standard input and output of the debugger: whole lines go to the client, the rest is the next prompt."""

    def __init__(self, write: Callable[[str], object], ask: Callable[[str], str]) -> None:
        self._write, self._ask = write, ask
        self._rest = ""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Show text."""
        lines, end, rest = (self._rest + text).rpartition("\n")
        self._rest = rest
        if end:
            self._write(lines + end)
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Wait for a line."""
        prompt, self._rest = self._rest, ""
        return self._ask(prompt) + "\n"

    def close(self) -> None:
        """Stay open: Python's `exit` closes standard input."""

    def readable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """Yes."""
        return True


class TaskPdb(pdb.Pdb):
    """The debugger of one thread.

    Args:
        owner: the debugger of this process.
        thread: number of the thread.
        task, id: the task or call that runs on this thread; None and 0: none.

    Attributes:
        stopped: whether the thread stands still now.
        asking: whether it waits for a line.
        ended: whether the thread goes on without this debugger.
    """

    enterframe: FrameType | None  # of Python 3.13 and later

    def __init__(self, owner: Owner, thread: int, task: int | None, id: int) -> None:
        self._owner, self.thread, self.task, self.id = owner, thread, task, id
        self._terminal = Terminal(owner.write, lambda prompt: owner.ask(self, prompt))
        self.stopped = self.asking = self.ended = False
        self._base: FrameType | None = None
        self._error = ""
        skipped, terminal = [_PACKAGE, f"{_PACKAGE}.*"], cast("IO[str]", self._terminal)
        super().__init__(stdin=terminal, stdout=terminal, skip=skipped, nosigint=True)

    def stop(self, frame: FrameType) -> None:
        """Stop at the next line of a frame, or of the frame for which the debugger runs there."""
        sys.settrace(None)  # the frames of this debugger are not traced while it arranges the stop
        frame = base = first_user_frame(_traced(frame))
        while base.f_back is not None and not is_own(base.f_back):
            base = base.f_back
        self._base, self.ended = base, False
        self.enterframe = None  # an interrupt may have met this debugger, and `set_trace` would then do nothing
        bdb.Bdb.set_trace(self, frame)  # from 3.14 on, pdb's would make this the debugger of forked children, too
        self.botframe = base
        below = base.f_back
        while below is not None:
            below.f_trace = None
            below = below.f_back

    def set_stepinstr(self) -> None:
        """Stop before the next line: from Python 3.13 on, `set_trace` calls this to stop at its own line."""
        self._set_stopinfo(None, None)  # type: ignore[attr-defined]  # typeshed does not know it

    def look_at(self, exc: BaseException) -> None:
        """Stop at the frame that raised an exception, which is over."""
        traced = user_part(exc.__traceback__)
        if traced is None:
            return
        self._error = text_of(exc)
        self.reset()
        try:
            self.interaction(None, traced)
        except LeftError:
            pass
        finally:
            self.end()

    def interaction(self, frame: FrameType | None, traced: Any) -> None:
        """Stop, and carry out commands until the thread may go on.

        Raises:
            KeyboardInterrupt: the task was cancelled meanwhile.
            LeftError: it was cancelled after it had raised.
        """
        if self.ended:
            return
        self.stopped = True
        try:
            self._owner.begin_stop(self, frame if frame is not None else last_frame(traced), self._error)
            super().interaction(frame, traced)
        except LeftError:
            self.end()
            if self._error:
                raise
            raise KeyboardInterrupt from None
        except BaseException:  # the process ends
            self.end()
            raise
        finally:
            self.stopped = False
            self._owner.end_stop(self)
        if sys.gettrace() is None:
            self.end()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace, as long as the task runs for which this began."""
        if self.ended or (event == "call" and not self._owner.belongs(self.task, self.id)):
            self.end()
            return None
        found = super().trace_dispatch(frame, event, arg)
        if event == "return" and frame is self._base and not _suspends(frame):
            self.end()
        return found

    def check(self) -> None:
        """End the wait if the task was cancelled.

        Raises:
            LeftError: it was.
        """
        self._owner.check(self.task)

    def names(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """How the word between `begin` and `end` can go on."""
        makers: list[Callable[..., Iterable[str]]] = []
        command = self.parseline(line)[0] if begin > 0 else None
        expression = getattr(self, "_complete_expression", None)
        if begin == 0:
            makers.append(self.completenames)
        found = getattr(self, f"complete_{command}", expression) if command else expression
        makers += [found] if found is not None else []
        words: set[str] = set()
        for maker in makers:
            try:
                words.update(word for word in maker(text, line, begin, end) if isinstance(word, str))
            except Exception:  # user code: attributes of any object
                continue
        return sorted(words)

    def do_interact(self, arg: str) -> None:
        """Start an interpreter with the names of the current scope; exit() leaves it."""
        before = sys.stdin, sys.stdout, sys.stderr
        sys.stdin = sys.stdout = sys.stderr = self._terminal
        try:
            super().do_interact(arg)
        except SystemExit as exc:  # of Python's `exit`; others end the process
            if type(exc) is not SystemExit:
                raise
        finally:
            sys.stdin, sys.stdout, sys.stderr = before

    def do_run(self, arg: str) -> None:
        """Refuse: a task is run again by its program only."""
        self.error("a task cannot be restarted here; c lets it go on, q ends it")

    do_restart = do_run

    def end(self) -> None:
        """Let the thread go on without this debugger."""
        if self.ended:
            return
        self.ended = True
        sys.settrace(None)
        self.clear_all_breaks()
        self.botframe = self.stopframe = self.returnframe = self._base = None  # they hold the task's values
        getattr(self, "frame_trace_lines_opcodes", {}).clear()  # of Python 3.14 and later; it holds them, too
        self._owner.over(self)


def _traced(frame: FrameType) -> FrameType:
    """The frame whose line or call a `TaskPdb` looks at when `frame` runs; `frame` itself if none does.

    A debugger with a breakpoint looks at each line, so an interrupt often meets its code, not the task's.
    """
    found: FrameType | None = frame
    while found is not None:
        if found.f_code is TaskPdb.trace_dispatch.__code__ and found.f_back is not None:
            return found.f_back
        found = found.f_back
    return frame


def _suspends(frame: FrameType) -> bool:
    """Whether a frame that returns will go on later: a coroutine or generator that does not end."""
    if not frame.f_code.co_flags & _SUSPENDABLE:
        return False
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def user_part(traced: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of fastrt that have called the user's code."""
    while traced is not None and is_own(traced.tb_frame):
        traced = traced.tb_next
    return traced


def text_of(exc: BaseException) -> str:
    """An exception as the last lines of its traceback."""
    return "".join(traceback.format_exception_only(type(exc), exc)).strip()


def last_frame(traced: TracebackType) -> FrameType:
    """The frame that raised."""
    while traced.tb_next is not None:
        traced = traced.tb_next
    return traced.tb_frame
