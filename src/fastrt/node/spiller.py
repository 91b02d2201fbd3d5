"""Spilling: values that have not been used for long go to files, and are restored when they are read. See `victims`.

A thread does the work, so that no disk holds up the daemon, and only on request: a client that finds the store full
asks for room, a client that reads a spilled value asks for the value. Copies of values that other nodes keep are
dropped before others are spilled. A file is removed when its value is back in
memory or no longer referenced; `spill_files` protects its contents.
"""

from __future__ import annotations

import queue
import sys
import threading
from pathlib import Path

from fastrt._core.memory import arena, trace
from fastrt._core.memory.clients import Client
from fastrt._core.objects import remote, spill
from fastrt.errors import FastrtError, ObjectStoreFullError
from fastrt.folders import UnsafeFolderError
from fastrt.node import victims
from fastrt.store.spill_files import SpillFiles


class Spiller:
    """Spills and restores for one node.

    Args:
        client: the daemon's attachment.
        directory: for this session's files; made when it is needed, removed by `close`.
        key_folder: a private folder of the session.
        falls_back: whether a value that finds no room stays in its file, which its readers map.
    """

    def __init__(self, client: Client, directory: Path, key_folder: Path, falls_back: bool) -> None:
        self._client = client
        self._files = SpillFiles(directory, key_folder)
        self._files.make_key()
        self._orders: queue.SimpleQueue[tuple[str, int, int] | None] = queue.SimpleQueue()
        self._found = (0, 0)  # bytes wanted and bytes in use at the last round that had nothing to do
        spill.configure(client, str(directory), falls_back)
        self._thread = threading.Thread(target=self._run, name="fastrt-spiller", daemon=True)
        self._thread.start()

    def make_room(self, nbytes: int) -> None:
        """Free at least `nbytes` of memory if possible; the end of the round wakes all clients that wait for it."""
        self._orders.put(("room", nbytes, 0))

    def restore(self, index: int, objref: int) -> None:
        """Read a spilled value back, and wake the processes that wait for it."""
        self._orders.put(("restore", index, objref))

    def close(self) -> None:
        """End the thread after its current order, and remove all files."""
        self._orders.put(None)
        self._thread.join()
        self._files.remove_all()

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            if order is None:
                return
            what, first, second = order
            try:
                if what == "room":
                    self._spill(first)
                else:
                    self._restore(first, second)
            except FastrtError as exc:  # the arena is closed or poisoned, which its clients notice themselves
                sys.stderr.write(f"fastrt: spilling stopped: {exc}\n")
                return

    def _spill(self, wanted: int) -> int:
        """One round: spill values so that `wanted` bytes are free in one piece, if that is possible."""
        trouble = ""
        chosen, freed = self._choose(wanted)
        for *_, index, objref in chosen:
            copy = remote.drop_copy(self._client, index, objref)
            if copy:
                freed += copy
                continue
            data = spill.begin(self._client, index, objref)
            if data is None:
                continue
            try:
                self._write(objref, memoryview(data))
            except (OSError, UnsafeFolderError) as exc:
                spill.give_up(self._client, index)
                trouble = str(exc)
                break
            finally:
                del data
            freed += spill.commit(self._client, index)
        spill.end_round(self._client, freed, trouble)
        return freed

    def _choose(self, wanted: int) -> tuple[list[victims.Candidate], int]:
        """Choose the values to spill; return them, and the bytes that are free in one piece already.

        Those are for another client that waits for room, or were freed after the order. They are reported once: a
        client that asks again while the bytes in use are the same could not use them.
        """
        used, _, store_bytes = arena.room(self._client)
        chosen = victims.choose(spill.candidates(self._client), spill.free_runs(self._client), wanted, store_bytes)
        if chosen:
            return chosen, 0
        before, self._found = self._found, (wanted, used)
        return [], max(wanted, 1) if chosen is not None and before != self._found else 0

    def _restore(self, index: int, objref: int) -> None:
        try:
            room = spill.begin_restore(self._client, index, objref)
        except ObjectStoreFullError:
            if spill.falls_back(self._client):
                return  # spilling another value for this one would cost more than to map its file
            if self._spill(spill.size(self._client, index)):
                self._orders.put(("restore", index, objref))
            return
        if room is None:
            return  # done already, or no longer wanted
        traced = trace.begin(self._client, trace.RESTORE, objref, trace.kib(memoryview(room).nbytes))
        try:
            self._files.read(objref, memoryview(room))
        except (OSError, ValueError, UnsafeFolderError) as exc:
            sys.stderr.write(f"fastrt: {self._files.path(objref)} cannot be read back: {exc}\n")
            spill.finish_restore(self._client, index, False)
            return
        finally:
            trace.end(self._client, traced)
        spill.finish_restore(self._client, index, True)
        self._files.remove(objref)

    def _write(self, objref: int, data: memoryview) -> None:
        traced = trace.begin(self._client, trace.SPILL, objref, trace.kib(len(data)))
        try:
            self._files.write(objref, data)
        finally:
            trace.end(self._client, traced)
