"""Records on disk behind a state machine: one frame of a checked log per batch.

A state machine orders `Persist(kind, key, value)`. Its shell collects the records of one batch of events, writes them
here, and only then sends the answers. So everything that a caller was answered is on disk, and one write serves all
callers of the batch.

A write survives the death of every process at any instruction, because the log's pages are in the kernel by then. With
`power=True` it also survives a loss of power, at the price of an fsync per batch.

The newest value of each record is also in memory (the state machine holds the same bytes objects), so a shorter log can
be written without reading a file. When more than half of the log is outdated, the next generation is written beside it,
a piece with each batch, so that no batch waits long.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fastrt.durable.errors import DamagedStateError, DiskFullError, StateDirectoryError
from fastrt.durable.lock import lock_folder
from fastrt.durable.log import CheckedLog, LogFile
from fastrt.durable.mark import MarkFile
from fastrt.folders import UnsafeFolderError, open_private, private_folder

# A log shorter than this is not rewritten.
_LOG_BYTES_MIN = 8 << 20
# Bytes of the next generation that are written with each batch, plus four times the batch.
_PIECE_BYTES = 128 << 10
_WRITES_BYTES_MIN = 16 << 20
_OLD_FORMAT = ("state.sqlite", "writes.sqlite")

_RECORD = struct.Struct("<BII")  # lengths of kind, key and value
_DROPPED = (1 << 32) - 1
_WRITE = struct.Struct("<QI")  # number, length of the key


class Journal:
    """The records of one state machine. Not thread-safe.

    Args:
        directory: the directory of the log; created with mode 0700 when missing.
        power: survive a loss of power too, at the price of an fsync per batch.
        accept_loss: continue with the readable part of damaged files; see `losses`.

    Attributes:
        losses: descriptions of lost records: damage that `accept_loss` accepted, or the end that a loss of power took.

    Raises:
        DamagedStateError: files are damaged, and `accept_loss` is not given.
        StateDirectoryError: another process uses the directory, or it cannot be read or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        power: bool = False,
        accept_loss: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.accept_loss = accept_loss
        self._log: CheckedLog
        self._live: dict[str, dict[str, bytes]] = {}
        self._live_bytes = 0
        self._next: LogFile | None = None
        self._to_copy: Iterator[tuple[str, str]] = iter(())
        self._shorten_at = _LOG_BYTES_MIN
        try:
            private_folder(self.directory, "a state directory")
            self._lock = open_private(self.directory, "lock", os.O_CREAT | os.O_RDWR)
        except (OSError, UnsafeFolderError) as error:
            raise StateDirectoryError(f"Cannot use the state directory {self.directory}: {error}.") from error
        try:
            lock_folder(self._lock, f"The state directory {self.directory}")
            _refuse_old_format(self.directory)
            self._log = CheckedLog(self.directory, "state", power, accept_loss)
        except BaseException:
            os.close(self._lock)
            raise
        self.losses = self._log.losses
        for payload in self._log.payloads:
            self._load(payload)
        self._log.payloads = []
        self._live_bytes = sum(
            _size(kind, key, value) for kind, named in self._live.items() for key, value in named.items()
        )
        self._plan()

    def records(self) -> Iterator[tuple[str, str, bytes]]:
        """All records: kind, key, value."""
        for kind, named in self._live.items():
            for key, value in named.items():
                yield kind, key, value

    def write(self, records: Mapping[tuple[str, str], bytes | None]) -> None:
        """Write a batch; it is durable when this returns.

        Args:
            records: values by kind and key; None drops a record.

        Raises:
            DiskFullError: there is no room. Nothing of the batch was written.
            StateDirectoryError: the disk is failing. Nothing of the batch was written.
        """
        payload = b"".join([_packed(kind, key, value) for (kind, key), value in records.items()])
        try:
            self._log.append(payload)
        except DiskFullError:
            if not self._shorten_now():
                raise
            self._log.append(payload)
        self._apply((kind, key, value) for (kind, key), value in records.items())
        if self._next is not None:
            self._copy(payload)
        elif self._log.file.end > self._shorten_at:
            self._begin_shorter()

    def has_room(self, nbytes: int) -> bool:
        """Whether records of this size fit, with a reserve left for records that cannot be rejected."""
        return self._log.file.has_room(nbytes) or (self._shorten_now() and self._log.file.has_room(nbytes))

    def close(self) -> None:
        """Close the log and release the directory."""
        self._abandon()
        self._log.close()
        os.close(self._lock)

    def _load(self, payload: bytes) -> None:
        """Load a batch of an earlier process."""
        at, end = 0, len(payload)
        while at < end:
            kind_bytes, key_bytes, value_bytes = _RECORD.unpack_from(payload, at)
            kind_end = at + _RECORD.size + kind_bytes
            at = kind_end + key_bytes
            kind = payload[kind_end - kind_bytes : kind_end].decode()
            key = payload[kind_end:at].decode("utf-8", "surrogateescape")
            if value_bytes == _DROPPED:
                self._live.get(kind, {}).pop(key, None)
            else:
                value = payload[at : at + value_bytes]
                at += value_bytes
                named = self._live.get(kind)
                if named is None:
                    named = self._live[sys.intern(kind)] = {}
                named[key] = value

    def _apply(self, records: Iterable[tuple[str, str, bytes | None]]) -> None:
        for kind, key, value in records:
            named = self._live.setdefault(kind, {})
            old = named.pop(key, None) if value is None else named.get(key)
            if old is not None:
                self._live_bytes -= _size(kind, key, old)
            if value is not None:
                named[key] = value
                self._live_bytes += _size(kind, key, value)

    # A shorter log

    def _plan(self) -> None:
        """Set the length at which the log is rewritten: twice the bytes of its live records."""
        self._shorten_at = max(_LOG_BYTES_MIN, 2 * self._live_bytes)

    def _begin_shorter(self) -> None:
        self._plan()
        if self._log.file.end <= self._shorten_at:
            return
        self._start_copy()

    def _copy(self, payload: bytes) -> None:
        """Write a batch and a piece of the older records to the next generation."""
        assert self._next is not None
        try:
            if payload:
                self._next.append(payload)
            done = self._copy_piece(_PIECE_BYTES + 4 * len(payload))
            if done:
                self._log.switch(self._next)
                self._next = None
                self._plan()
        except StateDirectoryError:
            self._abandon()

    def _copy_piece(self, nbytes: int) -> bool:
        assert self._next is not None
        piece: list[bytes] = []
        size = 0
        for kind, key in self._to_copy:
            value = self._live.get(kind, {}).get(key)
            if value is None:
                continue  # dropped since
            piece.append(_packed(kind, key, value))
            size += len(piece[-1])
            if size >= nbytes:
                self._next.append(b"".join(piece))
                return False
        if piece:
            self._next.append(b"".join(piece))
        return True

    def _shorten_now(self) -> bool:
        """On a full disk: rewrite the log at once if much of it is outdated; returns whether it is shorter now."""
        end = self._log.file.end
        if end < 2 * self._live_bytes + _PIECE_BYTES:
            return False
        if self._next is None and not self._start_copy():
            return False
        while self._next is not None:
            self._copy(b"")
        return bool(self._log.file.end < end)

    def _start_copy(self) -> bool:
        try:
            self._next = self._log.begin()
        except StateDirectoryError:
            self._abandon()
            return False
        self._to_copy = iter([(kind, key) for kind, named in self._live.items() for key in named])
        return True

    def _abandon(self) -> None:
        """Discard the next generation; the log stays in use, and is rewritten when it has grown more."""
        if self._next is not None:
            self._next.discard()
            self._next = None
        self._shorten_at = max(_LOG_BYTES_MIN, self._log.file.end + self._log.file.end // 4)


class WriteLog:
    """Keys that one process has set for another one, which adds them to its records later.

    The writer answers as soon as `append` returns. After the writer's death its successor reads the writes from here
    that are not in the records yet. The log is beside the records of a `Journal`, whose identity it names; one process
    at a time may open it. Not thread-safe.

    Args:
        directory: the journal's directory.
        accept_loss: continue with the readable part of damaged files; see `losses`.

    Attributes:
        losses: descriptions of lost writes, as in `Journal`.

    Raises:
        DamagedStateError: files are damaged, and `accept_loss` is not given.
        StateDirectoryError: the log cannot be read or written.
    """

    def __init__(self, directory: str | os.PathLike[str], accept_loss: bool = False) -> None:
        folder = Path(directory)
        journal = MarkFile(folder / "state.mark").read()
        if journal is None:
            raise StateDirectoryError(f"{folder} holds no records of a service to keep writes for.")
        self._accept_loss = accept_loss
        self._log = CheckedLog(folder, "writes", False, accept_loss, {"journal": journal.log_id.hex()})
        self.losses = self._log.losses
        self._log.payloads = []

    @staticmethod
    def exists(directory: str | os.PathLike[str]) -> bool:
        """Whether a directory holds files of such a log."""
        return any(Path(directory).glob("writes[-.]*"))

    def append(self, number: int, key: str, value: bytes) -> None:
        """Append one write; it survives the death of every process when this returns.

        Raises:
            DiskFullError: there is no room. Nothing was written.
            StateDirectoryError: the disk is failing. Nothing was written.
        """
        name = _blob(key)
        self._log.append(_WRITE.pack(number, len(name)) + name + value)

    def after(self, number: int) -> list[tuple[int, str, bytes]]:
        """The writes with higher numbers, in order: number, key, value.

        Raises:
            DamagedStateError: the log does not continue at that number.
        """
        found = [write for write in map(_unpacked_write, self._log.read_again()) if write[0] > number]
        if not found or [taken for taken, _, _ in found] == list(range(number + 1, number + 1 + len(found))):
            return found
        words = (
            f"{self._log.file.path} continues with {len(found)} writes up to {found[-1][0]}, and the records beside it "
            f"end with write {number}: writes between them are lost, or one of the two logs is from another time"
        )
        if not self._accept_loss:
            raise DamagedStateError(f"{words}. Put the right files back, or continue with --accept-loss.")
        self.losses.append(words)
        return found

    def drop(self) -> None:
        """Drop all writes: they are in the records now.

        Raises:
            StateDirectoryError: the disk is full or failing.
        """
        if self._log.file.end >= _WRITES_BYTES_MIN:  # in a shorter log, `after` skips them
            self._log.switch(self._log.begin())

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _refuse_old_format(directory: Path) -> None:
    for name in _OLD_FORMAT:
        if (directory / name).exists():
            raise StateDirectoryError(
                f"{directory / name} was written by an earlier fastrt, which kept its state in SQLite. Use the fastrt "
                "that wrote it, or another state directory."
            )


def _packed(kind: str, key: str, value: bytes | None) -> bytes:
    head, name = kind.encode(), _blob(key)
    if value is None:
        return _RECORD.pack(len(head), len(name), _DROPPED) + head + name
    return b"".join((_RECORD.pack(len(head), len(name), len(value)), head, name, value))


def _unpacked_write(payload: bytes) -> tuple[int, str, bytes]:
    number, key_bytes = _WRITE.unpack_from(payload)
    end = _WRITE.size + key_bytes
    return number, _text(payload[_WRITE.size : end]), payload[end:]


def _size(kind: str, key: str, value: bytes) -> int:
    """The approximate bytes of a record in the log."""
    return _RECORD.size + len(kind) + len(key) + len(value)


def _blob(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")
