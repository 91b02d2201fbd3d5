"""A checked log: ordered payloads on disk, with a proof at the next start that none is missing.

A log NAME consists of `NAME.mark` and one file `NAME-GENERATION.log` of frames:

    u32 magic | u32 CRC-32C of all that follows | u64 salt of the file | u64 number | u32 CRC of the frame before |
    u32 payload length | payload

Frame 0 is the head: JSON with the format and the identity of the log. Numbers count from there without a gap. So a
frame that is flipped, cut, missing, doubled, moved or from another file is detected, by its CRC, its number, the CRC of
its predecessor or its salt. Behind a damaged place the next complete frame is found by its magic and salt.

The mark proves the end of the log (see `mark`). Data behind the frame that it names were never acknowledged and are
dropped: half a frame (the process died in a write), or zeros (space allocated ahead, to detect a full disk in time).

When most of the file is outdated, a new generation is written and synced under another name; the mark then names it.

Models: etcd's WAL (CRCs chained over records, preallocated space, torn tails distinguished from damage), PostgreSQL's
control file (names the newest checkpoint outside of the WAL).
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastrt._core.transfer import stream
from fastrt.durable.errors import DamagedStateError, DiskFullError, StateDirectoryError, write_failed
from fastrt.durable.mark import Mark, MarkFile, boot_id, new_mark, sync_folder
from fastrt.foreign_text import STATE_BYTES_MAX, read_object

_log = logging.getLogger(__name__)

FORMAT = 2  # 1 was SQLite's
_FRAME = struct.Struct("<4sIQQII")
_HEAD = struct.Struct("<QQII")  # the rest of a frame's header, behind its CRC
_MAGIC = b"frLg"
_CHECKED = 8  # offset of the bytes that the CRC covers
_PAYLOAD_BYTES_MAX = (1 << 32) - 1
_ALLOCATED_BYTES = 1 << 20
# Space for records that cannot be rejected, such as those of deadlines and lost members.
_RESERVE_BYTES = 1 << 20


@dataclass
class Scan:
    """The outcome of reading one log file.

    Attributes:
        payloads: the payloads of the complete frames, in order, without the head's.
        number: the number of the newest complete frame, -1 without any.
        end: the offset of that frame's end.
        check: its CRC.
        damages: a description of each damaged place.
        head: the JSON of frame 0; {} when that is damaged.
    """

    payloads: list[bytes] = field(default_factory=list)
    number: int = -1
    end: int = 0
    check: int = 0
    damages: list[str] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)


def scan(data: Any, salt: int) -> Scan:
    """Read all complete frames of a log file.

    Args:
        data: the file's bytes.
        salt: the file's salt.
    """
    found = Scan()
    at = 0
    view = memoryview(data)
    while True:
        frame = _frame_at(view, at, salt)
        if frame is None or frame[0] != found.number + 1 or frame[1] != found.check:
            frame, start = _next_frame(data, view, at, salt, found.number)
            if frame is None:
                break
            found.damages.append(_words(at, start, found.number + 1, frame[0]))
            at = start
        number, _, check, end = frame
        payload = bytes(view[at + _FRAME.size : end])
        if number == 0:
            found.head = read_object(payload, "the first record of a log", bytes_max=STATE_BYTES_MAX, own=True)
        else:
            found.payloads.append(payload)
        found.number, found.check, found.end, at = number, check, end, end
    view.release()
    return found


def _frame_at(view: memoryview, at: int, salt: int) -> tuple[int, int, int, int] | None:
    """The complete frame at an offset: number, CRC of the frame before, CRC, end. None when there is none."""
    if at + _FRAME.size > len(view):
        return None
    magic, check, found_salt, number, before, length = _FRAME.unpack_from(view, at)
    end = at + _FRAME.size + length
    if magic != _MAGIC or found_salt != salt or end > len(view):
        return None
    if stream.crc32c(view[at + _CHECKED : end]) != check:
        return None
    return number, before, check, end


def _next_frame(
    data: Any, view: memoryview, at: int, salt: int, newest: int
) -> tuple[tuple[int, int, int, int] | None, int]:
    """The next complete frame behind a damaged place that is newer than `newest`, and its offset."""
    sought = struct.pack("<Q", salt)
    place = data.find(sought, at + _CHECKED)
    while place >= 0:
        start = place - _CHECKED
        frame = _frame_at(view, start, salt) if start >= at else None
        if frame is not None and frame[0] > newest:
            return frame, start
        place = data.find(sought, place + 1)
    return None, at


def _words(at: int, end: int, expected: int, found: int) -> str:
    place = (
        f"{end - at} bytes at offset {at} are damaged"
        if end > at
        else f"the frame at offset {at} does not continue the one before"
    )
    if found == expected:
        return f"{place}; no record is missing there"
    missing = f"record {expected} is" if found == expected + 1 else f"records {expected} to {found - 1} are"
    return f"{place}; {missing} lost there"


class LogFile:
    """One generation of a log, open for appending. Not thread-safe."""

    def __init__(self, path: Path, fd: int, salt: int) -> None:
        self.path = path
        self.salt = salt
        self.number = -1
        self.end = 0
        self._fd = fd
        self._check = 0
        self._allocated = 0

    @staticmethod
    def create(path: Path, head: dict[str, Any]) -> LogFile:
        """Make a file with its head.

        Raises:
            StateDirectoryError: the disk is full or failing; there is no file then.
        """
        try:
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise write_failed(path, error) from error
        made = LogFile(path, fd, secrets.randbits(64))
        try:
            made.append(json.dumps(head).encode())
        except StateDirectoryError:
            made.discard()
            raise
        return made

    def go_on(self, found: Scan) -> None:
        """Continue behind the frames of a scan; the rest of the file is removed.

        Raises:
            StateDirectoryError: the disk is failing.
        """
        self.number, self.end, self._check = found.number, found.end, found.check
        try:
            os.ftruncate(self._fd, self.end)
        except OSError as error:
            raise write_failed(self.path, error) from error
        self._allocated = self.end
        with contextlib.suppress(DiskFullError):  # the next append or `has_room` reports it
            self._allocate(0)

    def append(self, payload: bytes) -> None:
        """Write one frame; it survives the process when this returns.

        Raises:
            DiskFullError: there is no room; the file is unchanged.
            StateDirectoryError: the disk is failing.
        """
        if len(payload) > _PAYLOAD_BYTES_MAX:
            raise StateDirectoryError(f"A record of {len(payload)} bytes is too long for {self.path}.")
        size = _FRAME.size + len(payload)
        if self.end + size > self._allocated:
            self._allocate(size)
        number = self.number + 1
        head = _HEAD.pack(self.salt, number, self._check, len(payload))
        check = stream.crc32c(payload, stream.crc32c(head))
        self._write(_MAGIC + check.to_bytes(4, "little") + head, payload)
        self.number, self._check = number, check
        self.end += size

    def has_room(self, nbytes: int) -> bool:
        """Whether this many bytes fit and leave the reserve free."""
        wanted = nbytes + _RESERVE_BYTES
        if self.end + wanted > self._allocated:
            try:
                self._allocate(wanted)
            except DiskFullError:
                return False
        return True

    def sync(self) -> None:
        """Sync the file to the disk.

        Raises:
            StateDirectoryError: the disk is failing.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise write_failed(self.path, error) from error

    def trim(self) -> None:
        """Release the space that was allocated ahead."""
        os.ftruncate(self._fd, self.end)
        self._allocated = self.end

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close the file and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _allocate(self, nbytes: int) -> None:
        failed = OSError()
        for ahead in (nbytes + _RESERVE_BYTES + _ALLOCATED_BYTES, nbytes):
            if not ahead:
                break
            try:
                os.posix_fallocate(self._fd, self.end, ahead)
            except OSError as error:
                failed = error
            else:
                self._allocated = self.end + ahead
                return
        raise write_failed(self.path, failed) from failed

    def _write(self, head: bytes, payload: bytes) -> None:
        try:
            done = os.pwritev(self._fd, (head, payload), self.end)
            rest = memoryview(head + payload) if done < _FRAME.size + len(payload) else memoryview(b"")
            while done < len(rest):
                done += os.pwrite(self._fd, rest[done:], self.end + done)
        except OSError as error:
            raise write_failed(self.path, error) from error


class CheckedLog:
    """A log in a directory. Not thread-safe; the caller ensures that one process at a time uses it.

    Args:
        directory: an existing directory of this user.
        name: the name of the log.
        power: each record survives a loss of power (an fdatasync each).
        accept_loss: continue with the readable part of damaged files; copies of them are kept.
        about: fields for the head of each file; a file with another head is rejected.

    Attributes:
        payloads: the payloads at the start; the owner clears the list after reading it.
        losses: descriptions of records that `accept_loss` gave up; empty when none is lost.
        file: the generation in use.

    Raises:
        DamagedStateError: files are damaged or missing; the message names the files, the places and the lost records.
        StateDirectoryError: the files cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        power: bool = False,
        accept_loss: bool = False,
        about: dict[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._name = name
        self._power = power
        self._about = about or {}
        self._mark_file = MarkFile(directory / f"{name}.mark")
        self.payloads: list[bytes] = []
        self.losses: list[str] = []
        self.mark: Mark
        self.file: LogFile
        try:
            self._open(accept_loss)
        except OSError as error:
            raise StateDirectoryError(f"Cannot use {directory}/{name}: {error}.") from error
        except BaseException:
            self._mark_file.close()
            raise

    @property
    def log_id(self) -> bytes:
        """Identity of the log."""
        return self.mark.log_id

    def append(self, payload: bytes) -> None:
        """Append a payload; it survives this process when this returns, and with `power` the machine.

        Raises:
            DiskFullError: there is no room; nothing was written.
            StateDirectoryError: the disk is failing.
        """
        file = self.file
        before = (file.number, file.end, file._check)
        file.append(payload)
        try:
            if self._power:
                file.sync()
                self.mark.synced = file.number
            self.mark.number, self.mark.nbytes = file.number, file.end
            self._mark_file.write(self.mark)
        except StateDirectoryError:
            file.number, file.end, file._check = before  # the next record is written over this one
            self.mark.number, self.mark.nbytes = file.number, file.end
            raise

    def read_again(self) -> list[bytes]:
        """All payloads, read from the file.

        Raises:
            DamagedStateError: the file has been damaged since it was written.
        """
        found = _read(self.file.path, self.file.salt)
        if found.number != self.file.number or found.damages:
            words = "; ".join(found.damages) or f"it ends with record {found.number} of {self.file.number}"
            raise DamagedStateError(f"{self.file.path} has been damaged while it was in use: {words}.")
        return found.payloads

    def begin(self) -> LogFile:
        """Create a file for the next generation; it is in use once it is passed to `switch`.

        Raises:
            StateDirectoryError: the disk is full or failing.
        """
        generation = self.mark.generation + 1
        head = {"format": FORMAT, "log": self._name, "id": self.log_id.hex(), **self._about}
        return LogFile.create(self._path(generation), head)

    def switch(self, file: LogFile) -> None:
        """Replace the log's file by a file of `begin`.

        Raises:
            StateDirectoryError: the disk is full or failing. The old file stays in use.
        """
        file.sync()
        sync_folder(self._directory)
        number = file.number
        mark = replace(
            self.mark,
            salt=file.salt,
            generation=self.mark.generation + 1,
            number=number,
            synced=number,
            nbytes=file.end,
        )
        self._mark_file.write(mark, sync=True)
        self.mark = mark
        self.file.discard()
        self.file = file

    def close(self) -> None:
        """Sync the log to the disk and close it."""
        try:
            self.file.trim()
            self.file.sync()
            self.mark.synced = self.mark.number
            self._mark_file.write(self.mark, sync=True)
        except (OSError, StateDirectoryError) as error:
            _log.warning("the log %s may not be synced to the disk: %s", self.file.path, error)
        self.file.close()
        self._mark_file.close()

    # Opening

    def _path(self, generation: int) -> Path:
        return self._directory / f"{self._name}-{generation}.log"

    def _files(self) -> dict[int, Path]:
        """The existing log files, by generation."""
        found = {}
        for path in self._directory.glob(f"{self._name}-*.log"):
            digits = path.stem.removeprefix(f"{self._name}-")
            if digits.isascii() and digits.isdecimal():
                found[int(digits)] = path
        return found

    def _open(self, accept_loss: bool) -> None:
        files = self._files()
        problem = ""
        mark: Mark | None = None
        try:
            mark = self._mark_file.read()
        except DamagedStateError as error:
            problem = str(error)
        if mark is None and not problem:
            if not any(_has_records(path) for path in files.values()):
                self._start(new_mark(), [])
                return
            problem = f"{self._mark_file.path} is missing, and {max(files.values())} is there"
        found = Scan()
        damages = [problem] if problem else []
        if mark is not None:
            found, damages = self._check(mark, files)
        elif files:
            path = files[max(files)]
            found = _read(path, _salt_of(path))
            damages += [f"{path}: {damage}" for damage in found.damages]
            damages.append("without the mark nothing proves that the newest records are there")
        damages += self._foreign(found, mark)
        if damages:
            self._salvage(mark, found, damages, accept_loss)
        else:
            assert mark is not None
            self._go_on(mark, found, files)

    def _check(self, mark: Mark, files: dict[int, Path]) -> tuple[Scan, list[str]]:
        """Read the file that a mark names; returns its frames and descriptions of its damages."""
        path = self._path(mark.generation)
        if mark.generation not in files:
            others = [path for generation, path in sorted(files.items()) if generation > mark.generation]
            words = f"{path} is missing; it held {mark.number} records"
            if not others:
                return Scan(), [words]
            found = _read(others[-1], _salt_of(others[-1]))
            return found, [f"{words}, or {self._mark_file.path} is of an older moment than {others[-1]}"]
        found = _read(path, mark.salt)
        if found.number < 0:  # maybe the mark is wrong, and not the file
            own = _read(path, _salt_of(path))
            if own.head:
                return own, [f"{path} is not the file that {self._mark_file.path} names"]
        damages = [f"{path}: {damage}" for damage in found.damages]
        same_boot = mark.boot_id == boot_id()
        if found.number < mark.number:
            first = found.number + 1
            lost = f"record {first} is" if first == mark.number else f"records {first} to {mark.number} are"
            words = f"{path} ends (or is damaged to its end) at byte {found.end} of {mark.nbytes}: {lost} lost"
            if same_boot or found.number < mark.synced:
                damages.append(words)
            else:
                self.losses.append(
                    f"{words}. The machine has lost power or crashed since, and the chosen durability does not cover "
                    "that (--durability power does)"
                )
                _log.warning("%s", self.losses[-1])
        elif found.number > mark.number + 1 and same_boot:
            damages.append(
                f"{self._mark_file.path} names record {mark.number} as the newest and {path} goes on to "
                f"{found.number}: the mark is of an older moment, so nothing proves that the newest records are there"
            )
        return found, damages

    def _foreign(self, found: Scan, mark: Mark | None) -> list[str]:
        """Describe a head that does not match the mark or the directory; no payload of that file is used then.

        Raises:
            StateDirectoryError: it has another format.
        """
        if not found.head:
            return []
        known = found.head.get("format")
        if known != FORMAT:
            raise StateDirectoryError(
                f"{self._directory}/{self._name} was written in format {known}, and this fastrt knows format {FORMAT}. "
                "Use the fastrt that wrote it, or another state directory."
            )
        expected = {"log": self._name, **self._about}
        if mark is not None:
            expected["id"] = mark.log_id.hex()
        wrong = [name for name, value in expected.items() if found.head.get(name) != value]
        if not wrong:
            return []
        found.payloads = []
        return [
            f"the mark and the log file of {self._directory}/{self._name} do not belong together, or not to this "
            f"directory ({', '.join(wrong)} differ): files of two state directories are mixed"
        ]

    def _go_on(self, mark: Mark, found: Scan, files: dict[int, Path]) -> None:
        path = self._path(mark.generation)
        self.payloads = found.payloads
        self.file = LogFile(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), mark.salt)
        self.file.go_on(found)
        for generation, other in files.items():
            if generation != mark.generation:  # left by a process that died between two generations
                other.unlink(missing_ok=True)
        synced = mark.synced
        now = boot_id()
        if mark.boot_id != now:
            self.file.sync()
            synced = found.number
        self.mark = replace(mark, boot_id=now, number=found.number, nbytes=found.end, synced=synced)
        self._mark_file.resume(self.mark)

    def _salvage(self, mark: Mark | None, found: Scan, damages: list[str], accept_loss: bool) -> None:
        saved = f"{len(found.payloads)} whole records can be saved"
        if not accept_loss:
            raise DamagedStateError(
                f"The state in {self._directory} is damaged. {'; '.join(damages)}. {saved}. Put the files back from a "
                "copy, or go on with what can be saved by --accept-loss (in Python: accept_loss=True), which keeps the "
                "damaged files aside."
            )
        aside = self._keep_aside()
        self.losses += damages
        _log.warning("going on after a loss: %s; %s; the damaged files are in %s", "; ".join(damages), saved, aside)
        base = mark if mark is not None else new_mark()
        if mark is None and found.head:
            base.log_id = bytes.fromhex(found.head["id"])
        newest = max([base.generation, *self._files()], default=0)
        self._start(replace(base, generation=newest, boot_id=boot_id()), found.payloads)
        self.payloads = found.payloads

    def _keep_aside(self) -> Path:
        number = 1
        while (self._directory / f"damaged-{number}").exists():
            number += 1
        aside = self._directory / f"damaged-{number}"
        aside.mkdir(mode=0o700)
        for path in [*self._directory.glob(f"{self._name}-*.log"), self._mark_file.path]:
            if path.exists():
                shutil.copy2(path, aside / path.name)
        return aside

    def _start(self, mark: Mark, payloads: list[bytes]) -> None:
        """Start a generation with these payloads, which replaces all existing files."""
        old = self._files().values()
        self.mark = mark
        file = self.begin()
        try:
            for payload in payloads:
                file.append(payload)
            file.sync()
            number = file.number
            self.mark = replace(
                mark,
                salt=file.salt,
                generation=mark.generation + 1,
                number=number,
                synced=number,
                nbytes=file.end,
            )
            self._mark_file.create(self.mark)
        except StateDirectoryError:
            file.discard()
            raise
        self.file = file
        for path in old:
            path.unlink(missing_ok=True)


def _read(path: Path, salt: int) -> Scan:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size == 0:
            return Scan()
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            return scan(data, salt)
    finally:
        os.close(fd)


def _salt_of(path: Path) -> int:
    """The salt of the first frame that looks like one; 0 when none does."""
    data = path.read_bytes()
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _FRAME.size:
        salt: int = _FRAME.unpack_from(data, at)[2]
        if _frame_at(memoryview(data), at, salt) is not None:
            return salt
        at = data.find(_MAGIC, at + 1)
    return 0


def _has_records(path: Path) -> bool:
    """Whether a log file holds, or has held, records beside its head. A file of zeros was never written."""
    found = _read(path, _salt_of(path))
    return found.number > 0 or (found.number < 0 and bool(path.read_bytes().strip(b"\0")))
