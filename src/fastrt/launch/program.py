"""The program of `fastrt run`: a child process whose signals, output and exit code are those of `fastrt run` itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

_PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
_AT_TERMINAL = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends them to the program, too
_PR_SET_PDEATHSIG = 1


class Signals:
    """Collects this process's signals, which wake a `poll` instead of interrupting the code; for a `with` statement.

    Attributes:
        fd: can be read when a signal has come.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.fd = self._read
        self._before = {number: signal.getsignal(number) for number in _PASSED_ON}

    def __enter__(self) -> Signals:
        for number in _PASSED_ON:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def take(self) -> list[int]:
        """Return the signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self._read, 4096))
        return []

    def _note(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([number]))


class Program:
    """The running program.

    At a terminal it stays in this process's group, so that Ctrl-C and Ctrl-Z reach it as they would without `fastrt
    run`. Elsewhere it gets a group of its own, and every signal is passed on exactly once. If this process is killed,
    the kernel ends the program, too.

    Args:
        words: the command.
        env: its variables.
        signals: this process's.
        grace_s: how long it may take to end after SIGTERM.
        say: prints a line for people.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        signals: Signals,
        grace_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._signals = signals
        self._grace_s = grace_s
        self._say = say
        self._has_terminal = _is_in_foreground()
        self._kill_at: float | None = None
        libc = ctypes.CDLL(None)  # loaded here: the child must not
        parent, own_group = os.getpid(), not self._has_terminal

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if own_group:
                os.setpgid(0, 0)
            if os.getppid() != parent:
                os._exit(1)

        self._child = subprocess.Popen(list(words), env=dict(env), preexec_fn=prepare)

    def wait(self, tick: Callable[[], None], every_s: float) -> int:
        """Wait for the program's end, and pass on signals.

        Args:
            tick: called every `every_s` seconds.
        Returns:
            Its exit code, or minus the signal that ended it.
        """
        ended = os.pidfd_open(self._child.pid)
        try:
            poll = select.poll()
            for fd in (ended, self._signals.fd):
                poll.register(fd, select.POLLIN)
            while True:
                ready = {fd for fd, _ in poll.poll(every_s * 1000)}
                for number in self._signals.take():
                    self._pass_on(number)
                if ended in ready:
                    return self._child.wait()
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._kill_at = None
                    self._say(
                        f"the program did not end within {self._grace_s:g} s after SIGTERM (--grace) and is killed"
                    )
                    self._child.kill()
                tick()
        finally:
            os.close(ended)

    @property
    def ends_soon(self) -> bool:
        """Return whether the program has got SIGTERM."""
        return self._kill_at is not None

    def terminate(self) -> None:
        """Ask the program to end, as SIGTERM to this process does."""
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        if self._has_terminal and number in _AT_TERMINAL:
            return
        if number == signal.SIGTERM and self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_s
        self._child.send_signal(number)


def end_as(code: int) -> int:
    """End this process as its program ended.

    Args:
        code: its exit code, or minus the signal that ended it; then this process is ended by the same signal.
    Returns:
        The exit code to use, if this process is to exit.
    """
    if code >= 0:
        return code
    number = -code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its own core
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number  # where this process cannot be ended by it, as the first one of a PID namespace


def _is_in_foreground() -> bool:
    """Whether Ctrl-C at the terminal reaches this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
