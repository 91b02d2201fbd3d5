"""Files of spilled values. The daemon writes and reads them, and reads only files that this session has written.

A file is a header (magic, objref, length, nonce), the bytes and a tag. The tag is a GMAC over header and bytes: AES-256
in Galois/counter mode, with nothing to encrypt. With the CPU's instructions for it, that is faster than a CRC-32. The
key lies in the session's folder in a file of mode 0600, where a daemon that replaces a dead one finds it. A file that
was damaged, replaced, taken from another session or written for another value has a wrong tag.
"""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fastrt.config import SPILL_FOLDER
from fastrt.folders import (
    UnsafeFolderError,
    has_private_folder,
    open_private,
    private_folder,
    read_private,
    replace_private,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

_HEADER = struct.Struct("<8sQQ12s")
_MAGIC = b"fastrtS2"
_NONCE_BYTES, _TAG_BYTES, _KEY_BYTES = 12, 16, 32
_CHUNK_BYTES = 1 << 20  # written, then authenticated while it is in the CPU's cache
_KEY_FILE = "spill.key"


class SpillFiles:
    """The files of one session.

    Args:
        folder: for the files; made with mode 0700 when the first is written.
        key_folder: a private folder of the session, for the key.
    """

    def __init__(self, folder: Path, key_folder: Path) -> None:
        self._folder = folder
        self._key_folder = key_folder
        self._key = b""
        self._is_checked = False

    def path(self, objref: int) -> Path:
        """Return the path of a value's file. The core removes it by the same name."""
        return self._folder / f"{objref:016x}"

    def write(self, objref: int, data: memoryview) -> None:
        """Write a value's file.

        Raises:
            OSError: the disk is full, or fails.
            UnsafeFolderError: another user can change the folder.
        """
        name = self.path(objref).name
        self._check_folder()
        self.remove(objref)  # a file that a dead daemon has begun
        fd = open_private(self._folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            header = _HEADER.pack(_MAGIC, objref, len(data), os.urandom(_NONCE_BYTES))
            mac = self._mac(header)
            _write_all(fd, memoryview(header))
            for at in range(0, len(data), _CHUNK_BYTES):
                chunk = data[at : at + _CHUNK_BYTES]
                _write_all(fd, chunk)
                mac.authenticate_additional_data(chunk)
            mac.finalize()
            _write_all(fd, memoryview(mac.tag))
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
        with open(fd, "rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) != _HEADER.size or _HEADER.unpack(header)[:3] != (_MAGIC, objref, len(room)):
                raise ValueError("its header is not that of this value")
            mac = self._mac(header)
            done = 0
            while done < len(room):
                got = file.readinto(room[done : done + _CHUNK_BYTES])
                if not got:
                    raise ValueError(f"it ends after {done} of {len(room)} bytes")
                mac.authenticate_additional_data(room[done : done + got])
                done += got
            mac.finalize()
            if not hmac.compare_digest(file.read(_TAG_BYTES + 1), mac.tag):
                raise ValueError("it is not what this session wrote")

    def remove(self, objref: int) -> None:
        """Remove a value's file, if there is one."""
        self.path(objref).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove all files and their folder, if it is this user's."""
        with suppress(UnsafeFolderError, OSError):
            if has_private_folder(self._folder, SPILL_FOLDER):
                shutil.rmtree(self._folder)

    def _check_folder(self) -> None:
        """Check the folder once: another user cannot change a folder that `private_folder` has accepted."""
        if not self._is_checked:
            private_folder(self._folder, SPILL_FOLDER)
            self._is_checked = True

    def _mac(self, header: bytes) -> AEADEncryptionContext:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # here: few sessions spill

        if not self._key:
            self._key = _session_key(self._key_folder)
        mac = Cipher(algorithms.AES(self._key), modes.GCM(header[-_NONCE_BYTES:])).encryptor()
        mac.authenticate_additional_data(header)
        return mac


def _session_key(folder: Path) -> bytes:
    try:
        return read_private(folder, _KEY_FILE, _KEY_BYTES)
    except FileNotFoundError:  # nothing was spilled yet
        replace_private(folder, _KEY_FILE, os.urandom(_KEY_BYTES))
        return read_private(folder, _KEY_FILE, _KEY_BYTES)


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
