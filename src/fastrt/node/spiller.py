"""Spilling: values that have not been used for long go to files, and are restored when they are read. See `victims`.

Threads do the work, so that no disk holds up the daemon, and mostly on request: a client that finds the store full
asks for room, a client that reads a spilled value asks for the value. One thread decides (`SpillPlan`), four write and
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
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fastrt._core.memory import arena, background, trace
from fastrt._core.memory.clients import Client
from fastrt._core.objects import remote, spill
from fastrt._core.tasks import tasks
from fastrt.config import cpu_count
from fastrt.errors import FastrtError, ObjectStoreFullError
from fastrt.folders import UnsafeFolderError
from fastrt.node import victims
from fastrt.node.restore_ahead import RestoreAhead
from fastrt.node.spill_plan import SpillPlan
from fastrt.store.spill_files import Identity, SpillFiles
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
_SWEEP_S = 2.0  # between two looks for objects of values that are no more
_LOOK_S = 0.005  # between two looks whether to spill ahead
_AHEAD_LOOK_S = 0.02  # between two looks at the queue, while tasks are in it and values in files
_TASKS_AHEAD = 8
_CHOICE_S = 1.0  # the rest of a choice is used for so long: to make one, all entries are read
_KEPT_MAX = 10_000  # files of restored values


class Spiller:
    """Spills and restores for one node.

    Args:
        client: the daemon's attachment.
        directory: for this session's files; made when it is needed, removed by `close`.
        key_folder: a private folder of the session.
        falls_back: whether a value that finds no room stays in its file, which its readers map.
        url: of object storage for spilled values; "": they are in the files.
    """

    def __init__(self, client: Client, directory: Path, key_folder: Path, falls_back: bool, url: str = "") -> None:
        self._client = client
        storage = ObjectStorage(url, client.segment.session) if url else None
        self._files = SpillFiles(directory, key_folder, storage)
        self._is_stored, self._swept_at = storage is not None, time.monotonic()
        threads = _STORAGE_THREADS if storage is not None else _THREADS
        self._files.make_key()
        spill.configure(client, str(directory), falls_back)
        spill.end_round(client, 0)  # who waits for a daemon that died asks again: its request died, too
        share = _AHEAD_SHARE if cpu_count() > _FEW_PROCESSORS else _AHEAD_SHARE_OF_FEW
        self._plan = SpillPlan(arena.room(client)[2], 2 * threads, share)  # a thread finds the next value when ready
        self._ahead = RestoreAhead(arena.room(client)[2])
        self._looked_at = float("-inf")
        self._watches_queue = False  # only its own thread sets this to False
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._victims: Iterator[victims.Candidate] = iter(())
        self._chosen_for, self._chosen_at = 0, float("-inf")
        self._found = (0, 0)  # bytes wanted and bytes in use at the last choice that had nothing to do
        self._stalled: list[tuple[int, int]] = []  # restores that wait for the end of a round
        self._kept: dict[int, Identity] = {}  # files of values that are in memory again
        self._busy: set[int] = set()  # values whose files are being written, read or removed
        self._free_again = threading.Condition()  # protects `_busy` and `_kept`
        self._writers = _Threads("fastrt-spiller", threads, self._stop, _WRITERS_NICE)
        self._readers = _Threads("fastrt-restorer", threads, self._stop)
        self._thread = threading.Thread(target=self._run, name="fastrt-spills", daemon=True)
        self._thread.start()

    def make_room(self, nbytes: int) -> None:
        """Free at least `nbytes` of memory if possible; the end of the round wakes all clients that wait for it."""
        self._events.put(lambda: self._plan.ask(nbytes, time.monotonic()))

    def restore(self, index: int, objref: int) -> None:
        """Read a spilled value back, and wake the processes that wait for it."""
        self._readers.put(lambda: self._restore(index, objref))

    def look_ahead(self) -> None:
        """Watch the queue while tasks are in it; a call costs next to nothing if there are no spilled values."""
        if self._is_stored and time.monotonic() - self._swept_at > _SWEEP_S:
            self._swept_at = time.monotonic()
            self._readers.put(self._files.sweep_storage)
        if not self._watches_queue and self._has_work_ahead():
            self._events.put(self._watch_queue)

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

    # ---- the thread that decides ----

    def _run(self) -> None:
        try:
            while True:
                try:
                    event = self._events.get(timeout=self._patience_s())
                except queue.Empty:
                    event = _nothing
                if event is None:
                    return
                event()
                self._advance()
                if self._watches_queue:
                    self._restore_ahead()
        except FastrtError as exc:
            sys.stderr.write(f"fastrt: spilling stopped: {exc}\n")

    def _patience_s(self) -> float | None:
        if self._plan.is_pressed(time.monotonic()):
            return _LOOK_S
        return _AHEAD_LOOK_S if self._watches_queue else None

    def _advance(self) -> None:
        """Begin to spill as many values as the plan wants, and end the round if that is due."""
        exhausted = False
        while not exhausted and self._plan.wants(self._free(), time.monotonic()):
            exhausted = not self._begin_one()
        ended = self._plan.end_round(exhausted)
        if ended is None:
            return
        spill.end_round(self._client, *ended)
        stalled, self._stalled = self._stalled, []
        for index, objref in stalled if ended[0] else ():
            self.restore(index, objref)

    def _watch_queue(self) -> None:
        self._watches_queue = True

    def _has_work_ahead(self) -> bool:
        totals = spill.totals(self._client)
        return totals["spilled_objects"] + totals["mapped_objects"] > 0 and tasks.queued(self._client) > 0

    def _restore_ahead(self) -> None:
        """Bring the spilled arguments of the next tasks closer."""
        now = time.monotonic()
        if now - self._looked_at < _AHEAD_LOOK_S:
            return
        self._looked_at = now
        self._watches_queue = self._has_work_ahead()
        wanted = spill.wanted_next(self._client, _TASKS_AHEAD)
        for step in self._ahead.decide(wanted, self._free(), self._plan.is_pressed(now)):
            if step.restores:
                self._readers.put(partial(self._restore, step.entry, step.objref, True))
            else:
                self._readers.put(partial(self._read_ahead, step.entry, step.objref))

    def _free(self) -> int:
        used, _, most = arena.room(self._client)
        return most - used

    def _begin_one(self) -> bool:
        """Begin to spill the next chosen value that can be spilled; return whether there is one."""
        for value in self._candidates():
            index, objref = value.entry, value.objref
            copy = remote.drop_copy(self._client, index, objref)
            if copy:
                self._plan.dropped(copy)
                return True
            with self._free_again:
                if objref in self._busy:
                    continue
                data = spill.begin(self._client, index, objref)
                if data is None:
                    continue
                self._busy.add(objref)
            self._plan.begun(value.nbytes)
            self._writers.put(partial(self._spill, value, data))
            del data
            return True
        return False

    def _candidates(self) -> Iterator[victims.Candidate]:
        """Yield chosen values: the rest of the last choice if it is new and frees enough, then those of the next."""
        now, piece = time.monotonic(), self._plan.piece
        if now - self._chosen_at <= _CHOICE_S and piece <= self._chosen_for:
            yield from self._victims
        self._chosen_for, self._chosen_at = piece, now
        self._victims = iter(self._choose(piece))
        yield from self._victims

    def _choose(self, wanted: int) -> list[victims.Candidate]:
        """Choose values that leave `wanted` bytes in one piece; the free part of that piece counts as freed.

        A piece that is free already is for another client that waits for room, or was freed after the request. It
        counts once: a client that asks again while the bytes in use are the same could not use it.
        """
        used, _, store_bytes = arena.room(self._client)
        chosen = victims.choose(spill.candidates(self._client), spill.free_runs(self._client), wanted, store_bytes)
        if chosen:
            self._plan.was_free(max(0, wanted - sum(value.nbytes for value in chosen)))
            return chosen
        before, self._found = self._found, (wanted, used)
        if chosen is not None and before != self._found:
            self._plan.dropped(wanted)
        return []

    # ---- the threads that write ----

    def _spill(self, value: victims.Candidate, data: spill.Bytes) -> None:
        """Write a value's file, free its memory, and report it."""
        freed, trouble = 0, ""
        try:
            with memoryview(data) as view:
                is_new = self._write(value.objref, view)
        except (OSError, UnsafeFolderError, ValueError) as exc:
            spill.give_up(self._client, data)
            trouble = str(exc)
        else:
            freed = spill.commit(self._client, data, is_new)
        finally:
            self._release(value.objref)
        self._events.put(lambda: self._plan.ended(value.nbytes, freed, trouble, time.monotonic()))

    def _write(self, objref: int, data: memoryview) -> bool:
        """Write a value's file; return False if the file of an earlier time is still there."""
        with self._free_again:
            kept = self._kept.pop(objref, None)
        if kept is not None and self._files.identity(objref) == kept:
            return False
        traced = trace.begin(self._client, trace.SPILL, objref, trace.kib(len(data)))
        try:
            self._files.write(objref, data)
        finally:
            trace.end(self._client, traced)
        return True

    def _release(self, objref: int) -> None:
        with self._free_again:
            self._busy.discard(objref)
            self._free_again.notify_all()

    # ---- the threads that read ----

    def _restore(self, index: int, objref: int, is_ahead: bool = False) -> None:
        with self._free_again:
            self._free_again.wait_for(lambda: objref not in self._busy)
            self._busy.add(objref)
        try:
            self._restore_one(index, objref, is_ahead)
        finally:
            self._release(objref)

    def _restore_one(self, index: int, objref: int, is_ahead: bool) -> None:
        try:
            room = spill.begin_restore(self._client, index, objref)
        except ObjectStoreFullError:
            # With fallback memory, to spill another value costs more than to map this file.
            if spill.falls_back(self._client):
                self._fetch(index, objref)
            elif not is_ahead:
                self._events.put(lambda: self._make_room_for(index, objref))
            return
        if room is None:
            return  # done already, or no longer wanted
        view = memoryview(room)
        traced = trace.begin(self._client, trace.RESTORE, objref, trace.kib(view.nbytes))
        try:
            self._files.read(objref, view)
        except (OSError, ValueError, UnsafeFolderError) as exc:
            sys.stderr.write(f"fastrt: {self._files.path(objref)} cannot be read back: {exc}\n")
            spill.finish_restore(self._client, index, False)
            return
        finally:
            trace.end(self._client, traced)
        kept = self._files.identity(objref) if self._files.may_keep() else None
        spill.finish_restore(self._client, index, True)
        if kept is None:
            self._files.remove(objref)
            return
        with self._free_again:
            self._kept[objref] = kept
            if len(self._kept) > _KEPT_MAX:  # most of them belong to values that are no more
                self._kept = {name: old for name, old in self._kept.items() if self._files.identity(name) == old}

    def _fetch(self, index: int, objref: int) -> None:
        """Have readers find a value in its file, if it is in object storage."""
        try:
            if self._is_stored:
                self._files.fetch(objref, spill.size(self._client, index))
        except (OSError, ValueError, UnsafeFolderError) as exc:
            if self._files.is_stored(objref):  # else it was freed meanwhile
                sys.stderr.write(f"fastrt: {self._files.path(objref)} cannot be read back: {exc}\n")
                self._files.remove(objref)  # its readers raise ObjectLostError

    def _read_ahead(self, index: int, objref: int) -> None:
        with self._free_again:
            if objref in self._busy:
                return
            self._busy.add(objref)
        try:
            self._files.read_ahead(objref, spill.size(self._client, index))
        finally:
            self._release(objref)

    def _make_room_for(self, index: int, objref: int) -> None:
        self._stalled.append((index, objref))
        self._plan.ask(spill.size(self._client, index), time.monotonic())


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
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, job: Callable[[], None]) -> None:
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
                job()
            except FastrtError as exc:
                self._stop(exc)
                return


def _nothing() -> None:
    """A moment without an event."""
