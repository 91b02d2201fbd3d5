"""Tasks that wait in a debugger, for `fastrt debug`: which they are, and the connection to one of them.

The debugger of a task on another node is reached by questions to that node's uplink (`answers`), which connects to the
debugger for as long as the terminal asks. A question gives at most one line, and returns what the debugger has printed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.folders import has_private_folder
from fastrt.foreign_text import check_object
from fastrt.store import debugging
from fastrt.store.debugging import DebugEnd, DebugInterrupt, DebugLine, DebugPrompt, DebugTerminal, DebugText, Stop
from fastrt.store.join import Link

TERMINAL_S = 10.0  # a terminal on another node that has not asked for so long is gone
LINE_MAX = 16 << 10  # characters of a line for the debugger of another node
_TEXT_MAX = 32 << 10  # characters of an answer: as JSON it fits into a page
_ANSWER_S = 1.0  # for what a line prints; later text comes with the next question
_ABOUT_MAX = 200  # characters
_talking = threading.Lock()  # of `_attached`
_QUIET_S = 0.2  # without a message: the code runs


class DebugError(FastrtError):
    """A task cannot be debugged; the text says why."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that waits in a debugger, on this node or another one.

    Attributes:
        pid: its process.
        kind: "task", "actor" or "thread".
        name: of the function, method or class.
        task: its id as in `fastrt list tasks`; "": none.
        reason: why it waits, for a sentence that begins with the task.
        place: the line where it stopped.
        function: the function of that line.
        seconds: for how long.
        address: HOST:PORT on its machine for a client of debugpy; "": it is debugged by `fastrt debug`.
    """

    pid: int
    kind: str
    name: str
    task: str
    reason: str
    place: str
    function: str
    seconds: float
    address: str

    @classmethod
    def of(cls, stop: Stop) -> Waiting:
        """The task of a stop on this node."""
        task = f"{stop.task:016x}" if stop.task else ""
        seconds = time.monotonic() - stop.since
        return cls(
            stop.pid, stop.kind, stop.name, task, stop.reason, stop.place, stop.function, seconds, stop.address
        )  # fmt: skip

    @classmethod
    def from_row(cls, row: Any) -> Waiting:
        """The task that another node has sent as the object of its fields.

        Raises:
            ForeignTextError: the row is no such task.
        """
        names = ("kind", "name", "task", "reason", "place", "function", "address")
        fields = {"pid": int, "seconds": float, **dict.fromkeys(names, str)}
        check_object(row, "a task in the debugger of another node", fields)
        return cls(**{name: row[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Said:
    """The answer of a debugger to a question of another node.

    Attributes:
        screen: what it has printed since the task stopped, with the lines that it was given; its end, if it is long.
        prompt: the prompt, if it waits for a line; else "".
        end: why it is done with the task, or lets no one in; "": it is not.
    """

    screen: str
    prompt: str
    end: str

    @classmethod
    def from_row(cls, row: Any) -> Said:
        """The answer that another node has sent as the object of its fields.

        Raises:
            ForeignTextError: the row is no answer.
        """
        check_object(row, "an answer of a debugger on another node", {"screen": str, "prompt": str, "end": str})
        return cls(row["screen"], row["prompt"], row["end"])

    def after(self, shown: str) -> str:
        """The part of the screen that is new for a reader who has seen `shown`."""
        for begin in range(min(len(self.screen), len(shown)), 0, -1):
            if shown.endswith(self.screen[:begin]):
                return self.screen[begin:]
        return self.screen


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal on another node that asks to debug a task of this one.

    Attributes:
        id: a random text; "": it asks once.
        about: which terminal it is, for others that come meanwhile.
        stays: whether it will ask again; False: others may come after this question.
    """

    id: str
    about: str
    stays: bool


class _Attached:
    """The connection to a debugger for a terminal on another node.

    Args:
        link: to the debugger.
        terminal: for which it is.

    Attributes:
        until: when it is closed unless the terminal asks again, by the monotonic clock.
        screen, prompt, end: as of `Said`.
    """

    def __init__(self, link: Link, terminal: Terminal) -> None:
        self.link, self.terminal = link, terminal
        self.screen = self.prompt = self.end = ""
        self.until = time.monotonic() + TERMINAL_S
        link.send(DebugTerminal(terminal.about[:_ABOUT_MAX]))

    def listen(self, seconds: float) -> None:
        """Take what the debugger has said, and wait for its next prompt, but not for longer than this."""
        text, prompt, self.end = _listen(self.link, 0.0 if self.prompt else seconds)
        self.screen = (self.screen + text)[-_TEXT_MAX:]
        if text or prompt or self.end:
            self.prompt = prompt

    def give(self, line: str) -> None:
        """Give the debugger a line, if it waits for one."""
        if self.prompt and not self.end:
            self.link.send(DebugLine(line[:LINE_MAX]))
            self.screen = f"{self.screen}{self.prompt}{line[:LINE_MAX]}\n"[-_TEXT_MAX:]
            self.prompt = ""


_attached: dict[tuple[Path, int], _Attached] = {}  # by daemon and process


def converse(socket_path: Path, pid: int, line: str | None, interrupt: bool, terminal: Terminal) -> Said:
    """Talk to the debugger of a process for a terminal on another node.

    A debugger has one terminal at a time. The connection of one that stays is closed `TERMINAL_S` after its last
    question.

    Args:
        socket_path: of the session's daemon.
        pid: the process.
        line: for the debugger; None: only look.
        interrupt: whether to stop the code that runs.
        terminal: the one that asks.
    Returns:
        The answer; if no task of the process waits there, or another terminal is attached, its `end` says so.
    Raises:
        UnsafeFolderError: as for `attach`.
    """
    with _talking:
        key = (socket_path, pid)
        there = _attached.get(key)
        if there is not None and there.terminal.id != terminal.id:
            return Said("", "", f"{there.terminal.about} is attached already")
        if there is None:
            try:
                there = _attached[key] = _Attached(attach(socket_path, pid), terminal)
            except DebugError as exc:
                return Said("", "", str(exc))
            _close_later(key)
        there.until = time.monotonic() + TERMINAL_S
        there.listen(_QUIET_S)
        if interrupt and not there.end:
            there.link.send(DebugInterrupt())
            there.prompt = ""
            there.listen(_ANSWER_S)
        elif line is not None and there.prompt:
            there.give(line)
            there.listen(_ANSWER_S)
        if there.end or not terminal.stays:
            _attached.pop(key).link.close()
        return Said(there.screen, there.prompt, there.end)


def _close_later(key: tuple[Path, int]) -> None:
    """Close a connection whose terminal has not asked for `TERMINAL_S`; until then look again and again."""

    def look() -> None:
        with _talking:
            there = _attached.get(key)
            if there is None:
                return
            if time.monotonic() > there.until:
                _attached.pop(key).link.close()
                return
        _close_later(key)

    timer = threading.Timer(TERMINAL_S / 2, look)
    timer.daemon = True
    timer.start()


def _listen(link: Link, seconds: float) -> tuple[str, str, str]:
    """Collect text until a prompt or the end comes, or no more in time: (text, prompt or "", end or "")."""
    text, until = "", time.monotonic() + seconds
    while True:
        try:
            message = link.receive(max(0.0, until - time.monotonic()))
        except EOFError:
            return text, "", "the process has ended"
        if isinstance(message, DebugText):
            text = (text + message.text)[-2 * _TEXT_MAX :]
        elif isinstance(message, DebugPrompt):
            return text, message.prompt, ""
        elif isinstance(message, DebugEnd):
            return text, "", message.why
        elif message is None:
            return text, "", ""


def waiting(socket_path: Path) -> list[Stop]:
    """List the tasks of a session on this node that wait in a debugger, those first that wait longest.

    Args:
        socket_path: of the session's daemon.
    """
    return debugging.waiting(debugging.folder_of(str(socket_path)))


def attach(socket_path: Path, pid: int) -> Link:
    """Connect to the debugger of a process.

    Args:
        socket_path: of the session's daemon.
        pid: the process.
    Raises:
        DebugError: none waits there, or another user could have made its socket.
        UnsafeFolderError: another user could change the folder of debuggers.
    """
    folder = debugging.folder_of(str(socket_path))
    has_private_folder(folder, "the folder of debuggers")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(folder / str(pid)))
    except OSError as exc:
        sock.close()
        raise DebugError(f"no task of process {pid} waits in a debugger: {exc}") from None
    link = Link(sock)
    if link.peer()[1] != os.geteuid():
        link.close()
        raise DebugError(f"the debugger of process {pid} belongs to another user")
    return link
