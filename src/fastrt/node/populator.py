"""Keeps fresh memory of the store ready, so that no put waits for the kernel to find and clear it.

Threads of the lowest priority populate the region beyond the committed mark, each one unit at a time; the daemon's own
thread then commits what they have done, which takes microseconds. They start shortly after the session, and again once
half of that memory is used; in between there is no thread. A program that uses less than half has none cleared that it
does not need while it computes. Before every unit they look whether they may go on. Once values are stored, or tasks
wait for a worker, they pause while threads wait for a processor, because a niceness alone does not keep them off the
processors that the program uses. They stop before memory gets short (`config.spare_memory`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastrt._core.memory import arena, background, populate
from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks
from fastrt.config import SHM_DIR, cpu_count, spare_memory
from fastrt.errors import FastrtError
from fastrt.folders import free_bytes

COMMIT_BYTES = 64 << 20  # what the core commits in one step
_UNIT_BYTES = 2 << 20
_START_S = 0.2  # after the daemon's start: a short program has its processors for itself
_SHORT_S = 10.0  # until the next look, when memory was short
_THREADS_MAX = 4
_SHM_SPARE = 64 << 20
_LOOK_BYTES = 64 << 20  # at most, between two looks at the machine's memory: one takes as long as two huge pages
# Pauses of a thread while all processors are busy: each is twice as long as the one before. After the longest it goes
# on: 2 MiB in 0.3 s take 1 % of a processor.
_PAUSE_S, _PAUSE_MAX_S = 0.02, 0.16
_BEGUN_BYTES = 16 << 20  # of values in the store: the program has begun, and needs the processors itself
_SLOW_S = 0.02  # processor time for one huge page: memory is in pieces, small pages take less


def has_free_processor(path: Path = Path("/proc/loadavg")) -> bool:
    """Whether no thread of the machine waits for a processor at this moment. The caller counts as one that runs.

    Args:
        path: of the file; its form is "0.20 0.18 0.12 1/80 11206", of which 1 is meant.
    Returns:
        True where the kernel does not say it.
    """
    try:
        runnable = path.read_text().split()[3].partition("/")[0]
        return int(runnable) <= (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return True


def may_go_on(client: Client) -> bool:
    """Whether no thread waits for a processor, or the program has stored little yet and no task waits for a worker.

    Args:
        client: an attachment.
    """
    try:
        has_begun = tasks.queued(client) > 0 or arena.room(client)[0] > _BEGUN_BYTES
        return not has_begun or has_free_processor()
    except FastrtError:  # the session has ended
        return True


class Populator:
    """Populates memory of one store.

    Args:
        client: the daemon's attachment.
        ahead: free memory to keep ready, in bytes; 0: none.
        huge: whether to ask for huge pages.
        placement: "interleave" or "local".
        spare: returns the bytes that may be used before memory is short.
        may_run: returns whether the processors are left to this work; None: `may_go_on`.
    """

    def __init__(
        self,
        client: Client,
        ahead: int,
        huge: bool,
        placement: str,
        spare: Callable[[], int] = spare_memory,
        may_run: Callable[[], bool] | None = None,
    ) -> None:
        self._client = client
        self._spare, self._may_run = spare, may_run or partial(may_go_on, client)
        self._huge = huge
        self._ahead = 0 if placement == "local" else ahead
        self._begin_at = time.monotonic() + _START_S
        self._waits = self._is_low = self._ahead > 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._next = self._end = 0
        self._allowed = 0  # bytes until the next look at the machine's memory
        self._unfinished: set[int] = set()
        self._stopped = threading.Event()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if huge:
            populate.advise_huge(client)
        with contextlib.suppress(OSError):  # containers may refuse it; memory then lies where the kernel puts it
            populate.place(client, placement, memory_nodes())

    def fileno(self) -> int:
        """A descriptor that is readable when there may be a step to commit, see `has_step`."""
        return self._news

    def patience_s(self) -> float:
        """Seconds until `tend` should be called first."""
        return max(0.0, self._begin_at - time.monotonic()) if self._waits else 1.0

    def tend(self, used: int, committed: int, most: int) -> None:
        """Start threads if less than half of the memory is ready that should be, and until all of it is.

        Args:
            used, committed, most: bytes, as `arena.room` counts them.
        """
        if time.monotonic() < self._begin_at:
            return
        self._waits = False
        missing = min(most, used + self._ahead) - committed
        self._is_low = missing > 0 and (self._is_low or committed - used < self._ahead // 2)
        if not self._ahead or not self._is_low or any(thread.is_alive() for thread in self._threads):
            return
        steps = (missing + COMMIT_BYTES - 1) // COMMIT_BYTES
        self._next = committed
        self._end = min(most, committed + steps * COMMIT_BYTES)
        self._unfinished.clear()
        self._allowed = 0
        self._stopped.clear()
        count = min(cpu_count(), max(2, cpu_count() // 2), _THREADS_MAX)
        self._threads = [threading.Thread(target=self._run, name="fastrt-populate", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def has_step(self, committed: int) -> bool:
        """Whether all memory of the core's next step of commit is populated.

        Args:
            committed: bytes, as `arena.room` counts them. Puts that found no room may have committed more themselves.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with self._lock:
            done = min(self._unfinished, default=self._next)
            return committed < done and (done - committed >= COMMIT_BYTES or done >= self._end)  # the last may be short

    def close(self) -> None:
        """End the threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        os.close(self._news)

    def _run(self) -> None:
        background.stand_back(19)
        while self._await_processor():
            with self._lock:
                at = max(self._next, self._committed())  # what puts have committed has its memory
                nbytes = min(_UNIT_BYTES, self._end - at)
                if nbytes <= 0:
                    return
                self._next = at + nbytes
                self._unfinished.add(at)
            if self._populate(at, nbytes) < nbytes:  # a put that needs more asks the kernel itself
                self._begin_at = time.monotonic() + _SHORT_S
                self._stopped.set()
                return
            with self._lock:
                self._unfinished.remove(at)
                reached = min(self._unfinished, default=self._next)
            if reached - self._committed() >= COMMIT_BYTES or reached >= self._end:
                os.eventfd_write(self._news, 1)

    def _committed(self) -> int:
        try:
            return arena.room(self._client)[1]
        except FastrtError:  # the session has ended
            return self._end

    def _await_processor(self) -> bool:
        """Pause while the processors are wanted, but not without end. False when the thread should end."""
        pause = _PAUSE_S
        while pause <= _PAUSE_MAX_S and not self._stopped.is_set() and not self._may_run():
            self._stopped.wait(pause)
            pause *= 2
        return not self._stopped.is_set()

    def _may_use(self, nbytes: int) -> bool:
        """Whether memory is not short."""
        with self._lock:
            if self._allowed < nbytes:
                room = min(self._spare(), free_bytes(SHM_DIR) - _SHM_SPARE)
                if room < nbytes * _THREADS_MAX:
                    return False
                self._allowed = min(_LOOK_BYTES, room // 2)
            self._allowed -= nbytes
            return True

    def _populate(self, at: int, nbytes: int) -> int:
        if not self._may_use(nbytes):
            return 0
        started = time.thread_time()
        try:
            done, _ = populate.populate(self._client, at, nbytes, self._huge)
        except FastrtError:  # the session has ended
            return 0
        self._huge = self._huge and time.thread_time() - started < _SLOW_S
        return done


def memory_nodes(path: Path = Path("/sys/devices/system/node/has_memory")) -> list[int]:
    """Read the numbers of the machine's nodes of memory; the file's form is "0-1,3". [0] where there is no such file.

    Args:
        path: of the file.
    """
    try:
        parts = path.read_text().strip().split(",")
        return [k for part in parts for k in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]
    except (OSError, ValueError):
        return [0]
