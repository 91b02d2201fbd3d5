"""Spilled values in object storage, such as S3: one object for each value, by fsspec.

The node daemon alone reads and writes them. In the spill folder each has a small file, its stub, by the name that a
value's file would have. So the value's last holder removes the stub as it would remove a file, and the daemon then
removes the object. The stub contains the URL, for the session that cleans up after a crash.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

_STUB = struct.Struct("<8sQQH4070s")  # as large as the header of a value's file
_MAGIC = b"fastrtR1"
_PART_BYTES = 8 << 20  # of one request; S3 takes no parts below 5 MiB
_ATTEMPTS = 3
_PAUSE_S = 0.2  # before the second attempt; twice as long before each further one

_T = TypeVar("_T")


class StorageUnreachableError(OSError):
    """The storage did not answer, or refused: the object may be there."""


class ObjectStorage:
    """The objects of one session.

    Args:
        url: of the folder for all sessions, such as s3://bucket/prefix; fsspec knows its scheme.
        session: the session's name.
    """

    def __init__(self, url: str, session: str) -> None:
        self.url = url
        self._session = session
        self._fs: Any = None
        self._root = ""

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write an object.

        Raises:
            OSError: it cannot be written; or fsspec, or its package for the scheme, is missing.
        """

        def upload() -> None:
            fs, path = self._at(name)
            with fs.open(path, "wb", block_size=_PART_BYTES) as file:
                for part in parts:
                    for at in range(0, len(part), _PART_BYTES):
                        file.write(part[at : at + _PART_BYTES])

        _attempt(f"{self.url} cannot be written", upload)

    def read(self, name: str, at: int, room: memoryview) -> None:
        """Read bytes from a place in an object.

        Raises:
            StorageUnreachableError: it cannot be read now.
            OSError: the object is gone.
            ValueError: it ends too early.
        """

        def download() -> None:
            fs, path = self._at(name)
            for start in range(0, len(room), _PART_BYTES):
                part = room[start : start + _PART_BYTES]
                found = fs.cat_file(path, start=at + start, end=at + start + len(part))
                if len(found) != len(part):
                    raise ValueError(f"the object ends after {at + start + len(found)} bytes")
                part[:] = found

        _attempt(f"{self.url} cannot be read", download)

    def size(self, name: str) -> int:
        """Return the size of an object.

        Raises:
            StorageUnreachableError: the storage does not answer.
            OSError: the object is gone.
        """

        def ask() -> int:
            fs, path = self._at(name)
            return int(fs.info(path)["size"])

        return _attempt(f"{self.url} cannot be read", ask)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone, or that cannot be removed now, are left to `remove_all`."""
        for name in names:
            with suppress(Exception):
                fs, path = self._at(name)
                fs.rm_file(path)

    def remove_all(self) -> None:
        """Remove all objects of the session, if the storage answers."""
        with suppress(Exception):
            fs, path = self._at("")
            fs.rm(path.rstrip("/"), recursive=True)

    def _at(self, name: str) -> tuple[Any, str]:
        if self._fs is None:
            from fsspec.core import url_to_fs  # here: few sessions have object storage

            self._fs, root = url_to_fs(self.url, use_listings_cache=False)
            self._root = f"{root.rstrip('/')}/{self._session}"
            with suppress(Exception):  # object storage has no folders
                self._fs.makedirs(self._root, exist_ok=True)
        return self._fs, f"{self._root}/{name}"


def _attempt(what: str, work: Callable[[], _T]) -> _T:
    """Do something with the storage, again if it fails; libraries for it raise errors of many types."""
    pause_s = _PAUSE_S
    for left in reversed(range(_ATTEMPTS)):
        try:
            return work()
        except (ValueError, FileNotFoundError, ImportError) as exc:
            if isinstance(exc, ValueError) and "the object ends" in str(exc):
                raise
            raise OSError(f"{what}: {exc or type(exc).__name__}") from exc
        except Exception as exc:
            if isinstance(exc, OSError) and exc.errno == errno.EINVAL:  # by S3: the object ends before these bytes
                raise OSError(f"{what}: {exc}") from exc
            if not left:
                raise StorageUnreachableError(f"{what}: {exc or type(exc).__name__}") from exc
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("not reached")


def stub(objref: int, nbytes: int, url: str) -> bytes:
    """Make the content of a stub."""
    text = url.encode()
    return _STUB.pack(_MAGIC, objref, nbytes, len(text), text)


def is_stub(head: bytes | memoryview) -> bool:
    """Whether a file that begins like this is a stub."""
    return bytes(head[: len(_MAGIC)]) == _MAGIC


def url_in(folder: Path) -> str:
    """Return the URL in the stubs of a session's folder; "" if there is none."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError, ValueError, struct.error), path.open("rb") as file:
                head = file.read(_STUB.size)
                if is_stub(head):
                    *_, length, text = _STUB.unpack(head)
                    return str(text[:length], "utf-8")
    return ""
