"""The log files of a session: what its workers and actors print, in numbered files of one folder.

The daemon appends each piece of output by one `write` before drivers see it, so a killed daemon leaves whole lines. A
new file begins when one has an eighth of the allowed bytes, and the oldest is removed: `log_bytes` bounds the folder.
The folders of the last five sessions stay. A session that prints nothing has none.

A line of a file has tabs between: time (UTC), stream, pid, task id, task path, job, actor, name, text. Readers skip
other lines, such as the rest of one that a full disk cut off.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastrt.config import SHM_DIR
from fastrt.errors import FastrtError
from fastrt.folders import has_private_folder, open_private, private_folder, read_private, replace_private
from fastrt.foreign_text import read_object
from fastrt.node.logs import Printed, note
from fastrt.store.session_folder import may_be_removed
from fastrt.tasks.marks import Source

LOGS_FOLDER = "logs"  # in the runtime folder
SESSIONS_KEPT = 5
PARTS = 8  # files of one session
_ABOUT = "about.json"
_PURPOSE = "the folder of log files"
_NAME = re.compile(r"([0-9]{8})\.log")
_SESSION = re.compile("[0-9a-f]{32}")
_STREAMS = {b"out": False, b"err": True}
_AGAIN_S = 10.0  # between attempts to write to a full disk
_PIECE_BYTES = 1 << 16
_SCAN_BYTES = 4 << 20  # read for one page, so that a reader of a large folder can do other work in between


class LogLine(NamedTuple):
    """One line that a task or actor printed.

    Attributes:
        time: when the daemon read it, in seconds since 1970.
        is_error: whether it comes from stderr.
        pid: of the process; 0: a note of fastrt.
        source: the task or actor.
        text: the line, without its end.
    """

    time: float
    is_error: bool
    pid: int
    source: Source
    text: str


class Wanted(NamedTuple):
    """Which lines to read; an empty field matches all.

    Attributes:
        task: the beginning of a task's id, as in `fastrt list tasks` or as `runtime_context().task_id`.
        actor: the name of an actor or of its class, or the actor's number in `fastrt list actors`.
        worker: the pid of a process.
    """

    task: str = ""
    actor: str = ""
    worker: int = 0

    def has(self, line: LogLine) -> bool:
        """Whether a line matches."""
        source = line.source
        if self.task and not any(f"{id:016x}".startswith(self.task) for id in (source.task, source.path) if id):
            return False
        if self.actor and not (source.actor and self.actor in (source.actor, source.name)):
            return False
        return not self.worker or line.pid == self.worker

    def hint(self) -> bytes:
        """Bytes that each matching line contains: a cheap test before a line is parsed."""
        return (self.task or self.actor or str(self.worker or "")).encode()


class Page(NamedTuple):
    """Some lines, in the order in which they were printed.

    Attributes:
        lines: that match.
        after: where the next page begins; text for `read_page`.
        is_end: whether there was nothing more to read.
    """

    lines: list[LogLine]
    after: str
    is_end: bool


class LogFolder(NamedTuple):
    """The log files of one session.

    Attributes:
        path: of the folder.
        session: the session's name.
        node: the name of the node; may be empty.
        program: the name of the driver that started first.
        started: when the first line was written, in seconds since 1970.
        written: when the last one was.
        nbytes: of all files.
        is_alive: whether the session still exists.
    """

    path: Path
    session: str
    node: str
    program: str
    started: float
    written: float
    nbytes: int
    is_alive: bool


# ---- the daemon's side ----


class LogFiles:
    """Writes the log files of the daemon's session.

    Args:
        runtime_dir: the runtime folder.
        session: the session's name.
        bytes_max: of all its files together; 0: nothing is written.
        about: returns what the folder's file says about the session: node and program.
        report: prints a line at the drivers.
    """

    def __init__(
        self, runtime_dir: Path, session: str, bytes_max: int, about: Callable[[], dict[str, str]],
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._parent = runtime_dir / LOGS_FOLDER
        self._folder = self._parent / session
        self._part_bytes = bytes_max // PARTS
        self._about = about
        self._report = report
        self._fd = -1
        self._number = self._size = 0
        self._is_torn = self._has_reported = False
        self._retry_at = 0.0
        self._lost = 0  # lines, since the disk is full

    def write(self, printed: Printed) -> None:
        """Append lines; a full disk is reported once, and the lines are counted."""
        if not self._part_bytes or printed.is_update:
            return
        now = time.monotonic()
        if now < self._retry_at:
            self._lost += len(printed.lines)
            return
        try:
            if self._lost:
                count, self._lost = self._lost, 0
                self._append(encode(note(f"{count} lines are missing here: they could not be written"), time.time()))
            self._append(encode(printed, time.time()))
        except (OSError, FastrtError) as exc:
            self.close()
            self._retry_at, self._lost = now + _AGAIN_S, self._lost + len(printed.lines)
            if not self._has_reported:
                self._has_reported = True
                self._report(f"fastrt: lines of tasks are missing in the log files in {self._folder}: {exc}\n")

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            self._open()
        elif self._size and self._size + len(data) > self._part_bytes:
            self._next()
        if self._is_torn:
            data = b"\n" + data
        self._is_torn = True  # until all is written
        while data:
            count = os.write(self._fd, data)
            self._size += count
            data = data[count:]
        self._is_torn = False

    def _open(self) -> None:
        """Continue the last file of an earlier daemon, or begin the first one."""
        private_folder(self._parent, _PURPOSE)
        if not self._folder.exists():
            _drop_old(self._parent, SESSIONS_KEPT - 1)
        private_folder(self._folder, _PURPOSE)
        if not (self._folder / _ABOUT).exists():
            about = {**self._about(), "started": time.time()}
            replace_private(self._folder, _ABOUT, json.dumps(about).encode())
        self._number = max(_numbers(self._folder), default=1)
        self._open_file()
        self._is_torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"

    def _open_file(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        self._fd = open_private(self._folder, _file_name(self._number), flags)
        self._size = os.fstat(self._fd).st_size

    def _next(self) -> None:
        """Begin another file, and remove the oldest."""
        self.close()
        self._number += 1
        for number in _numbers(self._folder):
            if number <= self._number - PARTS:
                (self._folder / _file_name(number)).unlink(missing_ok=True)
        self._is_torn = False
        self._open_file()


def encode(printed: Printed, now: float) -> bytes:
    """Write lines as they are in a file."""
    at = datetime.datetime.fromtimestamp(now, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")
    job, name, task, path, actor = printed.source
    names = [one.replace("\t", " ") for one in (actor, name)]
    stream = "err" if printed.is_error else "out"
    head = f"{at}\t{stream}\t{printed.pid}\t{task:016x}\t{path:016x}\t{job:x}\t{names[0]}\t{names[1]}\t"
    return "".join([f"{head}{line}\n" for line in printed.lines]).encode("utf-8", "replace")


def decode(line: bytes) -> LogLine | None:
    """Read one line of a file; None if `encode` did not write it."""
    fields = line.split(b"\t", 8)
    if len(fields) != 9 or fields[1] not in _STREAMS:
        return None
    try:
        at = datetime.datetime.fromisoformat(fields[0].decode())
        pid, task, path, job = int(fields[2]), int(fields[3], 16), int(fields[4], 16), int(fields[5], 16)
    except ValueError:
        return None
    actor, name, text = (one.decode("utf-8", "replace") for one in fields[6:])
    seconds = at.replace(tzinfo=datetime.timezone.utc).timestamp()
    return LogLine(seconds, _STREAMS[fields[1]], pid, Source(job, name, task, path, actor), text)


def _drop_old(parent: Path, kept: int) -> None:
    """Remove the folders of all sessions but those that run, and the newest of the others."""
    ended = [one for one in find_folders(parent.parent) if not one.is_alive]
    for one in ended[kept:]:
        shutil.rmtree(one.path, ignore_errors=True)


# ---- the readers' side ----


def find_folders(runtime_dir: Path) -> list[LogFolder]:
    """List the sessions with log files; the last that printed is the first.

    Raises:
        UnsafeFolderError: another user could have written them.
    """
    parent = runtime_dir / LOGS_FOLDER
    if not has_private_folder(parent, _PURPOSE):
        return []
    found = []
    for path in parent.iterdir():
        if _SESSION.fullmatch(path.name):
            with suppress(OSError):  # it is being removed
                found.append(_describe(path))
    return sorted(found, key=lambda one: one.written, reverse=True)


def _describe(path: Path) -> LogFolder:
    about: dict[str, Any] = {}
    with suppress(OSError, FastrtError):
        about = read_object(read_private(path, _ABOUT), str(path), {"node": str, "program": str, "started": float})
    infos = [(path / _file_name(number)).stat() for number in _numbers(path)]
    written = max([info.st_mtime for info in infos], default=path.stat().st_mtime)
    return LogFolder(
        path, path.name, about.get("node", ""), about.get("program", ""), about.get("started", written), written,
        sum(info.st_size for info in infos), _is_alive(path.parent.parent / path.name),
    )  # fmt: skip


def _is_alive(folder: Path) -> bool:
    """Whether a session runs, here or on another machine; `folder` is the one of its sockets."""
    return (SHM_DIR / f"fastrt-{folder.name}").exists() or (folder.is_dir() and not may_be_removed(folder))


def read_page(folder: Path, wanted: Wanted, after: str = "", limit: int = 1000) -> Page:
    """Read lines of a session.

    Args:
        folder: of the session's log files.
        wanted: which lines.
        after: where to begin, from an earlier page; empty: at the oldest line.
        limit: the greatest number of lines.
    Returns:
        A page; one without lines need not be the last, because a page reads 4 MiB at most.
    Raises:
        ValueError: `after` does not come from a page.
        UnsafeFolderError, OSError: a file cannot be read.
    """
    number, offset = _position(after)
    numbers = [one for one in _numbers(folder) if one >= number]
    lines: list[LogLine] = []
    hint, scanned = wanted.hint(), 0
    for one in numbers:
        number, offset = one, offset if one == number else 0
        for line in _lines_of(folder, one, offset, is_last=one == numbers[-1]):
            offset, scanned = offset + len(line) + 1, scanned + len(line) + 1
            if hint in line:
                found = decode(line)
                if found is not None and wanted.has(found):
                    lines.append(found)
            if len(lines) >= limit or scanned >= _SCAN_BYTES:
                return Page(lines, f"{number}:{offset}", False)
    return Page(lines, f"{number}:{offset}", True)


def tail_page(folder: Path, wanted: Wanted, count: int) -> Page:
    """Read the last matching lines of a session, the newest file first; arguments and errors are those of `read_page`.

    Returns:
        The last `count` lines, and where lines that are printed later begin.
    """
    hint = wanted.hint()
    lines: list[LogLine] = []
    numbers = _numbers(folder)
    after = ""
    for number in reversed(numbers):
        last: deque[LogLine] = deque(maxlen=count - len(lines))
        offset = 0
        for line in _lines_of(folder, number, 0, is_last=number == numbers[-1]):
            offset += len(line) + 1
            if hint in line:
                found = decode(line)
                if found is not None and wanted.has(found):
                    last.append(found)
        after = after or f"{number}:{offset}"
        lines = [*last, *lines]
        if len(lines) >= count:
            break
    return Page(lines, after, True)


def _lines_of(folder: Path, number: int, offset: int, is_last: bool) -> Iterator[bytes]:
    """Iterate over the lines of a file from an offset on, without their ends."""
    try:
        fd = open_private(folder, _file_name(number), os.O_RDONLY)
    except FileNotFoundError:  # the daemon has just removed the oldest file
        return
    with open(fd, "rb", buffering=_PIECE_BYTES) as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n") and is_last:
                return  # the rest is being written
            yield line.removesuffix(b"\n")


def _position(after: str) -> tuple[int, int]:
    if not after:
        return 0, 0
    match = re.fullmatch(r"([0-9]{1,8}):([0-9]{1,15})", after)
    if match is None:
        raise ValueError(f"{after!r} is no place in log files: give the `after` of an earlier page")
    return int(match[1]), int(match[2])


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match is not None)


def _file_name(number: int) -> str:
    return f"{number:08d}.log"
