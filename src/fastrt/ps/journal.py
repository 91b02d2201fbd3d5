"""A server's journal: a log of the changes that it received, and snapshots that replace the log.

A record is a head with a checksum, JSON and bytes. A change is appended before it is applied, and acknowledged after
that. So every acknowledged change is in the log, and a restarted server repeats it with the same result. There are two
places for snapshots and one for the log. Generation g is a snapshot in place g % 2, whose last record marks it as
complete, and the log that follows it. The log is written from its start again, over the previous generation's log,
which is not needed once the snapshot is complete. Nothing is ever renamed or truncated, so the server may be killed at
any instruction: records of another generation, or with a wrong checksum, end the log. Each checksum continues the one
of the record before it, so an old record behind the end of the log is never taken for its continuation.

Files in a folder have a mark beside them (`fastrt.durable.mark`) with the generation and the number of records in the
log. A start that finds less than the mark names raises an error. Memory that another process keeps needs no mark.

The log's pages are reused because fresh pages are expensive: appending 64 MiB to new pages, of memory or of a file,
took 220 to 300 ms on a virtual machine, and 9 to 12 ms on existing pages.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastrt._core.transfer import stream
from fastrt.durable import DamagedStateError, DiskFullError, Mark, MarkFile, StateDirectoryError
from fastrt.durable.lock import take_lock
from fastrt.durable.mark import boot_id, new_mark, sync_folder
from fastrt.folders import UnsafeFolderError, open_private, private_folder
from fastrt.foreign_text import STATE_BYTES_MAX, read_object

_log = logging.getLogger(__name__)

Record = tuple[dict[str, Any], memoryview]
Written = tuple[dict[str, Any], Sequence[Any]]

_HEAD = struct.Struct("<4sIQIxxxxQ")  # magic, checksum of the rest, generation, bytes of the JSON, bytes of the data
_MAGIC = b"frpj"
_WRITE_BYTES = 16 << 20
_LOG_BYTES_MIN = 64 << 20
_LOCK_S = 20.0  # a predecessor that was asked to end may have to finish its work first
_FDS = ("log", "snapshot-0", "snapshot-1")


class Medium(Protocol):
    """Storage of the three files."""

    def open(self, name: str) -> int:
        """Open log, snapshot-0 or snapshot-1, and return the descriptor."""

    @property
    def folder(self) -> Path | None:
        """The folder of the files; None for memory."""


class MemoryMedium:
    """Anonymous memory that another process keeps alive: the contents outlive this process.

    Args:
        fds: descriptors of the three files.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = dict(zip(_FDS, fds, strict=True))

    @staticmethod
    def make() -> list[int]:
        """Create the three files, empty."""
        return [os.memfd_create(f"fastrt-ps-{name}", os.MFD_CLOEXEC) for name in _FDS]

    def open(self, name: str) -> int:
        """Return the descriptor of a file."""
        return self._fds[name]

    @property
    def folder(self) -> None:
        """None: the memory has no folder."""
        return None


class FolderMedium:
    """Files in a folder.

    Args:
        folder: created with mode 0700 if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self._folder

    def open(self, name: str) -> int:
        """Open a file, and lock the folder when it is the log.

        Raises:
            StateDirectoryError: it cannot be used, or another process uses it, perhaps on another node.
        """
        try:
            private_folder(self._folder, "the folder of a server's state")
            is_new = not (self._folder / name).exists()
            fd = open_private(self._folder, name, os.O_RDWR | os.O_CREAT)
            if is_new:  # the name must be durable before the contents are
                sync_folder(self._folder)
                sync_folder(self._folder.parent)
        except (OSError, UnsafeFolderError) as error:
            raise StateDirectoryError(f"Cannot use {self._folder / name}: {error}.") from error
        try:
            if name == "log":
                _lock(fd, self._folder)
        except BaseException:
            os.close(fd)
            raise
        return fd


class Journal:
    """One server's log and snapshots. Not thread-safe.

    Args:
        medium: storage of the files; None keeps nothing.
        power: every record survives a loss of power (one fdatasync per record).
        accept_loss: continue with the intact part of damaged files, and keep the damaged ones aside.
        expected: the files existed before, so a folder without them is damaged.

    Attributes:
        generation: number of snapshots so far.
        log_bytes: length of the log.
        losses: descriptions of lost records: damage that `accept_loss` accepted, or a tail that a loss of power took.

    Raises:
        StateDirectoryError: a file cannot be opened.
    """

    def __init__(
        self, medium: Medium | None, power: bool = False, accept_loss: bool = False, expected: bool = False
    ) -> None:
        self._folder = medium.folder if medium is not None else None
        self._there = (self._folder is not None and [name for name in _FDS if (self._folder / name).exists()]) or []
        self._files = {name: medium.open(name) for name in _FDS} if medium is not None else {}
        self._power = power
        self._accept_loss = accept_loss
        self._expected = expected
        self._mark_file: MarkFile | None = None
        self._mark = new_mark()
        self.generation = 0
        self.log_bytes = 0
        self.losses: list[str] = []
        # Checksums of each file start from the folder's name, so that a file of another folder does not fit.
        self._seed = stream.crc32c(self._folder.name.encode()) if self._folder is not None else 0
        self._check = self._seed  # checksum of the log's last record
        self._count = 0  # number of records in the log

    def recover(self) -> Iterator[Record]:
        """Yield the records of the newest complete snapshot, then those of its log. Appending continues behind them.

        Raises:
            DamagedStateError: files are damaged and `accept_loss` was not given; names them and the lost records.
        """
        if not self._files:
            return
        mark, damages = self._read_mark()
        newest = max((self._whole(place) for place in (0, 1)), default=0)
        if mark is not None and newest < mark.generation:
            damages.append(
                f"{self._name(mark.generation)} is damaged or missing: it held the newest snapshot, which the log "
                f"continues. {'The snapshot before it can be saved' if newest else 'No snapshot can be saved'}"
            )
        self._refuse(damages)
        if newest:
            yield from (
                record
                for record in read(self._files[f"snapshot-{newest % 2}"], newest, self._seed)
                if "end" not in record[0]
            )
        self.generation = newest
        for meta, data in read(self._files["log"], newest, self._seed):
            yield meta, data
            self.log_bytes += _size(meta["json_bytes"], data.nbytes)
            self._check = meta["check"]
            self._count += 1
        if mark is not None and mark.generation == newest and self._count < mark.number:
            words = (
                f"{self._name(None)} ends (or is damaged) at byte {self.log_bytes} of {mark.nbytes}: records "
                f"{self._count + 1} to {mark.number} are lost; {self._count} records can be saved"
            )
            if mark.boot_id == boot_id() or self._count < mark.synced:
                self._refuse([words])
            else:
                words += ". The machine has lost power or crashed since, which durability 'process' does not cover"
                self.losses.append(words)
                _log.warning("%s", words)
        self._begin_mark(mark)

    def _read_mark(self) -> tuple[Mark | None, list[str]]:
        """Return the mark beside the files, and descriptions of damage."""
        if self._folder is None:
            return None, []
        self._mark_file = MarkFile(self._folder / "mark")
        try:
            mark = self._mark_file.read()
        except DamagedStateError as error:
            return None, [str(error)]
        if mark is not None and mark.salt != self._seed:
            return None, [f"{self._mark_file.path} belongs to another folder"]
        missing = [name for name in _FDS if name not in self._there]
        if mark is not None and missing:
            return mark, [f"{', '.join(str(self._folder / name) for name in missing)} is missing"]
        empty = all(not os.pread(fd, _HEAD.size, 0).strip(b"\0") for fd in self._files.values())
        if mark is None and (self._expected or not empty):
            return None, [f"{self._mark_file.path} is missing"]
        return mark, []

    def _begin_mark(self, found: Mark | None) -> None:
        """Bring the mark up to date with the files."""
        if self._mark_file is None:
            return
        if found is not None:
            self._mark = found
        self._mark.salt = self._seed
        self._mark.generation, self._mark.number, self._mark.nbytes = self.generation, self._count, self.log_bytes
        self._mark.synced, self._mark.boot_id = min(self._mark.synced, self._count), boot_id()
        if found is None or self.losses:
            self._mark_file.create(self._mark)
        else:
            self._mark_file.resume(self._mark)

    def _refuse(self, damages: list[str]) -> None:
        """Raise, or keep the damaged files aside and continue.

        Raises:
            DamagedStateError: there are damages, and they are not accepted.
        """
        if not damages:
            return
        words = f"The journal of a parameter server in {self._folder} is damaged. {'; '.join(damages)}."
        if not self._accept_loss:
            raise DamagedStateError(
                f"{words} Put the files back from a copy, restore a checkpoint into another folder, or continue with "
                "what can be saved by accept_loss=True, which keeps the damaged files aside."
            )
        assert self._folder is not None
        if not self.losses:
            number = 1 + sum(1 for _ in self._folder.glob("damaged-*"))
            aside = self._folder / f"damaged-{number}"
            aside.mkdir(mode=0o700)
            for name in (*_FDS, "mark"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(self._folder / name, aside / name)
        self.losses += damages
        _log.warning("continuing after a loss: %s", words)

    def _name(self, generation: int | None) -> str:
        assert self._folder is not None
        return str(self._folder / ("log" if generation is None else f"snapshot-{generation % 2}"))

    def append(self, meta: dict[str, Any], parts: Sequence[Any]) -> None:
        """Append a record; when this returns, it survives this process, and with `power` the machine.

        Raises:
            StateDirectoryError: the disk is full or failing. The record is not kept.
        """
        if not self._files:
            return
        fd = self._files["log"]
        size, check = write(fd, self.log_bytes, self.generation, meta, parts, self._check)
        if self._power:
            try:
                os.fdatasync(fd)
            except OSError as error:  # the next record overwrites this one
                raise StateDirectoryError(f"Cannot keep {size} bytes: {error}.") from error
        if self._mark_file is not None:
            mark = self._mark
            mark.number, mark.nbytes = self._count + 1, self.log_bytes + size
            mark.synced = mark.number if self._power else mark.synced
            self._mark_file.write(mark)
        self.log_bytes += size
        self._check = check
        self._count += 1

    def is_long(self, state_bytes: int) -> bool:
        """Whether a snapshot is due. With this limit the bytes of pushes are written twice in the long run."""
        return self.log_bytes > max(_LOG_BYTES_MIN, state_bytes)

    def snapshot(self, records: Iterable[Written]) -> None:
        """Begin the next generation with these records and an empty log.

        Raises:
            StateDirectoryError: the disk is full or failing. The current generation continues.
        """
        if not self._files:
            return
        following = self.generation + 1
        fd = self._files[f"snapshot-{following % 2}"]
        try:
            write_all(fd, following, records, self._power, self._seed)
        except StateDirectoryError:
            with contextlib.suppress(OSError):
                os.pwrite(fd, bytes(_HEAD.size), 0)  # the snapshot may be complete, but the old log continues
            raise
        if self._mark_file is not None:
            mark = self._mark
            mark.generation, mark.number, mark.nbytes, mark.synced = following, 0, 0, 0
            self._mark_file.write(mark, self._power)
        self.generation, self.log_bytes, self._check, self._count = following, 0, self._seed, 0

    def close(self) -> None:
        """Close the files."""
        if self._mark_file is not None:
            self._mark_file.close()
            self._mark_file = None
        for fd in self._files.values():
            os.close(fd)
        self._files = {}

    def _whole(self, place: int) -> int:
        """The generation of a snapshot that is whole, or 0."""
        fd = self._files[f"snapshot-{place}"]
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return 0
        generation: int = _HEAD.unpack(head)[2]
        is_whole = generation % 2 == place and any("end" in meta for meta, _ in read(fd, generation, self._seed))
        return generation if is_whole else 0


def _lock(fd: int, folder: Path) -> None:
    """Lock a log for this process until the descriptor is closed.

    Raises:
        StateDirectoryError: another process holds the lock, and does not end.
    """
    try:
        is_ours = take_lock(fd, _LOCK_S)
    except OSError:  # a file system without locks
        return
    if not is_ours:
        raise StateDirectoryError(f"{folder} is in use by another server, which does not end.")


def write_all(fd: int, generation: int, records: Iterable[Written], sync: bool, seed: int = 0) -> int:
    """Write records from the start of a file, and a last one that marks them as complete.

    Args:
        fd: the file.
        generation: goes into each record.
        records: JSON and bytes of each.
        sync: write them to the disk (fsync).
        seed: the checksum that the first one continues.

    Returns:
        The checksum of the last record, which covers all.
    Raises:
        StateDirectoryError: the disk is full or failing.
    """
    at = count = 0
    check = seed
    for meta, parts in records:
        size, check = write(fd, at, generation, meta, parts, check)
        at += size
        count += 1
    check = write(fd, at, generation, {"end": count}, (), check)[1]
    if sync:
        try:
            os.fsync(fd)
        except OSError as error:
            raise StateDirectoryError(f"Cannot keep a snapshot: {error}.") from error
    return check


def write(fd: int, at: int, generation: int, meta: dict[str, Any], parts: Sequence[Any], check: int) -> tuple[int, int]:
    """Write one record and return its size and checksum; `check` is the checksum of the record before it.

    Raises:
        StateDirectoryError: the disk is full or failing.
    """
    body = json.dumps(meta).encode()
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    nbytes = sum(view.nbytes for view in views)
    check = stream.crc32c(struct.pack("<QIQ", generation, len(body), nbytes) + body, check)
    for view in views:
        check = stream.crc32c(view, check)
    size = 0
    # The head is written last: an incomplete record has none.
    try:
        for view in (memoryview(body), *views):
            for k in range(0, view.nbytes, _WRITE_BYTES):
                piece = view[k : k + _WRITE_BYTES]
                while piece.nbytes:
                    written = os.pwrite(fd, piece, at + _HEAD.size + size)
                    size += written
                    piece = piece[written:]
        os.pwrite(fd, _HEAD.pack(_MAGIC, check, generation, len(body), nbytes), at)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"The disk is full: cannot keep {nbytes} bytes ({error}). Free some space.") from error
        raise StateDirectoryError(f"Cannot keep {nbytes} bytes: {error}. Check the disk.") from error
    return _size(len(body), nbytes), check


def read(fd: int, generation: int, seed: int = 0) -> Iterator[Record]:
    """Yield the intact records of a generation from the start of a file; `seed` as in `write_all`."""
    at, end, before = 0, os.fstat(fd).st_size, seed
    while True:
        head = os.pread(fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return
        magic, check, found, meta_bytes, data_bytes = _HEAD.unpack(head)
        if magic != _MAGIC or found != generation or at + _size(meta_bytes, data_bytes) > end:
            return
        # The data gets its own buffer, so that arrays made of it are aligned to their items' size.
        body = _read_exactly(fd, at + _HEAD.size, meta_bytes)
        data = _read_exactly(fd, at + _HEAD.size + meta_bytes, data_bytes)
        sizes = struct.pack("<QIQ", found, meta_bytes, data_bytes)
        if stream.crc32c(data, stream.crc32c(body, stream.crc32c(sizes, before))) != check:
            return
        before = check
        said = read_object(body, "a record of the log", bytes_max=STATE_BYTES_MAX, own=True)
        yield {**said, "json_bytes": meta_bytes, "check": check}, data
        at += _size(meta_bytes, data_bytes)


def _read_exactly(fd: int, at: int, nbytes: int) -> memoryview:
    """Read this many bytes of a file that has them."""
    whole = memoryview(bytearray(nbytes))
    done = 0
    while done < nbytes:
        got = os.preadv(fd, [whole[done : done + _WRITE_BYTES]], at + done)
        if got == 0:
            break  # the file has become shorter: the checksum will not match
        done += got
    return whole


def _size(meta_bytes: int, data_bytes: int) -> int:
    return _HEAD.size + meta_bytes + data_bytes
