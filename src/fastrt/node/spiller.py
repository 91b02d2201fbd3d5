"""Spilling: values that have not been used for long go to files, and are restored when they are read. See `victims`.

Threads do the work, so that no disk holds up the daemon, and mostly on request: a client that finds the store full
asks for room, a client that reads a spilled value asks for the value. One thread decides (`Spilling`), four write and
four read: the disk is busy while a value is authenticated. Copies of values that other nodes keep are dropped before
others are spilled. `spill_files` protects the contents of the files.

While tasks are queued, the spilled arguments of the next ones are brought back before a worker takes them
(`RestoreAhead`).

The file of a restored value stays while the disk has room. When the value is spilled again it is there already. A file
is removed with its value.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastrt._core.memory import background
from fastrt._core.memory.clients import Client
from fastrt._core.objects import spill
from fastrt.config import cpu_count
from fastrt.errors import FastrtError, LockStuck
from fastrt.node.spilling import Event, Job, Spilling
from fastrt.store.spill_files import SpillFiles
from fastrt.store.spill_storage import ObjectStorage

_THREADS = 4  # that write, and as many that read: two reach 0.83 of the speed of dd, four 0.88 to 0.97
# Of the threads that write. A gigabyte takes them 0.2 s of CPU, and each gets a tenth of a processor beside a program
# that computes.
_WRITERS_NICE = 10
# How much of the store is freed ahead. With an eighth, one of eight values is written at a time: 0.67 to 0.81 of the
# speed of dd on a disk of 1.1 to 1.5 GB/s, which wants several; with a quarter 1.2. But on two processors, a small task
# beside such puts then waits 880 us (p99), not 370.
_AHEAD_SHARE, _AHEAD_SHARE_OF_FEW, _FEW_PROCESSORS = 4, 8, 4
_STORAGE_THREADS = 8  # the same for object storage, which is far away


class Spiller:
    """Spills and restores for one node, with threads.

    Args:
        client: the daemon's attachment.
        directory: for this session's files; made when it is needed, removed by `close`.
        key_folder: a private folder of the session.
        falls_back: whether a value that finds no room stays in its file, which its readers map.
        url: of object storage for spilled values; "": they are in the files.
    """

    def __init__(self, client: Client, directory: Path, key_folder: Path, falls_back: bool, url: str = "") -> None:
        storage = ObjectStorage(url, client.segment.session) if url else None
        self._files = SpillFiles(directory, key_folder, storage)
        threads = _STORAGE_THREADS if storage is not None else _THREADS
        self._files.make_key()
        spill.configure(client, str(directory), falls_back)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._writers = _Threads("fastrt-spiller", threads, self._stop, _WRITERS_NICE)
        self._readers = _Threads("fastrt-restorer", threads, self._stop)
        share = _AHEAD_SHARE if cpu_count() > _FEW_PROCESSORS else _AHEAD_SHARE_OF_FEW
        self._spilling = Spilling(
            client, self._files, 2 * threads, share,  # a thread finds the next value when ready
            self._events.put, self._writers.put, self._readers.put, storage is not None,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="fastrt-spills", daemon=True)
        self._thread.start()

    def make_room(self, nbytes: int) -> None:
        """Free memory; see `Spilling.make_room`."""
        self._spilling.make_room(nbytes)

    def restore(self, index: int, objref: int) -> None:
        """Read a spilled value back; see `Spilling.restore`."""
        self._spilling.restore(index, objref)

    def look_ahead(self) -> None:
        """Watch the queue; see `Spilling.look_ahead`."""
        self._spilling.look_ahead()

    def close(self) -> None:
        """End the threads after their current values, and remove all files."""
        self._events.put(None)
        self._thread.join()
        self._writers.join()
        self._readers.join()
        self._files.remove_all()

    def _stop(self, exc: FastrtError) -> None:
        """End the deciding thread: the arena is closed or poisoned, which its clients notice themselves."""
        sys.stderr.write(f"fastrt: spilling stopped: {exc}\n")
        self._events.put(None)

    def _run(self) -> None:
        try:
            while True:
                try:
                    event = self._events.get(timeout=self._spilling.patience_s)
                except queue.Empty:
                    event = _nothing
                if event is None:
                    return
                with _patient():
                    self._spilling.turn(event)
        except FastrtError as exc:
            sys.stderr.write(f"fastrt: spilling stopped: {exc}\n")


class _Threads:
    """Threads that carry out jobs in the order they come; started with the first job.

    Args:
        name: of the threads.
        count: how many.
        stop: called with an error of the core.
        nice: how much the threads stand back behind other threads that want a processor.
    """

    def __init__(self, name: str, count: int, stop: Callable[[FastrtError], None], nice: int = 0) -> None:
        self._name, self._count, self._stop, self._nice = name, count, stop, nice
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, job: Job) -> None:
        """Have a thread carry out a job."""
        self._jobs.put(job)
        while len(self._threads) < self._count:
            self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()

    def join(self) -> None:
        """End the threads after the jobs that are there."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        if self._nice:
            background.stand_back(self._nice)
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                with _patient():
                    for _ in job():
                        pass
            except FastrtError as exc:
                self._stop(exc)
                return


@contextmanager
def _patient() -> Iterator[None]:
    """Give a step up if a stopped process holds a lock of the arena: the value stays where it is, until the next."""
    try:
        yield
    except LockStuck as exc:
        sys.stderr.write(f"fastrt: a value was not spilled or restored: {exc}\n")


def _nothing() -> None:
    """A moment without an event."""
