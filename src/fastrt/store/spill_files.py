"""Files of values: the daemon spills and restores them, and any process of the session writes and maps its own.

A file is a header (magic, objref, length, nonce), the bytes and a tag. The tag is a GMAC over header and bytes: AES-256
in Galois/counter mode, with nothing to encrypt. With the CPU's instructions for it, that is faster than a CRC-32. The
key lies in the session's folder in a file of mode 0600, where the session's processes find it. A file that was damaged,
replaced, taken from another session or written for another value has a wrong tag, and is not used.

Large values are written past the page cache (O_DIRECT), from the store's own pages: 1.3 GB/s with 0.1 s of CPU per
GB. The page cache gave 0.1 to 1.6 GB/s with 0.4 to 1.4 s. They are restored in the same way, if the page cache does not
have them. Readers that map a file fill the page cache, which they share.

The disk's space for a mapped file is reserved before the first byte is written. So a full disk is an error at once, and
never a signal (SIGBUS) while a value is written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fastrt._core.objects.mapped import map_file
from fastrt.config import SPILL_FOLDER
from fastrt.folders import (
    UnsafeFolderError,
    has_private_folder,
    open_private,
    read_private,
    replace_private,
)
from fastrt.store.session_folder import make_session_folder
from fastrt.store.spill_storage import is_stub, stub

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

    from fastrt._core.objects.mapped import FileFill, FileWriter, MappedPin, Pages
    from fastrt.store.spill_storage import ObjectStorage

_HEADER = struct.Struct("<8sQQ12s4060x")  # 4 KiB: direct I/O needs it, and a mapped value begins a page
_MAGIC = b"fastrtS4"
_NONCE_BYTES, _TAG_BYTES, _KEY_BYTES = 12, 16, 32
_CHUNK_BYTES = 1 << 20  # authenticated in one call, written in one call through the page cache
# Written or read in one call past the page cache. The kernel does not let go of the processor in between, and on two
# processors other processes wait for it: p99 of a task beside puts that spill is 2.5 times that beside nothing, with
# 512 KiB 3.4 times. One thread then writes a tenth less, 0.95 GB/s; several threads write as fast as the disk.
_DIRECT_BYTES = 1 << 18
_DIRECT_BYTES_MIN = 1 << 20  # of a value that is written past the page cache
_BLOCK_BYTES = 4096  # direct I/O writes whole ones
_KEY_FILE = "spill.key"
_RESERVE_BYTES = 64 << 20  # reserved in one step: the call starts again after each signal
_MAP_BYTES_MIN = 1 << 16  # smaller values are read into memory of this process: it may have 65,530 mappings
_KEEP_SHARE = 0.1  # of the disk that must be free

Identity = tuple[int, int, int, int]


class StoredElsewhereError(OSError):
    """A value's file is a stub: its bytes are in object storage, from where the daemon fetches them."""


class SpillFiles:
    """The files of one session.

    Args:
        folder: for the files; made with mode 0700 when the first is written.
        key_folder: a private folder of the session, for the key.
        storage: where `write` puts values instead; their files are stubs. Only the daemon knows it.
    """

    def __init__(self, folder: Path, key_folder: Path, storage: ObjectStorage | None = None) -> None:
        self._folder = folder
        self._storage = storage
        self._sweeping = threading.Lock()
        self._stored = self._stubs() if storage is not None else set()  # names that have an object, or had one
        self._key_folder = key_folder
        self._key = b""
        self._is_successor = False  # an earlier daemon may have been killed before it removed an object
        self._is_checked = False

    def path(self, objref: int) -> Path:
        """Return the path of a value's file. The core removes it by the same name."""
        return self._folder / f"{objref:016x}"

    def make_key(self) -> None:
        """Create the session's key, if there is none. Only the daemon does: two processes could make two keys."""
        try:
            self._key = _read_key(self._key_folder)
            self._is_successor = True
        except FileNotFoundError:
            replace_private(self._key_folder, _KEY_FILE, os.urandom(_KEY_BYTES))

    def write(self, objref: int, data: memoryview) -> None:
        """Write a value's file.

        Raises:
            OSError: the disk is full, or fails.
            UnsafeFolderError: another user can change the folder.
        """
        self.remove(objref)  # a file that a dead daemon has begun
        if self._storage is not None:
            self._store(self._storage, objref, data)
            return
        fd = self._create(objref, os.O_WRONLY)
        try:
            header = _HEADER.pack(_MAGIC, objref, len(data), os.urandom(_NONCE_BYTES))
            mac = self._mac(header)
            is_large = len(data) >= _DIRECT_BYTES_MIN
            if is_large:
                _reserve(fd, len(header) + len(data) + _TAG_BYTES)
            with _Channel(fd, is_large) as channel:
                for at in range(0, len(data), _DIRECT_BYTES):
                    chunk = data[at : at + _DIRECT_BYTES]
                    _authenticate(mac, chunk)
                    channel.write(chunk, len(header) + at)
            mac.finalize()
            _write_all(fd, memoryview(mac.tag), len(header) + len(data))
            _write_all(fd, memoryview(header), 0)
        except BaseException:
            self.remove(objref)
            raise
        finally:
            os.close(fd)

    def read(self, objref: int, room: memoryview) -> None:
        """Read a value's bytes back. They are the value only if this returns.

        Args:
            objref: of the value.
            room: for the bytes; as long as the value.
        Raises:
            OSError: the file is gone, or cannot be read.
            UnsafeFolderError: another user can change the folder, or has made the file.
            ValueError: the file is not what this session wrote for this value.
        """
        import hmac  # here: it loads OpenSSL

        self._check_folder()
        fd = open_private(self._folder, self.path(objref).name, os.O_RDONLY)
        try:
            header = os.pread(fd, _HEADER.size, 0)
            if is_stub(header):
                self._load(objref, room)
                return
            if len(header) != _HEADER.size or _HEADER.unpack(header)[:3] != (_MAGIC, objref, len(room)):
                raise ValueError("its header is not that of this value")
            mac = self._mac(header)
            with _Channel(fd, len(room) >= _DIRECT_BYTES_MIN and not _is_cached(fd, len(room))) as channel:
                for at in range(0, len(room), _DIRECT_BYTES):
                    chunk = room[at : at + _DIRECT_BYTES]
                    done = channel.read(chunk, len(header) + at)
                    if done < len(chunk):
                        raise ValueError(f"it ends after {at + done} of {len(room)} bytes")
                    _authenticate(mac, chunk)
            mac.finalize()
            if not hmac.compare_digest(os.pread(fd, _TAG_BYTES + 1, len(header) + len(room)), mac.tag):
                raise ValueError("it is not what this session wrote")
        finally:
            os.close(fd)

    def _store(self, storage: ObjectStorage, objref: int, data: memoryview) -> None:
        """Write a value to object storage, and its stub.

        The stub comes first: if this process is killed meanwhile, the next daemon knows of the object by it.
        """
        header = _HEADER.pack(_MAGIC, objref, len(data), os.urandom(_NONCE_BYTES))
        mac = self._mac(header)
        _authenticate(mac, data)
        mac.finalize()
        name = self.path(objref).name
        try:
            with self._sweeping:  # `sweep_storage` may be removing the object of an earlier stub
                self._stored.add(name)
                fd = self._create(objref, os.O_WRONLY)
                try:
                    _write_all(fd, memoryview(stub(objref, len(data), storage.url)), 0)
                finally:
                    os.close(fd)
            storage.write(name, (header, data, mac.tag))
        except BaseException:
            self.remove(objref)
            raise

    def _load(self, objref: int, room: memoryview) -> bytes:
        """Read a value from object storage; return its header."""
        import hmac  # here: it loads OpenSSL

        if self._storage is None:
            raise StoredElsewhereError(f"{self.path(objref)} is a stub")
        name, header, tag = self.path(objref).name, bytearray(_HEADER.size), bytearray(_TAG_BYTES)
        self._storage.read(name, 0, memoryview(header))
        if _HEADER.unpack(header)[:3] != (_MAGIC, objref, len(room)):
            raise ValueError("its header is not that of this value")
        if self._storage.size(name) != len(header) + len(room) + len(tag):
            raise ValueError("its object has another size")
        self._storage.read(name, len(header), room)
        self._storage.read(name, len(header) + len(room), memoryview(tag))
        mac = self._mac(bytes(header))
        _authenticate(mac, room)
        mac.finalize()
        if not hmac.compare_digest(bytes(tag), mac.tag):
            raise ValueError("it is not what this session wrote")
        return bytes(header) + bytes(tag)

    def fetch(self, objref: int, nbytes: int) -> None:
        """Fetch a value from object storage into its file, which readers then map; nothing if the file has it already.

        Raises:
            OSError, UnsafeFolderError, ValueError: as for `read`.
        """
        self._check_folder()
        fd = open_private(self._folder, self.path(objref).name, os.O_RDWR)
        try:
            if not is_stub(os.pread(fd, _HEADER.size, 0)):
                return
            end = _HEADER.size + nbytes + _TAG_BYTES
            _reserve(fd, end)
            with mmap.mmap(fd, end) as pages, memoryview(pages) as whole, whole[_HEADER.size : -_TAG_BYTES] as room:
                found = self._load(objref, room)
                whole[-_TAG_BYTES:] = found[_HEADER.size :]
            _write_all(fd, memoryview(found)[: _HEADER.size], 0)  # last: until now the file is a stub
        finally:
            os.close(fd)

    def is_stored(self, objref: int) -> bool:
        """Whether a value's bytes are in object storage only."""
        with suppress(OSError, UnsafeFolderError):
            fd = open_private(self._folder, self.path(objref).name, os.O_RDONLY)
            try:
                return is_stub(os.pread(fd, _HEADER.size, 0))
            finally:
                os.close(fd)
        return False

    def sweep_storage(self) -> None:
        """Remove the objects of values that are no more."""
        if self._storage is None or not self._stored:
            return
        stored = self._stored.copy()
        try:
            gone = stored - set(os.listdir(self._folder))
        except FileNotFoundError:
            gone = stored
        for name in gone:
            with self._sweeping:  # the same name may be written again
                if name in self._stored and not (self._folder / name).exists():
                    self._storage.remove([name])
                    self._stored.discard(name)

    def _stubs(self) -> set[str]:
        """List the stubs that an earlier daemon has left."""
        with suppress(OSError):
            return {name for name in os.listdir(self._folder) if name[0] != "." and self.is_stored(int(name, 16))}
        return set()

    def read_ahead(self, objref: int, nbytes: int) -> None:
        """Have the kernel read a value's file into the page cache, or fetch it from object storage, if possible."""
        with suppress(OSError, UnsafeFolderError, ValueError):
            if self._storage is not None:
                self.fetch(objref, nbytes)
            self._check_folder()
            fd = open_private(self._folder, self.path(objref).name, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def open_writer(self, writer: FileWriter | FileFill) -> None:
        """Create the file of a value that is to be written through a mapping, and map it.

        Raises:
            OSError: the disk is full, or fails.
            UnsafeFolderError: another user can change the folder.
            MemoryError: this process has no mapping left.
        """
        objref, nbytes = writer.name(), len(writer)
        header = _HEADER.pack(_MAGIC, objref, nbytes, os.urandom(_NONCE_BYTES))
        self._mac(header)  # without a key nothing is written
        fd = self._create(objref, os.O_RDWR)
        try:
            end = _HEADER.size + nbytes + _TAG_BYTES
            disk = os.fstatvfs(fd)
            if disk.f_bavail * disk.f_frsize < end:  # so a value that cannot fit does not fill the disk first
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path(objref)))
            _reserve(fd, end)
            os.pwrite(fd, header, 0)
            writer.map(fd, _HEADER.size, _TAG_BYTES, self._sign)
        finally:
            os.close(fd)

    def map(self, objref: int, nbytes: int) -> MappedPin | bytearray:
        """Map a value's file, and check it. Small values are read into memory.

        Raises:
            OSError, UnsafeFolderError, ValueError: as for `read`.
        """
        if nbytes >= _MAP_BYTES_MIN:
            self._check_folder()
            path = self.path(objref)
            fd = open_private(self._folder, path.name, os.O_RDONLY)
            try:
                if is_stub(os.pread(fd, _HEADER.size, 0)):
                    raise StoredElsewhereError(f"{path} is a stub")
                end = _HEADER.size + nbytes + _TAG_BYTES
                if os.fstat(fd).st_size != end:
                    raise ValueError(f"it has {os.fstat(fd).st_size} bytes, not {end}")
                pin = map_file(fd, str(path), _HEADER.size, nbytes, _TAG_BYTES)
            finally:
                os.close(fd)
            if pin is not None:
                self._verify(memoryview(pin.whole()), objref, nbytes)
                return pin
        room = bytearray(nbytes)
        self.read(objref, memoryview(room))
        return room

    def _sign(self, pages: Pages) -> None:
        """Write the tag of a mapped file whose bytes are complete."""
        whole = memoryview(pages)
        whole[-_TAG_BYTES:] = self._tag(whole)

    def _verify(self, whole: memoryview, objref: int, nbytes: int) -> None:
        import hmac  # here: it loads OpenSSL

        if _HEADER.unpack(whole[: _HEADER.size])[:3] != (_MAGIC, objref, nbytes):
            raise ValueError("its header is not that of this value")
        if not hmac.compare_digest(whole[-_TAG_BYTES:], self._tag(whole)):
            raise ValueError("it is not what this session wrote")

    def _tag(self, whole: memoryview) -> bytes:
        mac = self._mac(bytes(whole[: _HEADER.size]))
        for at in range(_HEADER.size, len(whole) - _TAG_BYTES, _CHUNK_BYTES):
            mac.authenticate_additional_data(whole[at : min(at + _CHUNK_BYTES, len(whole) - _TAG_BYTES)])
        mac.finalize()
        return mac.tag

    def identity(self, objref: int) -> Identity | None:
        """Return the identity of a value's file, which no other file of that name has; None if there is none."""
        with suppress(OSError):
            about = os.lstat(self.path(objref))
            return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
        return None

    def may_keep(self) -> bool:
        """Whether the disk has so much room that the files of values in memory do not matter."""
        with suppress(OSError):
            disk = os.statvfs(self._folder)
            return disk.f_bavail > disk.f_blocks * _KEEP_SHARE
        return False

    def remove(self, objref: int) -> None:
        """Remove a value's file, if there is one."""
        self.path(objref).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove all files and their folder, if it is this user's, and the objects of the session."""
        if self._storage is not None and (self._stored or self._is_successor):
            self._storage.remove_all()
        with suppress(UnsafeFolderError, OSError):
            if has_private_folder(self._folder, SPILL_FOLDER):
                shutil.rmtree(self._folder)

    def _create(self, objref: int, flags: int) -> int:
        """Create a value's file, and the folder if it was removed."""
        name = self.path(objref).name
        for _ in range(2):
            self._check_folder()
            try:
                return open_private(self._folder, name, flags | os.O_CREAT | os.O_EXCL)
            except FileNotFoundError:
                self._is_checked = False
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))

    def _check_folder(self) -> None:
        """Check the folder once: another user cannot change a folder that `private_folder` has accepted."""
        if not self._is_checked:
            make_session_folder(self._folder, SPILL_FOLDER)
            self._is_checked = True

    def _mac(self, header: bytes) -> AEADEncryptionContext:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # here: few sessions spill

        if not self._key:
            self._key = _read_key(self._key_folder)
        mac = Cipher(algorithms.AES(self._key), modes.GCM(_HEADER.unpack(header)[3])).encryptor()
        mac.authenticate_additional_data(header)
        return mac


def _read_key(folder: Path) -> bytes:
    key = read_private(folder, _KEY_FILE, _KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{folder / _KEY_FILE} has {len(key)} bytes, not {_KEY_BYTES}")
    return key


def _reserve(fd: int, nbytes: int) -> None:
    """Have the disk reserve the space of a file."""
    for at in range(0, nbytes, _RESERVE_BYTES):
        os.posix_fallocate(fd, at, min(_RESERVE_BYTES, nbytes - at))


def _authenticate(mac: AEADEncryptionContext, data: memoryview) -> None:
    """Authenticate bytes in steps, because a call keeps other threads of this process waiting."""
    for at in range(0, len(data), _CHUNK_BYTES):
        mac.authenticate_additional_data(data[at : at + _CHUNK_BYTES])


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _CHUNK_BYTES], at + done)


def _is_cached(fd: int, nbytes: int) -> bool:
    """Whether a file seems to be in the page cache: its middle can be read without the disk."""
    try:
        return os.preadv(fd, [bytearray(1)], _HEADER.size + nbytes // 2, os.RWF_NOWAIT) == 1
    except OSError:
        return False


class _Channel:
    """Reads or writes a file past the page cache where that works: whole blocks and pages, on most file systems.

    Args:
        fd: of the file.
        is_direct: whether to try it.
    """

    def __init__(self, fd: int, is_direct: bool) -> None:
        self._fd = fd
        self._flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self._is_direct = False
        if is_direct:
            with suppress(OSError):  # such as tmpfs in older kernels
                fcntl.fcntl(fd, fcntl.F_SETFL, self._flags | os.O_DIRECT)
                self._is_direct = True

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer()

    def write(self, data: memoryview, at: int) -> None:
        """Write bytes at a place in the file."""
        done = self._whole_blocks(os.pwrite, data, at)
        _write_all(self._fd, data[done:], at + done)

    def read(self, room: memoryview, at: int) -> int:
        """Read bytes from a place in the file; return how many there were."""
        done = self._whole_blocks(_pread_into, room, at)
        while done < len(room):
            got = _pread_into(self._fd, room[done : done + _CHUNK_BYTES], at + done)
            if not got:
                break
            done += got
        return done

    def _whole_blocks(self, move: Callable[[int, memoryview, int], int], data: memoryview, at: int) -> int:
        """Move as many whole blocks as possible past the page cache, and end that if bytes are left."""
        whole, done = len(data) // _BLOCK_BYTES * _BLOCK_BYTES, 0
        while self._is_direct and done < whole:
            try:
                moved = move(self._fd, data[done:whole], at + done)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                break  # neither these pages nor this file system take direct I/O
            if not moved:
                break
            done += moved
        if done < len(data):
            self._buffer()
        return done

    def _buffer(self) -> None:
        if self._is_direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags)
            self._is_direct = False


def _pread_into(fd: int, room: memoryview, at: int) -> int:
    return os.preadv(fd, [room], at)
