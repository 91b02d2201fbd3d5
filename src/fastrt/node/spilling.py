"""Spilling without threads: which values go to files and which come back, and the steps of each.

`Spilling` decides, by `SpillPlan`, `victims` and `RestoreAhead`, and changes the states of values in the arena. It has
no thread and never waits. What writes or reads a file is a job: a generator that yields between its steps, where other
processes may come first, and where the daemon may be killed. `Spiller` carries jobs out with threads; the simulator
lets time pass between two steps.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from fastrt._core.memory import arena, trace
from fastrt._core.memory.clients import Client
from fastrt._core.objects import remote, spill
from fastrt._core.tasks import tasks
from fastrt.errors import LockStuck, ObjectStoreFullError
from fastrt.folders import UnsafeFolderError
from fastrt.node import victims
from fastrt.node.restore_ahead import RestoreAhead
from fastrt.node.spill_plan import SpillPlan
from fastrt.shortage import is_short
from fastrt.store.spill_files import Identity, SpillFiles
from fastrt.store.spill_storage import StorageUnreachableError

Job = Callable[[], Iterator[None]]
Event = Callable[[], None]

_LOOK_S = 0.005  # between two looks whether to spill ahead
_AHEAD_LOOK_S = 0.02  # between two looks at the queue, while tasks are in it and values in files
_TASKS_AHEAD = 8
_SWEEP_S = 2.0  # between two looks for objects of values that are no more
_CHOICE_S = 1.0  # the rest of a choice is used for so long: to make one, all entries are read
_KEPT_MAX = 10_000  # files of restored values
_FAILURES = (OSError, ValueError, UnsafeFolderError)


class Spilling:
    """Decides for one node what to spill and to restore.

    `make_room`, `restore` and `look_ahead` may be called on any thread, and jobs run on several. Events go to one
    thread, which gives them to `turn`.

    Args:
        client: the daemon's attachment.
        files: those of the session.
        at_once: values that may be under way to files.
        ahead_share: at most the store's size divided by this is freed ahead.
        post: called with each event.
        write, read: called with each job that writes or reads a file. Both carry out jobs in their order, several at
            once.
        is_stored: whether the values are in object storage.
    """

    def __init__(
        self,
        client: Client,
        files: SpillFiles,
        at_once: int,
        ahead_share: int,
        post: Callable[[Event], None],
        write: Callable[[Job], None],
        read: Callable[[Job], None],
        is_stored: bool = False,
    ) -> None:
        self._client = client
        self._files = files
        self._post, self._write, self._read = post, write, read
        self._is_stored, self._swept_at = is_stored, time.monotonic()
        spill.end_round(client, 0)  # who waits for a daemon that died asks again: its request died, too
        store_bytes = arena.room(client)[2]
        self._plan = SpillPlan(store_bytes, at_once, ahead_share)
        self._ahead = RestoreAhead(store_bytes)
        self._looked_at = float("-inf")
        self._watches_queue = False  # only `turn` sets this to False
        self._victims: Iterator[victims.Candidate] = iter(())
        self._chosen_for, self._chosen_at = 0, float("-inf")
        self._found = (0, 0)  # bytes wanted and bytes in use at the last choice that had nothing to do
        self._stalled: list[tuple[int, int]] = []  # restores that wait for the end of a round
        self._kept: dict[int, Identity] = {}  # files of values that are in memory again
        # Values whose files are being written, read or removed, and the restores that wait for the end of that.
        self._busy: dict[int, list[Job]] = {}
        self._lock = threading.Lock()  # protects `_busy` and `_kept`

    def make_room(self, nbytes: int) -> None:
        """Free at least `nbytes` of memory if possible; the end of the round wakes all clients that wait for it."""
        self._post(lambda: self._plan.ask(nbytes, time.monotonic()))

    def restore(self, index: int, objref: int) -> None:
        """Read a spilled value back, and wake the processes that wait for it."""
        self._read(partial(self._restore, index, objref))

    def look_ahead(self) -> None:
        """Watch the queue while tasks are in it; a call costs next to nothing if there are no spilled values."""
        if self._is_stored and time.monotonic() - self._swept_at > _SWEEP_S:
            self._swept_at = time.monotonic()
            self._read(self._sweep)
        if not self._watches_queue and self._has_work_ahead():
            self._post(self._watch_queue)

    # ---- decisions ----

    @property
    def patience_s(self) -> float | None:
        """How long to wait for the next event before a turn without one; None: without limit."""
        if self._plan.is_pressed(time.monotonic()):
            return _LOOK_S
        return _AHEAD_LOOK_S if self._watches_queue else None

    def turn(self, event: Event) -> None:
        """Handle an event, and begin the work that is due."""
        event()
        self._advance()
        if self._watches_queue:
            self._restore_ahead()

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
                self._read(partial(self._restore, step.entry, step.objref, True))
            else:
                self._read(partial(self._read_ahead, step.entry, step.objref))

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
            with self._lock:
                if objref in self._busy:
                    continue
                data = spill.begin(self._client, index, objref)
                if data is None:
                    continue
                self._busy[objref] = []
            self._plan.begun(value.nbytes)
            self._write(partial(self._spill, value, data))
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

    # ---- values whose files are in use ----

    def _takes(self, objref: int, job: Job | None = None) -> bool:
        """Take a value's file; return False if another job has it, after which `job` comes."""
        with self._lock:
            if objref in self._busy:
                if job is not None:
                    self._busy[objref].append(job)
                return False
            self._busy[objref] = []
            return True

    def _release(self, objref: int) -> None:
        with self._lock:
            waiting = self._busy.pop(objref)
        for job in waiting:
            self._read(job)

    # ---- jobs that write ----

    def _spill(self, value: victims.Candidate, data: spill.Bytes) -> Iterator[None]:
        """Write a value's file, free its memory, and report it."""
        freed, trouble = 0, ""
        try:
            try:
                is_new = not self._has_file(value.objref)
                if is_new:
                    yield
                    with memoryview(data) as view:
                        self._write_file(value.objref, view)
                yield
            except _FAILURES as exc:
                spill.give_up(self._client, data)
                trouble = str(exc)
            else:
                try:
                    freed = spill.commit(self._client, data, is_new)
                except LockStuck as exc:  # by a stopped process: the value stays in memory
                    trouble = str(exc)
        finally:
            self._release(value.objref)
        self._post(lambda: self._plan.ended(value.nbytes, freed, trouble, time.monotonic()))

    def _has_file(self, objref: int) -> bool:
        """Whether the file of an earlier time is still there."""
        with self._lock:
            kept = self._kept.pop(objref, None)
        return kept is not None and self._files.identity(objref) == kept

    def _write_file(self, objref: int, data: memoryview) -> None:
        traced = trace.begin(self._client, trace.SPILL, objref, trace.kib(len(data)))
        try:
            self._files.write(objref, data)
        finally:
            trace.end(self._client, traced)

    # ---- jobs that read ----

    def _restore(self, index: int, objref: int, is_ahead: bool = False) -> Iterator[None]:
        if not self._takes(objref, partial(self._restore, index, objref, is_ahead)):
            return
        try:
            yield from self._restore_one(index, objref, is_ahead)
        finally:
            self._release(objref)

    def _restore_one(self, index: int, objref: int, is_ahead: bool) -> Iterator[None]:
        try:
            room = spill.begin_restore(self._client, index, objref)
        except ObjectStoreFullError:
            # With fallback memory, to spill another value costs more than to map this file.
            if spill.falls_back(self._client):
                self._fetch(index, objref)
            elif not is_ahead:
                self._post(lambda: self._make_room_for(index, objref))
            return
        if room is None:
            return  # done already, or no longer wanted
        view = memoryview(room)
        traced = trace.begin(self._client, trace.RESTORE, objref, trace.kib(view.nbytes))
        try:
            yield
            self._files.read(objref, view)
        except _FAILURES as exc:
            del room, view
            if self._is_sound(objref, exc):
                spill.cancel_restore(self._client, index)
            else:
                spill.finish_restore(self._client, index, False)
            return
        finally:
            trace.end(self._client, traced)
        kept = self._files.identity(objref) if self._files.may_keep() else None
        yield
        spill.finish_restore(self._client, index, True)
        if kept is None:
            yield
            self._files.remove(objref)
            return
        with self._lock:
            self._kept[objref] = kept
            if len(self._kept) > _KEPT_MAX:  # most of them belong to values that are no more
                self._kept = {name: old for name, old in self._kept.items() if self._files.identity(name) == old}

    def _fetch(self, index: int, objref: int) -> None:
        """Have readers find a value in its file, if it is in object storage."""
        try:
            if self._is_stored:
                self._files.fetch(objref, spill.size(self._client, index))
        except _FAILURES as exc:
            # If it is not stored, it was freed meanwhile.
            if self._files.is_stored(objref) and not self._is_sound(objref, exc):
                self._files.remove(objref)  # its readers raise ObjectLostError

    def _is_sound(self, objref: int, error: Exception) -> bool:
        """Return whether a value whose file could not be read may be read later; if not by this process, say why."""
        if is_short(error):
            return True
        sys.stderr.write(f"fastrt: {self._files.path(objref)} cannot be read back: {error}\n")
        return isinstance(error, StorageUnreachableError)

    def _read_ahead(self, index: int, objref: int) -> Iterator[None]:
        if not self._takes(objref):
            return
        try:
            yield
            self._files.read_ahead(objref, spill.size(self._client, index))
        finally:
            self._release(objref)

    def _sweep(self) -> Iterator[None]:
        yield
        self._files.sweep_storage()

    def _make_room_for(self, index: int, objref: int) -> None:
        self._stalled.append((index, objref))
        self._plan.ask(spill.size(self._client, index), time.monotonic())
