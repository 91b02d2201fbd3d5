"""Memory pressure: values that have not been used for long go to files, and come back when they are read.

Works in a thread of its own, so that no disk ever holds up the daemon, and only on request: a client that finds the
store full asks for room, one that reads a spilled value asks for it. A file is a header (magic, objref, length,
CRC-32 of the bytes) and the bytes; it is removed when its value is back in memory or no longer referenced.
"""

from __future__ import annotations

import os
import queue
import struct
import sys
import threading
import zlib
from pathlib import Path

from fastrt._core import spill, trace
from fastrt._core.clients import Client
from fastrt.errors import FastrtError, ObjectStoreFullError

_HEADER = struct.Struct("<8sQQI4x")
_MAGIC = b"fastrtS1"


class Spiller:
    """Spills and restores for one node.

    Args:
        client: the daemon's attachment.
        directory: of this session; made with mode 0700, removed by `close`.
    """

    def __init__(self, client: Client, directory: Path) -> None:
        self._client = client
        self._dir = directory
        self._orders: queue.SimpleQueue[tuple[str, int, int] | None] = queue.SimpleQueue()
        spill.configure(client, str(directory))
        self._thread = threading.Thread(target=self._run, name="fastrt-spiller", daemon=True)
        self._thread.start()

    def make_room(self, nbytes: int) -> None:
        """Free at least `nbytes` of memory, if that can be done; the end of the round is told to all clients."""
        self._orders.put(("room", nbytes, 0))

    def restore(self, index: int, objref: int) -> None:
        """Bring the bytes of a spilled value back; whoever waits for them is woken."""
        self._orders.put(("restore", index, objref))

    def close(self) -> None:
        """End the thread after the order it works on, and remove all files."""
        self._orders.put(None)
        self._thread.join()
        for path in self._dir.glob("*"):
            path.unlink(missing_ok=True)
        if self._dir.exists():
            self._dir.rmdir()

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
            except FastrtError as exc:  # the arena is closed or poisoned: its clients learn that by themselves
                sys.stderr.write(f"fastrt: spilling stopped: {exc}\n")
                return

    def _spill(self, wanted: int) -> int:
        """One round: least recently used values first, until `wanted` bytes are free or nothing is left."""
        freed, trouble = 0, ""
        for _, _, index, objref in spill.candidates(self._client):
            if freed >= wanted and freed:
                break
            data = spill.begin(self._client, index, objref)
            if data is None:
                continue
            try:
                self._write(objref, data)
            except OSError as exc:
                spill.give_up(self._client, index)
                trouble = str(exc)
                break
            finally:
                del data
            freed += spill.commit(self._client, index)
        spill.end_round(self._client, freed, trouble)
        return freed

    def _restore(self, index: int, objref: int) -> None:
        try:
            room = spill.begin_restore(self._client, index, objref)
        except ObjectStoreFullError:
            if self._spill(spill.size(self._client, index)):
                self._orders.put(("restore", index, objref))
            return
        if room is None:
            return  # done already, or no longer wanted
        path = self._path(objref)
        traced = trace.begin(self._client, trace.RESTORE, objref, trace.kib(memoryview(room).nbytes))
        try:
            self._read(path, objref, memoryview(room))
        except (OSError, ValueError) as exc:
            sys.stderr.write(f"fastrt: {path} cannot be read back: {exc}\n")
            spill.finish_restore(self._client, index, False)
            return
        finally:
            trace.end(self._client, traced)
        spill.finish_restore(self._client, index, True)
        path.unlink(missing_ok=True)

    def _path(self, objref: int) -> Path:
        return self._dir / f"{objref:016x}"

    def _write(self, objref: int, data: spill.Bytes) -> None:
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        view = memoryview(data)
        path = self._path(objref)
        traced = trace.begin(self._client, trace.SPILL, objref, trace.kib(len(view)))
        try:
            with open(path, "wb", buffering=0, opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
                file.write(_HEADER.pack(_MAGIC, objref, len(view), zlib.crc32(view)))
                done = 0
                while done < len(view):
                    done += file.write(view[done:])
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            trace.end(self._client, traced)

    @staticmethod
    def _read(path: Path, objref: int, room: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_HEADER.size)
            if len(head) != _HEADER.size or _HEADER.unpack(head)[:3] != (_MAGIC, objref, len(room)):
                raise ValueError("its header is not that of this value")
            done = 0
            while done < len(room):
                got = file.readinto(room[done:])
                if not got:
                    raise ValueError(f"it ends after {done} of {len(room)} bytes")
                done += got
        if zlib.crc32(room) != _HEADER.unpack(head)[3]:
            raise ValueError("its checksum is wrong")
