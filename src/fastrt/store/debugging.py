"""Tasks that wait in a debugger: the files that say so, and the messages between a worker and `fastrt debug`.

A worker whose task stops listens at `debug/<pid>` in the session's folder. Beside it, `debug/<pid>.json` lists the
stops of that process. A timeout that is over looks there, and only then: while a task of a program waits in a debugger,
the timeouts of this program stand still. For tasks that wait on other nodes, the uplink writes such a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastrt._core.memory.segment import start_time
from fastrt._core.objects import handles
from fastrt._core.tasks import tasks
from fastrt.errors import FastrtError, GetTimeoutError
from fastrt.folders import private_folder, read_private, replace_private
from fastrt.foreign_text import read_object
from fastrt.store.join import UPLINK_SOCKET, Link
from fastrt.store.messages import U32, Message, StopsChanged

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.ref import ObjectRef

_T = TypeVar("_T")
_STOPS_KEPT = 32  # of one process; older ones no longer extend a timeout
_TEXT_MAX = 500  # characters of a name or path in the file
_FILE_BYTES_MAX = 1 << 20
_TELL_S = 1.0  # for the uplink to take a message
LOOK_S = 0.2  # between two looks whether a task still waits
ELSEWHERE = "elsewhere"  # the kind of a stop on another node


class DebugText(Message):
    """Text that the debugger prints."""

    text: str


class DebugPrompt(Message):
    """The debugger waits for a line."""

    prompt: str


class DebugEnd(Message):
    """The debugger is done with the task, or does not let this client in; the text says why."""

    why: str


class DebugLine(Message):
    """A line for the debugger, without its end."""

    line: str


class DebugTerminal(Message):
    """A client that passes on the lines of a terminal says which one, for others that are refused meanwhile."""

    about: str


class DebugInterrupt(Message):
    """Stop the code that runs: Ctrl-C in the client."""


class DebugComplete(Message):
    """Ask how a word can go on that lies between `begin` and `end` in a line. Answered by `DebugNames`."""

    text: str
    line: str
    begin: U32
    end: U32


class DebugNames(Message):
    """Words that begin as the one in `DebugComplete`."""

    names: list[str]


@dataclasses.dataclass(frozen=True)
class Stop:
    """A task that waits in a debugger, or did.

    Attributes:
        pid: its process.
        job: of the program that submitted it.
        kind: "task", "actor", or "thread" for code that runs outside of tasks and calls; `ELSEWHERE`: the task was
            forwarded to another node and waits there, and the process is this node's uplink.
        name: of the function, method or class; of the node, if it waits elsewhere.
        task: its id as in `fastrt list tasks`; 0: none.
        file, line, function: where it stopped.
        error: the exception that it raised; "": it called `breakpoint()`.
        since: by the monotonic clock, which all processes of a machine share.
        until: by the same clock; 0: it waits.
        path: of the task's record; 0: none.
        address: HOST:PORT where a client of debugpy may attach; "": the stop is for `fastrt debug`.
    """

    pid: int
    job: int
    kind: str
    name: str
    task: int
    file: str
    line: int
    function: str
    error: str
    since: float
    until: float = 0.0
    path: int = 0
    address: str = ""

    @property
    def reason(self) -> str:
        """Why it waits, for a sentence that begins with the task."""
        return "raised, and waits in a debugger" if self.error else "waits in a debugger"

    @property
    def about(self) -> str:
        """The task, why it waits and where, without the command that debugs it."""
        return f"{self.kind} {self.name} (pid {self.pid}) {self.reason} at {self.place}"

    @property
    def place(self) -> str:
        """The line where it stopped."""
        return f"{self.file}:{self.line}"


class StandStill(NamedTuple):
    """How long a program's timeouts stood still.

    Attributes:
        seconds: of the time asked for.
        now: whether they still do.
    """

    seconds: float
    now: bool


def folder_of(socket_path: str) -> Path:
    """The folder of a session's debuggers, which is missing until a first task stops.

    Args:
        socket_path: of the session's daemon.
    """
    return Path(socket_path).parent / "debug"


class Record:
    """Writes the stops of this process into its file, for timeouts and for `fastrt debug`, and notifies the uplink.

    Args:
        folder: of `folder_of`.
        is_uplinks: whether this process is the uplink itself.
    """

    def __init__(self, folder: Path, is_uplinks: bool = False) -> None:
        self._folder, self._is_uplinks = folder, is_uplinks
        self._stops: list[Stop] = []

    def begin(self, stop: Stop) -> None:
        """Add a task that waits from now on."""
        values: dict[str, Any] = dataclasses.asdict(stop)
        short: dict[str, Any] = {
            name: value[:_TEXT_MAX] if isinstance(value, str) else value for name, value in values.items()
        }
        self._stops = [*self._stops[1 - _STOPS_KEPT :], Stop(**short)]
        self._changed()

    def end(self) -> None:
        """Note that the last task of `begin` goes on."""
        self._stops[-1] = dataclasses.replace(self._stops[-1], until=time.monotonic())
        self._changed()

    def replace(self, stops: list[Stop]) -> None:
        """Let these tasks wait, and no others; those that wait already and have the same path go on to wait."""
        now, news = time.monotonic(), {(stop.job, stop.path): stop for stop in stops}
        ended: list[Stop] = []
        still: list[Stop] = []
        for stop in self._stops:
            if stop.until:
                ended.append(stop)
            elif (news_of := news.pop((stop.job, stop.path), None)) is not None:
                still.append(dataclasses.replace(stop, address=news_of.address))
            else:
                ended.append(dataclasses.replace(stop, until=now))
        found = [*ended, *still, *news.values()][-_STOPS_KEPT:]
        if found != self._stops:
            self._stops = found
            self._changed()

    def _changed(self) -> None:
        self._write()
        if not self._is_uplinks:
            _tell_uplink(self._folder.parent / UPLINK_SOCKET)

    def _write(self) -> None:
        pid = os.getpid()
        about = {"start_time": start_time(pid), "stops": [dataclasses.asdict(stop) for stop in self._stops]}
        folder = private_folder(self._folder, "the folder of debuggers")
        replace_private(folder, f"{pid}.json", json.dumps(about).encode())


def _tell_uplink(path: Path) -> None:
    """Notify the node's uplink, if it is in a cluster, that the stops of a process have changed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
        sock.settimeout(_TELL_S)
        sock.connect(str(path))
        Link(sock).send(StopsChanged())


def waiting(folder: Path, with_elsewhere: bool = False) -> list[Stop]:
    """List the tasks that wait in a debugger, those first that wait longest.

    Args:
        folder: of `folder_of`.
        with_elsewhere: also those that were forwarded, and wait on another node.
    """
    found = (stop for stop, alive in _stops(folder) if alive and not stop.until)
    return sorted((one for one in found if with_elsewhere or one.kind != ELSEWHERE), key=lambda stop: stop.since)


def stood_still(folder: Path, job: int, since: float) -> StandStill:
    """How long the timeouts of a program have stood still.

    Args:
        folder: of `folder_of`.
        job: the program's.
        since: from when, by the monotonic clock.
    """
    if not folder.is_dir():
        return StandStill(0.0, False)
    now = time.monotonic()
    held = [stop for stop, alive in _stops(folder) if stop.job == job and (alive or stop.until)]
    spans = [(stop.since, stop.until or now) for stop in held]
    return StandStill(overlap_s(spans, since, now), not all(stop.until for stop in held))


class Patience:
    """A timeout that has passed just now, and goes on for as long as it stood still.

    Args:
        store: this process's attachment.
        timeout: in seconds.

    Attributes:
        deadline: when the timeout is over, by the monotonic clock, as far as `left_s` has found.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        task = store.task_here()
        self._job = store.client.job if task is None else tasks.info(store.client, task)["job"]
        self._folder, self._timeout = folder_of(store.socket_path), timeout
        self._since = time.monotonic() - timeout
        self.deadline = self._since + timeout

    def left_s(self) -> float | None:
        """How many seconds to wait on before the next call; None: the timeout is over."""
        still = stood_still(self._folder, self._job, self._since)
        self.deadline = self._since + self._timeout + still.seconds
        left_s = self.deadline - time.monotonic()
        return LOOK_S if still.now else left_s if left_s > 0 else None


def wait_some(
    store: Store, timeout: float, found: _T, is_enough: Callable[[_T], bool], wait: Callable[[float], _T]
) -> _T:
    """Wait for some references after a timeout that stood still while a task of this program waited in a debugger.

    Args:
        store: this process's attachment.
        timeout: that has passed just now, in seconds.
        found: what the wait has found until now.
        is_enough: whether the wait is over with that.
        wait: waits for so many seconds more, and returns what it finds.
    Returns:
        The last result of the wait.
    """
    patience = Patience(store, timeout)
    while not is_enough(found) and (left_s := patience.left_s()) is not None:
        found = wait(left_s)
    return found


def wait_on(store: Store, refs: list[ObjectRef], timeout: float | None) -> float:
    """Wait for references after a timeout that stood still while a task of this program waited in a debugger.

    Args:
        store: this process's attachment.
        refs: all that are waited for.
        timeout: that has passed just now, in seconds.
    Returns:
        When the timeout is over, by the monotonic clock.
    Raises:
        GetTimeoutError: the timeout is over.
    """
    if timeout:
        patience = Patience(store, timeout)
        while (left_s := patience.left_s()) is not None:
            if handles.wait_all(store.client, refs, left_s, 0.0):
                return patience.deadline
    waiting = [ref for ref in refs if not handles.is_ready(store.client, ref)]
    raise GetTimeoutError(
        f"{len(waiting)} of {len(refs)} objects were not ready after {timeout} s, the first is "
        f"{waiting[0] if waiting else refs[0]}; wait again, or cancel the task"
    )


def overlap_s(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """How much of the time from `since` to `until` lies in at least one span, in seconds."""
    found, reached = 0.0, since
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, until)
        if end > begin:
            found, reached = found + end - begin, end
    return found


def _stops(folder: Path) -> Iterator[tuple[Stop, bool]]:
    """All stops of the session, each with whether its process lives."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return
    for name in sorted(names):
        try:
            data = read_private(folder, name, _FILE_BYTES_MAX)
            about = read_object(data, str(folder / name), bytes_max=_FILE_BYTES_MAX, own=True)
            found = [Stop(**row) for row in about["stops"]]
            alive = bool(found) and start_time(found[0].pid) == about["start_time"]
        except (OSError, ValueError, TypeError, KeyError, FastrtError):
            continue  # it has just been removed, or another version wrote it
        yield from ((stop, alive) for stop in found)
