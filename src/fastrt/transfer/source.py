"""The side of the native stream that has the objects: one thread a connection, objects take turns.

Several objects that were asked for over one connection are sent a frame each in turn, so that a small one does not
wait for a large one before it; at most ACTIVE_MAX at once, which also bounds what is pinned here and half received
there. Small objects that were asked for together leave together, in one bundle.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import socket
import struct
import threading
from collections import deque

from fastrt._core import stream
from fastrt.errors import FastrtError, NotFoundError
from fastrt.rpc.auth import refuse_clear_bind
from fastrt.transfer import wire
from fastrt.transfer.table import Sealed, Table
from fastrt.transfer.wire import Frame, Request

_log = logging.getLogger(__name__)

ACTIVE_MAX = 8
_BATCH_BYTES = 4 << 20  # of frames in one call to the kernel: 2 to 8 MiB are fastest
_BATCH_PARTS = stream.PARTS_MAX - 3  # a frame has up to three parts
_CONNECTIONS_MAX = 256
# Of connections that have not shown the token. One more ends the one that has been silent for longest: a true taker
# needs a millisecond for its greeting, so strangers who hold all of these do not keep it out.
_GREETINGS_MAX = 32
_BACKLOG = 64
_OUT_OF_FILES_S = 0.1


class _Sending:
    """An object on its way out: pinned, and how much of it has gone."""

    __slots__ = ("checksum", "flags", "objref", "offset", "sealed", "ticket", "total", "view")

    def __init__(self, request: Request, sealed: Sealed, checksum: bool) -> None:
        self.ticket, self.objref, self.offset = request
        self.sealed = sealed
        self.total = len(sealed.pin)
        self.checksum = checksum
        self.flags = wire.ERROR * sealed.is_error | wire.CHECKED * checksum
        self.view = memoryview(sealed.pin)

    def next_frame(self, parts: list[object]) -> int:
        """Append the parts of the next frame; how many bytes of data it has."""
        start, refs = self.offset, self.sealed.refs if self.offset == 0 else []
        length = min(self.total - start, wire.FRAME_BYTES)
        data = self.view[start : start + length]
        names = struct.pack(f"<{len(refs)}Q", *refs)
        crc = stream.crc32c(data, stream.crc32c(names)) if self.checksum else 0
        kind, objref, total = self.sealed.kind, self.objref, self.total
        frame = Frame(wire.OK, kind, self.flags, len(refs), self.ticket, objref, total, start, length, crc)
        parts.append(wire.pack_frame(frame))
        if refs:
            parts.append(names)
        parts.append(data)
        self.offset += length
        return length


class Source:
    """Gives the objects of a table to whoever connects and knows the session's token.

    Args:
        table: the objects.
        token: the session's.
        host: where to listen.
        port: 0 for any.
        insecure: listen beyond loopback although nothing is encrypted.
        timeout_s: how long a taker may take no byte at all before its connection is given up.

    Raises:
        InsecureBindError: the host can be reached from elsewhere, and nobody said that this is meant.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        table: Table,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        insecure: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        refuse_clear_bind(f"{host}:{port}", None, insecure)
        self._table = table
        self._token = token
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._greetings: dict[socket.socket, None] = {}  # those that have not shown the token, oldest first
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name="fastrt-source", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, break those that are open, and wait for their threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
            for sock in connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in connections.values():
            thread.join()

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._closing.wait(_OUT_OF_FILES_S)
                continue
            with self._lock:
                if self._closing.is_set() or len(self._connections) - len(self._greetings) >= _CONNECTIONS_MAX:
                    sock.close()
                    continue
                self._make_room()
                thread = threading.Thread(target=self._serve, args=(sock,), name="fastrt-source-stream", daemon=True)
                self._connections[sock] = thread
                self._greetings[sock] = None
                thread.start()

    def _make_room(self) -> None:
        """Under the lock: let one more stranger in, in place of the one that has been here for longest."""
        if len(self._greetings) >= _GREETINGS_MAX:
            oldest = next(iter(self._greetings))
            with contextlib.suppress(OSError):  # it has hung up itself
                oldest.shutdown(socket.SHUT_RDWR)
            del self._greetings[oldest]

    def _serve(self, sock: socket.socket) -> None:
        """One connection, to its end."""
        try:
            wire.prepare(sock)
            checksum = wire.accept(sock, self._token, min(self._timeout_s, wire.HANDSHAKE_S))
            with self._lock:
                self._greetings.pop(sock, None)
            _Connection(self._table, sock, checksum, self._timeout_s).run()
        except (OSError, EOFError):
            pass  # the taker has gone, or will find out; it asks again over a new connection
        except wire.WireError as exc:  # its text only: a log may be kept, and its frames show what was being sent
            _log.warning("a native stream was refused: %s", str(exc))
        except FastrtError as exc:
            _log.warning("a native stream ended: %s", str(exc))
        finally:
            with self._lock:
                self._greetings.pop(sock, None)
                del self._connections[sock]
                sock.close()


class _Connection:
    """The loop of one connection: requests in, frames out."""

    def __init__(self, table: Table, sock: socket.socket, checksum: bool, timeout_s: float) -> None:
        self._table = table
        self._sock = sock
        self._fd = sock.fileno()
        self._checksum = checksum
        self._timeout_s = timeout_s
        self._active: deque[_Sending] = deque()
        self._asked: deque[Request] = deque()
        self._inbox = bytearray(wire.REQUEST.size * wire.REQUESTS_MAX)
        self._filled = 0

    def run(self) -> None:
        while True:
            self._read_requests()
            self._send_batch()

    def _send_batch(self) -> None:
        """Send some frames. What they show is let go of before the next wait."""
        parts: list[object] = []
        nbytes = self._bundle(parts) if len(self._asked) > 1 else 0
        while nbytes < _BATCH_BYTES and len(parts) < _BATCH_PARTS:
            while self._asked and len(self._active) < ACTIVE_MAX and len(parts) < _BATCH_PARTS:
                self._start(parts)
            if not self._active or len(parts) >= _BATCH_PARTS:
                break
            sending = self._active.popleft()
            nbytes += sending.next_frame(parts)
            if sending.offset < sending.total:
                self._active.append(sending)
        if parts:
            stream.send_parts(self._fd, parts, self._timeout_s)

    def _bundle(self, parts: list[object]) -> int:
        """Append small objects that were asked for, all in one; how many bytes of data they have.

        They overtake what is large, or cannot be sent at once.
        """
        asked = list(itertools.islice(self._asked, wire.BUNDLE_MAX))
        pins = self._table.read_many([request.objref for request in asked], wire.SMALL_BYTES, wire.FRAME_BYTES)
        entries = []
        data: list[object] = []
        left = []
        for request, found in zip(asked, pins, strict=True):
            if found is None or request.offset:
                left.append(request)
                continue
            kind, is_error, pin = found
            crc = stream.crc32c(pin) if self._checksum else 0
            flags = wire.ERROR * is_error | wire.CHECKED * self._checksum
            entries.append(wire.Entry(request.ticket, kind, flags, request.objref, len(pin), crc))
            data.append(pin)
        if len(entries) < 2:
            return 0  # one alone goes as any other object does
        for _ in asked:
            self._asked.popleft()
        self._asked.extendleft(reversed(left))
        parts.append(wire.pack_bundle(entries))
        parts += data
        return sum(entry.total for entry in entries)

    def _start(self, parts: list[object]) -> None:
        """Pin the next object that was asked for; or say why it cannot be had."""
        request = self._asked.popleft()
        ticket, objref, offset = request
        try:
            sealed = self._table.read(objref)
            if offset > len(sealed.pin) or (offset == len(sealed.pin) and offset):
                raise FastrtError(f"object {objref:#x} has {len(sealed.pin)} bytes, none from {offset} on")
        except FastrtError as exc:
            status = wire.ABSENT if isinstance(exc, NotFoundError) else wire.REFUSED
            text = str(exc).encode()[: wire.TEXT_BYTES_MAX]
            parts.append(wire.pack_frame(Frame(status, 0, 0, 0, ticket, objref, 0, 0, len(text), 0)) + text)
        else:
            self._active.append(_Sending(request, sealed, self._checksum))

    def _read_requests(self) -> None:
        """Take what has come; wait for some when there is nothing else to do."""
        room = memoryview(self._inbox)[self._filled :]
        if self._active or self._asked:
            try:
                got = self._sock.recv_into(room)
            except BlockingIOError:
                return
            if got == 0:
                raise EOFError("the taker has closed the connection")
        else:
            got = self._receive_patiently(room)
        self._filled += got
        whole = self._filled - self._filled % wire.REQUEST.size
        for at in range(0, whole, wire.REQUEST.size):
            self._asked.append(wire.read_request(self._inbox, at))
        if len(self._asked) + len(self._active) > wire.REQUESTS_MAX:
            raise wire.WireError(f"the taker has more than {wire.REQUESTS_MAX} requests open")
        self._inbox[: self._filled - whole] = self._inbox[whole : self._filled]
        self._filled -= whole

    def _receive_patiently(self, room: memoryview) -> int:
        """Wait for the next request as long as the taker likes; but once it has begun, not for ever."""
        if self._filled == 0:
            while True:
                try:
                    got = stream.receive_parts(self._fd, [room], 1, 3600.0)
                    break
                except TimeoutError:
                    continue  # a taker may keep its connection; one that has vanished is noticed by keep-alive
            return got
        return stream.receive_parts(self._fd, [room], 1, self._timeout_s)
