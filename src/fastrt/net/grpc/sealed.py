"""Links between processes of a cluster: in the clear, or sealed in records of AES-256-GCM under keys sent through TLS.

Two ends that are on different machines shake hands by TLS 1.3 with certificates of the cluster on both sides
(`fastrt.net.grpc.identity`). Through TLS the server then sends two fresh keys, one per direction, and both ends switch
to the records below, on the same connection.

A record is `length: u32 | AES-256-GCM of at most RECORD_BYTES, with the length as associated data | tag: 16 bytes`. The
nonce is the record's number, each key seals at most RECORDS_MAX records (1 TiB, far below the bound of 2^-57 of RFC
8446, 5.5), then a new connection replaces this one. A record that was changed, repeated, left out or moved does not
open: its bytes can be in the receiver's memory by then, but are not used. The end of a connection is not sealed, so
messages over it have to state their length.

TLS's records are slower: they hold 16 KiB, and the interpreter's OpenSSL takes and returns each in one call. Measured
here between two network namespaces, processor seconds per GiB at either end: 0.20 in the clear, 0.66 to 0.9 by
`SSLSocket` (OpenSSL 3.0, large views, with TCP_CORK and without; 0.9 to 1.0 through memory BIOs), 0.35 by these
records, sealed by `cryptography` straight from and into the caller's memory. Kernel TLS helps only with a network card
that encrypts; these records need neither. Keys from the handshake of one protocol for the records of another are
also how DTLS-SRTP works (RFC 5764).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from fastrt._core.transfer import stream
from fastrt.errors import FastrtError

RECORD_BYTES = 256 << 10  # larger ones leave the processor's cache, smaller ones cost more calls
RECORDS_MAX = 1 << 22
BULK_BYTES = 1 << 20  # buffer of a direction in which large values go
SMALL_BYTES = 32 << 10  # buffer of a direction in which messages go
_LENGTH_BYTES, _TAG_BYTES = 4, 16
_OVERHEAD = _LENGTH_BYTES + _TAG_BYTES
_GATHER_BYTES = 16 << 10  # smaller parts share a record
_KEY_BYTES = 32
_KEYS_MAGIC = b"fastrtK1"
Buffer = bytes | bytearray | memoryview


class LinkError(FastrtError):
    """The other end of a TLS connection does not continue with sealed records: it runs another version of fastrt."""


class RecordError(ConnectionError):
    """A sealed record was damaged or changed on the way; close the connection."""


class Link:
    """An authenticated connection, in the clear. One thread may send while another one receives.

    Args:
        sock: a non-blocking socket whose peer has been authenticated.
        local: whether both ends are on this machine.

    Attributes:
        sealed: whether the bytes go in sealed records.
    """

    sealed = False

    def __init__(self, sock: socket.socket, local: bool) -> None:
        self.local = local
        self._sock = sock
        self._fd = sock.fileno()

    def send(self, parts: Sequence[object], timeout_s: float) -> None:
        """Send several buffers, one after the other; see `stream.send_parts`."""
        stream.send_parts(self._fd, list(parts), timeout_s)

    def receive(self, parts: Sequence[object], least: int, timeout_s: float) -> int:
        """Fill several buffers, one after the other, with `least` bytes or more; see `stream.receive_parts`."""
        return stream.receive_parts(self._fd, list(parts), least, timeout_s)

    def receive_ready(self, room: memoryview) -> int:
        """Receive without waiting; returns how many bytes, 0 if there are none.

        Raises:
            EOFError: the peer has closed the connection.
        """
        return _receive_ready(self._sock, room)

    def has_begun(self) -> bool:
        """Whether bytes were received that `receive` has not returned yet."""
        return False

    def fileno(self) -> int:
        """The socket's descriptor, for polls; negative when the link is closed."""
        return self._sock.fileno()

    def shutdown(self) -> None:
        """End the connection for both sides; a thread in `send` or `receive` gets an error."""
        with contextlib.suppress(OSError):  # the peer has done so already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class Sealed(Link):
    """A link whose bytes go in sealed records.

    Args:
        sock: a non-blocking socket whose peer has been authenticated and has received the keys.
        send_key, receive_key: of the two directions; no other connection may have the same.
        send_bytes, receive_bytes: sizes of the buffers of sealed bytes; records are smaller.
    """

    sealed = True

    def __init__(
        self, sock: socket.socket, send_key: bytes, receive_key: bytes, send_bytes: int, receive_bytes: int
    ) -> None:
        super().__init__(sock, local=False)
        self._seal, self._open = _cipher(send_key)[0], _cipher(receive_key)[1]
        self._sent = self._received = 0  # records
        self._out = memoryview(bytearray(send_bytes))
        self._out_record = _record_bytes(send_bytes)
        self._in = memoryview(bytearray(receive_bytes))
        self._in_record = _record_bytes(receive_bytes)
        self._begin = self._end = 0  # range of received bytes that are not open yet
        self._spare = memoryview(bytearray(self._in_record))
        self._opened = self._spare[:0]  # bytes that are open and not returned yet

    # ---- out ----

    def send(self, parts: Sequence[object], timeout_s: float) -> None:
        """Send several buffers in records; small ones share a record."""
        small = bytearray()
        gathered = min(_GATHER_BYTES, self._out_record)
        used = 0
        for part in parts:
            view = memoryview(part).cast("B")  # type: ignore[arg-type]
            if len(view) < gathered:
                if len(small) + len(view) > gathered:
                    used = self._put(small, used, timeout_s)
                    small = bytearray()
                small += view
                continue
            if small:
                used = self._put(small, used, timeout_s)
                small = bytearray()
            for at in range(0, len(view), self._out_record):
                used = self._put(view[at : at + self._out_record], used, timeout_s)
        if small:
            used = self._put(small, used, timeout_s)
        if used:
            stream.send_parts(self._fd, [self._out[:used]], timeout_s)

    def _put(self, data: Buffer, used: int, timeout_s: float) -> int:
        """Append a sealed record to the buffer, which is sent when it is full; returns the buffer's new length."""
        size = len(data) + _OVERHEAD
        if used + size > len(self._out):
            stream.send_parts(self._fd, [self._out[:used]], timeout_s)
            used = 0
        if self._sent == RECORDS_MAX:
            raise ConnectionError(
                "this connection's key has sealed its maximum number of records; open a new connection"
            )
        nonce = self._sent.to_bytes(12, "little")
        self._sent += 1
        place = self._out[used : used + size]
        place[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        self._seal(nonce, data, place[:_LENGTH_BYTES], place[_LENGTH_BYTES:])
        return used + size

    # ---- in ----

    def receive(self, parts: Sequence[object], least: int, timeout_s: float) -> int:
        """Fill several buffers with `least` bytes or more from the next records."""
        done = 0
        for part in parts:
            view = memoryview(part).cast("B")  # type: ignore[arg-type]
            while view:
                if done >= least and not self._opened:
                    return done
                got = self._copy_opened(view) or self._open_next(view, timeout_s)
                view = view[got:]
                done += got
        return done

    def receive_ready(self, room: memoryview) -> int:
        """Open the records that were received; returns how many bytes, 0 if there is no complete one."""
        while not self._opened:
            if self._record() is not None:
                self._open_next(self._spare[:0], 0.0)
                continue
            self._make_room()
            got = _receive_ready(self._sock, self._in[self._end :])
            if got == 0:
                return 0
            self._end += got
        return self._copy_opened(room)

    def has_begun(self) -> bool:
        """Whether part of a record, or of its contents, has not been returned yet."""
        return self._end > self._begin or bool(self._opened)

    def _copy_opened(self, view: memoryview) -> int:
        """Copy bytes that are open; returns how many."""
        got = min(len(view), len(self._opened))
        if got:
            view[:got] = self._opened[:got]
            self._opened = self._opened[got:]
        return got

    def _open_next(self, view: memoryview, timeout_s: float) -> int:
        """Open the next record, into a view if all of it has room there; returns how many bytes the view got."""
        while (length := self._record()) is None:
            self._make_room()
            missing = self._missing()
            self._end += stream.receive_parts(self._fd, [self._in[self._end :]], missing, timeout_s)
        head = self._in[self._begin : self._begin + _LENGTH_BYTES]
        data = self._in[self._begin + _LENGTH_BYTES : self._begin + length + _OVERHEAD]
        nonce = self._received.to_bytes(12, "little")
        straight = length <= len(view)
        self._open(nonce, data, head, view[:length] if straight else self._spare[:length])
        self._received += 1
        self._begin += length + _OVERHEAD
        if straight:
            return length
        self._opened = self._spare[:length]
        return 0

    def _record(self) -> int | None:
        """Number of bytes in the next record; None if it is incomplete."""
        missing = self._missing()
        return None if missing else self._length()

    def _missing(self) -> int:
        have = self._end - self._begin
        if have < _LENGTH_BYTES:
            return _LENGTH_BYTES - have
        return max(self._length() + _OVERHEAD - have, 0)

    def _length(self) -> int:
        length = int.from_bytes(self._in[self._begin : self._begin + _LENGTH_BYTES], "little")
        if not 0 < length <= self._in_record:
            raise RecordError(f"a sealed record of {length} bytes; at most {self._in_record} are allowed")
        return length

    def _make_room(self) -> None:
        """Move an incomplete record to the front of the buffer if the rest might not fit behind it."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif len(self._in) - self._begin < self._in_record + _OVERHEAD:
            have = self._end - self._begin
            self._in[:have] = bytes(self._in[self._begin : self._end])
            self._begin, self._end = 0, have


_Into = Callable[[bytes, Buffer, Buffer, memoryview], object]  # nonce, data, associated data, where to


def _cipher(key: bytes) -> tuple[_Into, _Into]:
    """Make functions that seal and open records; only links between machines import `cryptography`."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(key)

    def seal_by_copy(nonce: bytes, data: Buffer, head: Buffer, place: memoryview) -> None:
        place[:] = cipher.encrypt(nonce, data, head)

    def open_by_copy(nonce: bytes, data: Buffer, head: Buffer, place: memoryview) -> None:
        place[:] = cipher.decrypt(nonce, data, head)

    opening = getattr(cipher, "decrypt_into", open_by_copy)  # older versions return new bytes only

    def open_record(nonce: bytes, data: Buffer, head: Buffer, place: memoryview) -> None:
        try:
            opening(nonce, data, head, place)
        except InvalidTag:
            raise RecordError("a sealed record was changed on the way, or is not the next one") from None

    return getattr(cipher, "encrypt_into", seal_by_copy), open_record


def _record_bytes(buffer_bytes: int) -> int:
    return min(RECORD_BYTES, buffer_bytes // 2 - _OVERHEAD)


def _receive_ready(sock: socket.socket, room: memoryview) -> int:
    try:
        got = sock.recv_into(room, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
    if got == 0:
        raise EOFError("the peer has closed the connection")
    return got


# ---- from TLS to records ----


def seal_as_server(tls: ssl.SSLSocket, send_bytes: int, receive_bytes: int) -> Sealed:
    """Send fresh keys through TLS and continue with sealed records.

    Args:
        tls: after the handshake; the caller sends nothing more before it has the keys. It is detached.
        send_bytes, receive_bytes: sizes of the buffers; the other end has the same, in the other order.
    Returns:
        The link.
    Raises:
        OSError: the connection broke.
    """
    keys = secrets.token_bytes(2 * _KEY_BYTES)
    tls.sendall(_KEYS_MAGIC + keys)
    return Sealed(moved(tls), keys[_KEY_BYTES:], keys[:_KEY_BYTES], send_bytes, receive_bytes)


def seal_as_client(tls: ssl.SSLSocket, until: float, send_bytes: int, receive_bytes: int) -> Sealed:
    """Receive the keys through TLS and continue with sealed records.

    Args:
        tls: after the handshake. It is detached.
        until: when the keys must be there, by the monotonic clock.
        send_bytes, receive_bytes: see `seal_as_server`.
    Returns:
        The link.
    Raises:
        LinkError: the server sends something else.
        OSError: the connection broke, or the keys did not come in time.
    """
    received = b""
    nbytes = len(_KEYS_MAGIC) + 2 * _KEY_BYTES
    while len(received) < nbytes:
        tls.settimeout(max(until - time.monotonic(), 1e-6))
        more = tls.recv(nbytes - len(received))
        if not more:
            raise ConnectionError("the other end closed the connection during the greeting")
        received += more
    if received[: len(_KEYS_MAGIC)] != _KEYS_MAGIC:
        raise LinkError("the peer does not speak this version's sealed records")
    keys = received[len(_KEYS_MAGIC) :]
    return Sealed(moved(tls), keys[:_KEY_BYTES], keys[_KEY_BYTES:], send_bytes, receive_bytes)


def moved(sock: socket.socket) -> socket.socket:
    """Move a connection out of its socket object, and so out of TLS; the new object does not block.

    No TLS record is pending at that time: OpenSSL does not read ahead, and the server, which sends no tickets, has
    sent its last record.
    """
    found = socket.socket(fileno=sock.detach())
    found.setblocking(False)
    return found
