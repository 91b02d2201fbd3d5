"""A mark: 128 bytes beside a log that name its newest record and its newest synced record.

A log alone cannot prove that its end is there: a log cut off between two records looks like a shorter log. The mark is
written after each record and before that record is acknowledged. Both writes are in the kernel by then, so the death of
a process never separates them. Only a loss of power (or a crash of the kernel) can. The mark therefore holds the boot
id of the machine: within one boot, a record that the mark names and the log lacks is damage; after another boot, only a
record below the synced number is.

Another user cannot write these files (the folder has mode 0700), so a CRC against accidental damage is enough.
"""

from __future__ import annotations

import os
import struct
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from fastrt._core.transfer import stream
from fastrt.durable.errors import DamagedStateError, StateDirectoryError, write_failed

_MAGIC = b"frtmark1"
# magic, CRC of the rest, log id, boot id, salt, generation, number, synced, bytes
_LAYOUT = struct.Struct("<8sI4x16s16sQQQQQ")
_BYTES = 128
_OFFSET = 12


@dataclass
class Mark:
    """The fields of a mark.

    Attributes:
        log_id: identity of the log over all its generations; 16 bytes.
        salt: the salt of the log file in use; a frame with another salt is not from this file.
        generation: the generation of the log file in use.
        number: the number of the newest record.
        synced: the newest record that is known to be synced to the disk.
        nbytes: the log file's length up to that record.
        boot_id: the boot in which the mark was written.
    """

    log_id: bytes
    salt: int = 0
    generation: int = 0
    number: int = 0
    synced: int = 0
    nbytes: int = 0
    boot_id: bytes = b""

    def pack(self) -> bytes:
        """The bytes of the file."""
        body = _LAYOUT.pack(
            _MAGIC, 0, self.log_id, self.boot_id, self.salt, self.generation, self.number, self.synced, self.nbytes
        )
        return body[:8] + struct.pack("<I", stream.crc32c(body[_OFFSET:])) + body[_OFFSET:]

    @staticmethod
    def unpack(data: bytes) -> Mark:
        """The mark in the bytes of a file.

        Raises:
            ValueError: the bytes are damaged, or not a mark.
        """
        if len(data) != _BYTES or data[_LAYOUT.size :].strip(b"\0"):
            raise ValueError(f"it has {len(data)} bytes, or bytes behind its {_LAYOUT.size}; a mark has {_BYTES}")
        body = data[: _LAYOUT.size]
        magic, check, log_id, boot_id, salt, generation, number, synced, nbytes = _LAYOUT.unpack(body)
        if magic != _MAGIC:
            raise ValueError("it does not begin like a mark")
        if check != stream.crc32c(body[_OFFSET:]):
            raise ValueError("its checksum is wrong")
        return Mark(log_id, salt, generation, number, synced, nbytes, boot_id)


class MarkFile:
    """The file of one mark, opened for writing. Not thread-safe.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def read(self) -> Mark | None:
        """The mark on disk; None when there is no file.

        Raises:
            DamagedStateError: the file is damaged.
            StateDirectoryError: the file cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateDirectoryError(f"Cannot read {self.path}: {error}.") from error
        try:
            return Mark.unpack(data)
        except ValueError as error:
            raise DamagedStateError(f"{self.path} is damaged: {error}") from error

    def create(self, mark: Mark) -> None:
        """Replace the file, if any, by a mark; it is synced to the disk when this returns.

        Raises:
            StateDirectoryError: the disk is full or failing. The file is unchanged.
        """
        working = self.path.with_suffix(".mark-new")
        fd = -1
        try:
            fd = os.open(working, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.pwrite(fd, mark.pack().ljust(_BYTES, b"\0"), 0)
            os.fsync(fd)
            os.rename(working, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise write_failed(self.path, error) from error
        self.close()
        self._fd = fd

    def resume(self, mark: Mark) -> None:
        """Open the existing file, and overwrite its mark.

        Raises:
            StateDirectoryError: the disk is failing.
        """
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise write_failed(self.path, error) from error
        self.write(mark)

    def write(self, mark: Mark, sync: bool = False) -> None:
        """Overwrite the mark; needs no space on the disk.

        Raises:
            StateDirectoryError: the disk is failing.
        """
        try:
            os.pwrite(self._fd, mark.pack(), 0)
            if sync:
                os.fdatasync(self._fd)
        except OSError as error:
            raise write_failed(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_mark() -> Mark:
    """The mark of a new log."""
    return replace(Mark(uuid.uuid4().bytes), boot_id=boot_id())


def boot_id() -> bytes:
    """Identity of this boot of the machine; random where the kernel has none, which counts as another boot."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return uuid.uuid4().bytes


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
