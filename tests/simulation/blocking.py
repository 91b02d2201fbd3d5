"""Processes that block inside a call: their threads wait, and another thread runs the world.

Exactly one thread runs at any moment. It hands its turn on only where a process blocks, and where such a wait is over:
so everything happens in the same order in each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World


class Killed(BaseException):
    """The process was killed while it was blocked, or the run is over: no more of its code runs."""


class _Turn:
    """The turn of one thread: the thread waits until another one gives it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


class _Blocked(_Turn):
    """A call in which a process, or a thread of one, is blocked."""

    def __init__(self, process: Any, is_over: Callable[[], bool], until: float) -> None:
        super().__init__()
        self.process, self.is_over, self.until = process, is_over, until

    @property
    def is_dead(self) -> bool:
        return self.process is not None and not self.process.alive


class Turns:
    """The threads of one world.

    Args:
        world: the world.

    Attributes:
        holder: the identity of the thread that runs.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._blocked: list[_Blocked] = []
        self._idle: list[_Turn] = []  # of threads that can run the world
        self._first = _Turn()  # of the thread that began
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self.holder = threading.get_ident()

    def block(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Block the process that runs, or a thread of one: the world goes on without it.

        Args:
            is_over: whether the wait has ended; looked at before each step of the world.
            seconds: the longest wait.
        Returns:
            What `is_over` returns at the end.
        Raises:
            Killed: the process was killed meanwhile, or the run is over.
        """
        world = self._world
        process, world.current = world.current, None
        call = _Blocked(process, is_over, world.now + seconds)
        if process is not None:
            process.is_blocked = True
        self._blocked.append(call)
        if self._idle:
            self._idle.pop().give()
        else:
            self._threads.append(threading.Thread(target=self._run, name="fastrt-simulation", daemon=True))
            self._threads[-1].start()
        call.wait()
        call.is_over = bool  # it names a reference, and the thread that was idle keeps the call
        self.holder = threading.get_ident()
        world.current = process
        if process is not None:
            process.is_blocked = False
        if world.violations or self._is_closing or call.is_dead:
            raise Killed
        return is_over()

    def _run(self) -> None:
        """Run the world on another thread than the first."""
        self.holder = threading.get_ident()
        while not self.has_ended:
            try:
                self._world.serve(False)
            except Exception as exc:
                self._world.violation(f"{type(exc).__name__}: {exc}", exc)
        if self._first in self._idle:  # it ends the run
            self._idle.remove(self._first)
            self._first.give()

    @property
    def next_at(self) -> float:
        """When the next call that is blocked gives up."""
        return min((call.until for call in self._blocked), default=float("inf"))

    def go_on(self, is_first: bool) -> bool:
        """Let the first call continue whose wait is over, if there is one; return when it is this thread's turn again.

        Args:
            is_first: whether this is the thread that began.
        """
        now, ends = self._world.now, bool(self._world.violations) or self._is_closing
        for call in self._blocked:
            if ends or call.is_dead or now >= call.until or call.is_over():
                self._blocked.remove(call)
                self._hand(call, is_first)
                return True
        return False

    def stops(self, is_first: bool) -> bool | None:
        """Return whether this thread's run ends, which is over; None: another thread has run meanwhile.

        A thread other than the first leaves the end to that one, and goes on as long as that one is blocked.
        """
        if not is_first and self._first in self._idle:
            self._idle.remove(self._first)
            self._hand(self._first, False)
            return None
        return is_first

    @property
    def has_ended(self) -> bool:
        """Whether the run is over, and nothing is blocked any more."""
        return self._is_closing and not self._blocked

    def _hand(self, to: _Turn, is_first: bool) -> None:
        mine = self._first if is_first else _Turn()
        self._idle.append(mine)
        to.give()
        mine.wait()
        self.holder = threading.get_ident()

    def close(self) -> None:
        """End all calls and threads."""
        self._is_closing = True
        while self.go_on(True):
            pass
        for turn in self._idle:
            turn.give()
        for thread in self._threads:
            thread.join(10.0)
