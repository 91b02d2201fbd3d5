"""Fallback memory: values in files that this process writes because the store has no room, or maps to read them.

A value that is only in a file is a spilled one (`_core.objects.mapped`). Each reader maps the file. The third read has
the daemon restore the value if there is room, because each reader authenticates the file, and memory is shared. Earlier
it does not pay: most values are read once, and a restored value may have to be written again.
"""

from __future__ import annotations

import errno
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastrt._core.memory.clients import Client
from fastrt._core.objects import mapped, spill
from fastrt._core.objects.mapped import FileFill, FileWriter, MappedPin
from fastrt.errors import ObjectLostError
from fastrt.folders import UnsafeFolderError
from fastrt.shortage import is_short
from fastrt.store import room
from fastrt.store.messages import Restore
from fastrt.store.ref import ObjectRef
from fastrt.store.spill_files import SpillFiles, StoredElsewhereError

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.serialize import Serialized

_File = TypeVar("_File", FileWriter, FileFill)
_ATTEMPTS = 4  # to read a file that the daemon may be removing or writing
_LOOK_S = 0.02  # until the first look whether the daemon restores a value
_STORED_S = 1.0  # until the second request for a value in object storage; twice as long until each further one
_SHORT_S = 1.0  # the same, where this process cannot open the file


class FileValues:
    """Values in files, for one process.

    Args:
        store: its attachment. The daemon's socket, which lies in the session's folder, must be known.
    """

    def __init__(self, store: Store) -> None:
        self._store = weakref.proxy(store)
        self._files: SpillFiles | None = None
        self._mapped: weakref.WeakValueDictionary[int, MappedPin] = weakref.WeakValueDictionary()

    @property
    def falls_back(self) -> bool:
        """Whether this process may write values that find no room to files, and map files."""
        return bool(self._store.socket_path) and spill.falls_back(self._store.client)

    def can_map(self, ref: ObjectRef) -> bool:
        """Whether the value is only in a file, which this process may map."""
        return self.falls_back and mapped.look(self._store.client, ref) is not None

    def create(self, nbytes: int, kind: int, nrefs: int) -> FileWriter:
        """Create the file of a new value.

        Raises:
            OSError: the disk is full, or fails.
            UnsafeFolderError: another user can change the folder.
            MemoryError: this process has no mapping left, or the store has no room for the references.
        """
        return self._open(mapped.create(self._store.client, nbytes, kind, nrefs))

    def result(self, task: int, index: int, nbytes: int, kind: int, nrefs: int) -> FileWriter | None:
        """Create the file of a task's result; None when it is sealed already.

        Raises:
            OSError, UnsafeFolderError, MemoryError: as for `create`.
        """
        writer = mapped.result(self._store.client, task, index, nbytes, kind, nrefs)
        return None if writer is None else self._open(writer)

    def fetch(self, ref: ObjectRef) -> FileFill | None:
        """Create the file of a remote value; None when its bytes are here, or another process fetches them.

        Raises:
            OSError, UnsafeFolderError, MemoryError: as for `create`.
        """
        fill = mapped.fetch(self._store.client, ref)
        return None if fill is None else self._open(fill)

    def replace(self, ref: ObjectRef, nbytes: int, kind: int) -> FileFill | None:
        """Create a file for another value of a remote object whose source is lost; None when there is a copy here.

        Raises:
            OSError, UnsafeFolderError, MemoryError: as for `create`.
        """
        fill = mapped.replace(self._store.client, ref, nbytes, kind)
        return None if fill is None else self._open(fill)

    def put(self, parts: Serialized) -> ObjectRef:
        """Write a serialized value to a file.

        Raises:
            OSError, UnsafeFolderError, MemoryError: as for `create`.
        """
        writer = self.create(parts.nbytes, parts.kind, len(parts.refs))
        parts.write(writer)
        ref: ObjectRef = writer.seal(parts.refs)
        return ref

    def read(self, ref: ObjectRef, raw: bool, at_once: bool) -> tuple[int, bool, Any] | None:
        """Return the stored form of a value that is only in a file; None if its bytes are in memory by now.

        Args:
            ref, raw: as for `Store.read`.
            at_once: map the file without asking the daemon to restore the value.
        Raises:
            ObjectLostError: the file is gone or damaged.
            OSError: this process can open no file; the daemon cannot restore the value or, with `at_once`, is not
                asked to. With `at_once` also: the bytes are in object storage.
        """
        client, why = self._store.client, ""
        short: BaseException | None = None
        for _ in range(_ATTEMPTS):
            about = mapped.look(client, ref)
            if about is None:
                return None
            kind, is_error, nbytes, pays = about
            if pays and not (why or at_once) and self._is_restored(ref):
                return None
            data: MappedPin | bytearray | None = self._mapped.get(ref.objref)
            if data is None:
                try:
                    data = self._opened().map(ref.objref, nbytes)
                except StoredElsewhereError as exc:
                    why = str(exc)
                    if at_once:
                        short = BlockingIOError(errno.EAGAIN, why)
                        break
                    if not self._await_stored(ref):
                        why = "its bytes are in object storage, which does not answer"
                        break
                    continue
                except (OSError, UnsafeFolderError, ValueError) as exc:
                    why = str(exc)  # the daemon may have restored the value at this moment, and even spilled it again
                    if is_short(exc):
                        short = exc
                        if at_once:
                            break
                        if self._is_restored(ref, _SHORT_S):
                            return None
                    time.sleep(_LOOK_S)
                    continue
                if isinstance(data, MappedPin):
                    self._mapped[ref.objref] = data
            return mapped.decode(client, ref, kind, is_error, data, raw)
        try:
            raise short or lost(client, ref, why)
        finally:
            del short  # its traceback refers to this frame: the cycle would keep the reference

    def _await_stored(self, ref: ObjectRef) -> bool:
        """Have the daemon fetch a value from object storage, into memory or its file; return False if it stays there.

        The daemon is asked again and again: the storage may not have answered.
        """
        client, began, pause_s = self._store.client, time.monotonic(), _STORED_S
        ask_at = began
        while time.monotonic() - began < room.SPILL_PATIENCE_S:
            if time.monotonic() >= ask_at:
                if not self._store.asks(Restore(ref.index, ref.objref)):
                    return False
                ask_at, pause_s = time.monotonic() + pause_s, 2 * pause_s
            if spill.wait_restored(client, ref, _LOOK_S):
                return True
            if not (mapped.is_restoring(client, ref) or self._opened().is_stored(ref.objref)):
                return True
        return False

    def _is_restored(self, ref: ObjectRef, least_s: float = 0.0) -> bool:
        """Ask the daemon to restore a value, and wait as long as it does, for `least_s` at least."""
        client, began = self._store.client, time.monotonic()
        if not self._store.asks(Restore(ref.index, ref.objref)):
            return False
        while not spill.wait_restored(client, ref, _LOOK_S):
            waited_s = time.monotonic() - began
            if waited_s > room.SPILL_PATIENCE_S or (waited_s > least_s and not mapped.is_restoring(client, ref)):
                return False
        return True

    def _opened(self) -> SpillFiles:
        if self._files is None:
            self._files = SpillFiles(Path(spill.directory(self._store.client)), Path(self._store.socket_path).parent)
        return self._files

    def _open(self, writer: _File) -> _File:
        self._opened().open_writer(writer)
        room.warn_of_file(self._store, len(writer))
        return writer


def lost(client: Client, ref: ObjectRef, why: str = "") -> ObjectLostError:
    """Make the error for a value whose file is gone or damaged."""
    why = why or "its file is missing, damaged or unreadable; the node daemon's error output says which"
    return ObjectLostError(f"the value of {ref!r} is in {spill.directory(client)} and cannot be read back: {why}")
