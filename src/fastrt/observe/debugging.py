"""Tasks that wait in a debugger, for `fastrt debug`: which they are, and the connection to one of them.

The debugger of a task on another node is reached by questions to that node's uplink (`answers`): each connects to the
debugger, sends at most one line, and returns what the debugger has printed. The debugger keeps its text meanwhile.
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
from fastrt.store.debugging import DebugEnd, DebugInterrupt, DebugLine, DebugPrompt, DebugText, Stop
from fastrt.store.join import Link

LINE_MAX = 16 << 10  # characters of a line for the debugger of another node
_TEXT_MAX = 32 << 10  # characters of an answer: as JSON it fits into a page
_ANSWER_S = 1.0  # for what a line prints; later text comes with the next question
_talking = threading.Lock()
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
    """

    pid: int
    kind: str
    name: str
    task: str
    reason: str
    place: str
    function: str
    seconds: float

    @classmethod
    def of(cls, stop: Stop) -> Waiting:
        """The task of a stop on this node."""
        task = f"{stop.task:016x}" if stop.task else ""
        seconds = time.monotonic() - stop.since
        return cls(stop.pid, stop.kind, stop.name, task, stop.reason, stop.place, stop.function, seconds)

    @classmethod
    def from_row(cls, row: Any) -> Waiting:
        """The task that another node has sent as the object of its fields.

        Raises:
            ForeignTextError: the row is no such task.
        """
        names = ("kind", "name", "task", "reason", "place", "function")
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


def converse(socket_path: Path, pid: int, line: str | None, interrupt: bool) -> Said:
    """Connect to the debugger of a process, give it a line if it waits for one, and leave it.

    Args:
        socket_path: of the session's daemon.
        pid: the process.
        line: for the debugger; None: only look.
        interrupt: whether to stop the code that runs.
    Returns:
        The answer; if no task of the process waits there, its `end` says so.
    Raises:
        UnsafeFolderError: as for `attach`.
    """
    with _talking:  # a debugger has one client at a time, and an earlier question may still be answered
        try:
            link = attach(socket_path, pid)
        except DebugError as exc:
            return Said("", "", str(exc))
        return _talk(link, line, interrupt)


def _talk(link: Link, line: str | None, interrupt: bool) -> Said:
    try:
        screen, prompt, end = _listen(link, _QUIET_S)
        if interrupt and not end:
            link.send(DebugInterrupt())
            more, prompt, end = _listen(link, _ANSWER_S)
            screen += more
        elif line is not None and prompt:
            link.send(DebugLine(line[:LINE_MAX]))
            screen += f"{prompt}{line[:LINE_MAX]}\n"
            more, prompt, end = _listen(link, _ANSWER_S)
            screen += more
        return Said(screen[-_TEXT_MAX:], prompt, end)
    finally:
        link.close()


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
