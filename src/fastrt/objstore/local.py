"""Objects for programs on this machine, through shared memory: a read-only descriptor over a Unix socket.

`offer` writes the serialised `Obj` to an anonymous file in memory, and seals it: no process can change it any more. A
program of the same user that connects to the socket and sends the handle gets a descriptor of it, opened for reading,
and maps it. An object that is not fetched within one or two times `_OFFER_S` is dropped.

Source: GetObj of early Ray's object store (bucket, handle, size), which nothing served.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

from fastrt.errors import ObjectStoreFullError

HANDLE = struct.Struct("<Q")
_OFFER_S = 30.0
_GREETING_S = 1.0
_NO_DESCRIPTOR_S = 0.1
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WRITE_BYTES = 1 << 30


@dataclass
class _Offer:
    fd: int
    nbytes: int
    until: float


class LocalDoor:
    """Offers objects to programs of the same user on this machine. Its socket and its thread start with the first.

    Args:
        bytes_max: of the objects that are offered at a time.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        # Abstract: it has no file that a killed process would leave.
        self.bucket = f"@fastrt-objects-{secrets.token_hex(16)}"

    def offer(self, parts: list[bytes | memoryview]) -> tuple[str, int, int]:
        """Offer an object to the next program that shows its handle.

        Args:
            parts: its serialised `Obj`.
        Returns:
            (bucket, handle, size): `@name` of an abstract Unix socket, the number to send there, the bytes to map.
        Raises:
            ObjectStoreFullError: too many bytes are offered.
        """
        size = sum(memoryview(part).nbytes for part in parts)
        self._expire()
        with self._lock:
            offered = sum(offer.nbytes for offer in self._offers.values())
        if self._closed or offered + size > self._bytes_max:
            raise ObjectStoreFullError(
                f"{offered} bytes of objects are offered to programs of this machine, and with {size} more they would "
                f"be more than {self._bytes_max}. Fetch those first, or use Read."
            )
        fd = _sealed(parts)
        handle = secrets.randbits(64)
        with self._lock:
            self._offers[handle] = _Offer(fd, size, time.monotonic() + _OFFER_S)
            self._open()
        return self.bucket, handle, size

    def close(self) -> None:
        """Offer nothing any more."""
        with self._lock:
            self._closed = True
            listener, thread = self._listener, self._thread
        if listener is not None and thread is not None:
            with socket.socket(socket.AF_UNIX) as waking, contextlib.suppress(OSError):
                waking.connect("\0" + self.bucket[1:])
            thread.join()
            listener.close()
        for offer in self._offers.values():
            os.close(offer.fd)
        self._offers.clear()

    def _open(self) -> None:
        """Listen, with the first offer. Under the lock."""
        if self._listener is None and not self._closed:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind("\0" + self.bucket[1:])
            self._listener.listen()
            self._thread = threading.Thread(target=self._serve, name="fastrt-objects", daemon=True)
            self._thread.start()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [handle for handle, offer in self._offers.items() if offer.until < now]
            offers = [self._offers.pop(handle) for handle in late]
        for offer in offers:
            os.close(offer.fd)

    def _serve(self) -> None:
        assert self._listener is not None
        self._listener.settimeout(_OFFER_S)
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._expire()
                continue
            except OSError:  # no descriptor is left
                time.sleep(_NO_DESCRIPTOR_S)
                continue
            with connection, contextlib.suppress(OSError):
                self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        connection.settimeout(_GREETING_S)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", raw)[1] != os.getuid():
            return
        asked = connection.recv(HANDLE.size, socket.MSG_WAITALL)
        with self._lock:
            offer = self._offers.pop(HANDLE.unpack(asked)[0], None) if len(asked) == HANDLE.size else None
        if offer is None:
            return
        try:
            socket.send_fds(connection, [b"\0"], [offer.fd])
        finally:
            os.close(offer.fd)


def _sealed(parts: list[bytes | memoryview]) -> int:
    """A descriptor for reading of a file in memory that cannot change."""
    fd = os.memfd_create("fastrt-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(fd, left[:_WRITE_BYTES]) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
