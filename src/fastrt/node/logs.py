"""Reads output of workers from pipes: adds prefixes, passes on unfinished lines after a moment, limits floods.

A worker writes a mark (`tasks.marks`) into its output where the job or the task changes. Bytes without a mark of their
own belong to the last mark: output of native code, and of processes that a task starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fastrt.store.messages import TaskOutput
from fastrt.tasks.marks import MARK, Source, read_mark

if TYPE_CHECKING:
    from fastrt.store.join import Link

_LINE_BYTES_MAX = 65536
_READ_BYTES = 65536
_SPLICE_F_NONBLOCK = 2  # of tee(2)
_LINES_MAX = 500  # with their prefixes, and with the limits above, any bytes make less than 1 MiB of JSON
UNFINISHED_S = 0.5  # after which an unfinished line is passed on, and between two updates of a progress bar
_BACKLOG_BYTES = 1 << 20  # of output that the uplink has not read yet
FORWARD_BYTES_A_SECOND = 256 << 10
_BURST_S = 4.0


class Printed(NamedTuple):
    """Some lines of one worker.

    Attributes:
        lines: without their ends.
        is_error: whether they come from stderr.
        source: the task or actor.
        pid: of the process; 0: the lines are a note of fastrt.
        is_update: whether it is the state of a progress bar, which the next line may overwrite.
    """

    lines: list[str]
    is_error: bool
    source: Source
    pid: int
    is_update: bool = False

    @property
    def who(self) -> str:
        """The task or actor, and the process."""
        return prefix_of(self.source.name, self.pid)

    def text(self) -> str:
        """The lines with their prefix."""
        who = self.who
        return "".join(f"({who}) {line}\n" for line in self.lines)


def prefix_of(name: str, pid: int) -> str:
    """Name a task or actor, and its process, before a line of its output."""
    return f"{name} pid={pid}" if name and pid else name or f"pid={pid}"


def note(text: str) -> Printed:
    """Return a line of fastrt itself among the output of tasks."""
    return Printed([text], True, Source(name="fastrt"), 0)


class Peek:
    """Reads bytes of a pipe and leaves them there: a daemon that is killed before it has used them loses none."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._tee: Callable[[int, int], int] | None = None

    def read(self, fd: int) -> bytes:
        """Return the bytes in a pipe; empty at the end of the stream.

        Raises:
            BlockingIOError: the pipe is empty.
        """
        if self._tee is None:
            self._tee = _load_tee()
        count = self._tee(fd, self._in)
        return os.read(self._out, count) if count else b""

    def close(self) -> None:
        """Close the pipe that it copies into."""
        os.close(self._out)
        os.close(self._in)


def _load_tee() -> Callable[[int, int], int]:
    """Return a function that copies bytes between two pipes; the `os` module has none."""
    import ctypes  # here: a session that prints nothing starts sooner without it

    function = ctypes.CDLL(None, use_errno=True).tee
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint), ctypes.c_ssize_t

    def tee(source: int, target: int) -> int:
        count: int = function(source, target, _READ_BYTES, _SPLICE_F_NONBLOCK)
        if count < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return count

    return tee


class LogPipe:
    """The read end of one worker's stdout or stderr.

    Args:
        fd: the descriptor.
        is_error: whether it is stderr.
        emit: called with each piece of output.
        peek: with it, bytes are taken from the pipe only after they were passed on.
    """

    def __init__(
        self, fd: int, is_error: bool, emit: Callable[[Printed], None], peek: Peek | None = None
    ) -> None:  # fmt: skip
        self.fd = fd
        self.is_error = is_error
        self.pid = 0
        self._emit = emit
        self._peek = peek
        self._is_empty = False  # at the last look
        self._rest = b""  # of a line, or of a mark
        self._source = Source()
        self._passed_at = 0.0  # when an unfinished line was passed on
        self._since = 0.0  # since when one waits
        self._shown = b""  # the unfinished line that was passed on last
        os.set_blocking(fd, False)

    @property
    def has_rest(self) -> bool:
        """Whether part of a line waits for its end."""
        return bool(self._rest)

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.fd

    def read(self) -> bool:
        """Pass on the bytes in the pipe; False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_BYTES) if self._peek is None else self._peek.read(self.fd)
        except BlockingIOError:
            self._is_empty = True
            return True
        self._is_empty = False
        if not data:
            self._pass_on_rest()
            return False
        if not self._rest:
            self._since = time.monotonic()
        self._take(self._rest + data)
        if self._peek is not None:
            os.read(self.fd, len(data))
        return True

    def drain(self) -> None:
        """Pass on everything up to the end of the stream, or until the pipe is empty; close it."""
        while self.read() and not self._is_empty:
            pass
        self._pass_on_rest()
        os.close(self.fd)

    def pass_on_unfinished(self, now: float) -> None:
        """Pass on an unfinished line that has waited long enough: a question, or a progress bar."""
        if not self._rest or MARK[:2] in self._rest or now - max(self._since, self._passed_at) < UNFINISHED_S:
            return
        newest, is_bar = _visible(self._rest), b"\r" in self._rest
        if newest and (newest != self._shown or not is_bar):
            self._passed_at = now
            self._send([newest], is_update=is_bar)
        self._shown = newest
        if not is_bar:
            self._rest = b""

    def _take(self, data: bytes) -> None:
        """Pass on whole lines, each with the mark before it, and keep the rest."""
        before, found, after = data.partition(MARK)
        while found:
            self._pass_on_lines(before)
            about, ended, data = after.partition(b"\n")
            if not ended:
                self._rest += found + after  # part of a mark: a read may end inside of one
                return
            self._pass_on_rest()
            self._source = read_mark(about)
            before, found, after = data.partition(MARK)
        self._pass_on_lines(before)

    def _pass_on_lines(self, data: bytes) -> None:
        """Pass on the whole lines of `data`, and keep the rest."""
        whole, newline, self._rest = data.rpartition(b"\n")
        if newline:
            lines = [_visible(line) for line in whole.split(b"\n")]
            if self._shown and not lines[0]:
                del lines[0]  # the end of a line that was passed on before
            self._shown = b""
            self._send(lines)
        if b"\r" in self._rest:  # only the newest update of a progress bar is kept
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        if len(self._rest) > _LINE_BYTES_MAX:
            self._pass_on_rest()

    def _pass_on_rest(self) -> None:
        if self._rest:
            self._send([_visible(self._rest)])
        self._rest = self._shown = b""

    def _send(self, lines: list[bytes], is_update: bool = False) -> None:
        for k in range(0, len(lines), _LINES_MAX):
            texts = [line.decode("utf-8", "replace") for line in lines[k : k + _LINES_MAX]]
            self._emit(Printed(texts, self.is_error, self._source, self.pid, is_update))


def _visible(line: bytes) -> bytes:
    """The part of a line that a terminal shows: what follows its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Meter:
    """Limits a flood: passes so many bytes a second, and counts the lines of the rest.

    Args:
        rate: bytes a second; four seconds' worth may come at once.
        clock: the time in seconds.
    """

    def __init__(self, rate: int = FORWARD_BYTES_A_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._room = self._most = rate * _BURST_S
        self._looked_at = clock()
        self.cut = 0  # lines since the last `take_cut`

    def passes(self, lines: list[str]) -> bool:
        """Whether these lines may pass; lines that may not are counted, and so are all lines until `note`."""
        if self.cut:
            self.cut += len(lines)
            return False
        now = self._clock()
        self._room = min(self._most, self._room + (now - self._looked_at) * self._rate)
        self._looked_at = now
        nbytes = sum(map(len, lines)) + len(lines)
        if self._room < nbytes:
            self.cut += len(lines)
            return False
        self._room -= nbytes
        return True

    @property
    def is_ready(self) -> bool:
        """Whether a second's worth of output may pass again after a cut."""
        return self._room + (self._clock() - self._looked_at) * self._rate >= self._rate

    def note(self) -> str:
        """Say how many lines were left out since the last note."""
        cut, self.cut = self.cut, 0
        return f"{cut} lines were left out: this node's output was more than {self._rate >> 10} KiB a second"


class Forwarding:
    """Sends output of tasks of other nodes to the uplink, which forwards it to nodes with drivers."""

    def __init__(self) -> None:
        self._meter = Meter()

    def forward(self, printed: Printed, uplink: Link | None) -> None:
        """Send some lines, or count them if there are too many."""
        if uplink is None:
            return
        self.tend(uplink)
        if uplink.backlog > _BACKLOG_BYTES:
            self._meter.cut += len(printed.lines)
        elif self._meter.passes(printed.lines):
            self._post(uplink, printed)

    def tend(self, uplink: Link | None) -> None:
        """Report how many lines were left out, once lines may pass again."""
        if uplink is not None and self._meter.cut and self._meter.is_ready and uplink.backlog <= _BACKLOG_BYTES:
            self._post(uplink, note(self._meter.note()))

    def _post(self, uplink: Link, printed: Printed) -> None:
        uplink.post(TaskOutput(printed.who, printed.source.job, printed.lines, printed.is_error, printed.is_update))
