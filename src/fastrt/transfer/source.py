"""The sending side of the native stream: one thread per connection, and objects take turns.

Objects that are requested over one connection are sent in turn, a frame each, so that a small object does not wait for
a large one before it. At most ACTIVE_MAX take turns at once, which also bounds the memory that is pinned here and half
received there. Small objects that are requested together are sent together, in one bundle.

A taker that has given its connection a name also accepts small objects that it did not request. `Source.push` sends one
from the caller's thread, between two batches of the connection's thread, and reads the taker's answer itself: to wake
the connection's thread, and have it wake the caller, would take as long as the network. One thread reads at a time.
While a caller does, the connection's thread sleeps without a watch on the socket, and is woken for requests that the
caller read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastrt._core.transfer import stream
from fastrt.errors import FastrtError, NotFoundError
from fastrt.net.address import family_of, is_loopback, join_address
from fastrt.net.grpc.proof import GREETING_S
from fastrt.net.grpc.sealed import Link
from fastrt.net.grpc.visitors import BACKLOG, hold_silent
from fastrt.shortage import is_short
from fastrt.transfer import link, wire
from fastrt.transfer.table import Sealed, Table
from fastrt.transfer.wire import Frame, Request

if TYPE_CHECKING:
    from fastrt.net.grpc.identity import Identity

_log = logging.getLogger(__name__)

ACTIVE_MAX = 8
_BATCH_BYTES = 4 << 20  # bytes of frames in one call to the kernel: 2 to 8 MiB are fastest
_BATCH_PARTS = stream.PARTS_MAX - 3  # a frame has up to three parts
_CONNECTIONS_MAX = 256
# Connections whose peer has not proved the secret. One more ends the oldest of the host that has most of them: a real
# taker authenticates within milliseconds, and peers at another address cannot take its place.
_GREETINGS_MAX = 64
_PUSHES_MAX = 64  # of a connection that have no answer yet
_COMPLAINT_S = 1.0  # at most one rejection is logged in this time
_OUT_OF_FILES_S = 0.01
_IDLE_S = 3600.0


class _Sending:
    """An object, or a part of one, that is being sent: its pin, the offset of the next frame, and the end."""

    __slots__ = ("checksum", "end", "flags", "objref", "offset", "sealed", "ticket", "total", "view")

    def __init__(self, request: Request, sealed: Sealed, checksum: bool) -> None:
        self.ticket, self.objref, self.offset, end = request
        self.sealed = sealed
        self.total = len(sealed.pin)
        self.end = end or self.total
        self.checksum = checksum
        self.flags = wire.ERROR * sealed.is_error | wire.CHECKED * checksum
        self.view = memoryview(sealed.pin)

    def next_frame(self, parts: list[object]) -> int:
        """Append the parts of the next frame; returns its bytes of data."""
        start, refs = self.offset, self.sealed.refs if self.offset == 0 else []
        length = min(self.end - start, wire.FRAME_BYTES)
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


class _Peer:
    """A connected peer: a handle to end its connection from another thread, and the thread that serves it."""

    __slots__ = ("handle", "host", "thread")

    def __init__(self, sock: socket.socket, host: str, serve: Callable[[_Peer, socket.socket], None]) -> None:
        # TLS takes over the socket object; both share one file.
        self.handle = sock.dup()
        self.host = host
        self.thread = threading.Thread(target=serve, args=(self, sock), name="fastrt-source-stream", daemon=True)

    def end(self) -> None:
        with contextlib.suppress(OSError):  # the peer has ended it already
            self.handle.shutdown(socket.SHUT_RDWR)


class Source:
    """Sends the objects of a table to processes of the same cluster.

    Within one machine the stream is in the clear, between machines it is sealed; see `fastrt.transfer.link`.

    Args:
        table: the objects.
        identity: the cluster's identity; peers must prove its secret.
        host: the address to listen on.
        port: the port; 0 for any.
        insecure: stay in the clear between machines too.
        timeout_s: how long a taker may accept no byte before its connection is closed.
        tls_on_loopback: use TLS within this machine too, for takers that connect through a tunnel.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        table: Table,
        identity: Identity,
        host: str = "127.0.0.1",
        port: int = 0,
        insecure: bool = False,
        timeout_s: float = 30.0,
        tls_on_loopback: bool = False,
    ) -> None:
        self._table = table
        self._identity = identity
        self._insecure = insecure
        self._tls_on_loopback = tls_on_loopback
        self._timeout_s = timeout_s
        self._listener = socket.create_server((host, port), family=family_of(host), backlog=BACKLOG)
        hold_silent(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self.address = join_address(host, self.port)
        if insecure and not is_loopback(self.address):
            _log.warning(
                "the native stream at %s is in the clear (--insecure): anyone who can read or change packets on that "
                "network can read and change the objects, and so run code here",
                self.address,
            )
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._greetings: dict[_Peer, None] = {}  # those that have not proved the secret, oldest first
        self._named: dict[int, _Connection] = {}  # that accept objects unasked
        self._next_complaint = 0.0
        self._unsaid = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name="fastrt-source", daemon=True)
        self._thread.start()

    def push(self, name: int, objref: int, sealed: Sealed, timeout_s: float) -> bool:
        """Send a small object without references to the taker whose connection has this name.

        Args:
            name: the number that the taker was asked to give its connection.
            objref: the cluster's name of the object.
            sealed: its bytes, at most `wire.SMALL_BYTES`.
            timeout_s: of the answer.
        Returns:
            Whether the taker has the object. If not, request that it fetch it.
        """
        with self._lock:
            taker = self._named.get(name)
        return taker is not None and taker.push(objref, sealed, timeout_s)

    def close(self) -> None:
        """Accept no more connections, close the open ones, and wait for their threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            peers = list(self._peers)
            for peer in peers:
                peer.end()
        for peer in peers:
            peer.thread.join()

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                sock, name = self._listener.accept()
            except OSError as exc:
                if is_short(exc):
                    with self._lock:  # descriptors of unauthenticated peers are released first
                        self._end_one_greeting()
                    self._closing.wait(_OUT_OF_FILES_S)
                continue
            while not self._take_in(sock, name[0]):
                self._closing.wait(_OUT_OF_FILES_S)

    def _take_in(self, sock: socket.socket, host: str) -> bool:
        """Serve a connection, or close it. False when it must wait for a descriptor of an unauthenticated peer."""
        with self._lock:
            if self._closing.is_set() or len(self._peers) - len(self._greetings) >= _CONNECTIONS_MAX:
                sock.close()
                return True
            if len(self._greetings) >= _GREETINGS_MAX:
                self._end_one_greeting()
            try:
                self._let_in(sock, host)
            except (OSError, RuntimeError):  # no descriptor or thread is left
                if self._end_one_greeting():
                    return False
                sock.close()
            return True

    def _let_in(self, sock: socket.socket, host: str) -> None:
        """Serve a connection on a new thread, under the lock."""
        peer = _Peer(sock, host, self._serve)
        try:
            peer.thread.start()
        except RuntimeError:
            peer.handle.close()
            raise
        self._peers.add(peer)  # the thread needs the lock to remove itself
        self._greetings[peer] = None

    def _end_one_greeting(self) -> bool:
        """End the oldest unauthenticated connection of the host that has most of them, under the lock."""
        if not self._greetings:
            return False
        crowded = Counter(peer.host for peer in self._greetings).most_common(1)[0][0]
        oldest = next(peer for peer in self._greetings if peer.host == crowded)
        oldest.end()
        del self._greetings[oldest]
        return True

    def _serve(self, peer: _Peer, sock: socket.socket) -> None:
        """Serve one connection to its end."""
        made: Link | None = None
        connection: _Connection | None = None
        try:
            timeout_s = min(self._timeout_s, GREETING_S)
            made = link.accept(sock, self._identity, self._insecure, timeout_s, self._tls_on_loopback)
            with self._lock:
                self._greetings.pop(peer, None)
            opening = bytearray(wire.OPENING.size)
            made.receive([opening], len(opening), timeout_s)
            connection = _Connection(self._table, made, wire.read_opening(opening), self._timeout_s, self._named_as)
            connection.run()
        except (OSError, EOFError):
            pass  # the taker is gone, or will notice and request again over a new connection
        except Exception as exc:  # log its text only: the frames of a traceback would show the data being sent
            self._complain(peer.host, str(exc) if isinstance(exc, FastrtError) else repr(exc))
        finally:
            with self._lock:
                self._greetings.pop(peer, None)
                self._peers.discard(peer)
                if connection is not None and self._named.get(connection.name) is connection:
                    del self._named[connection.name]
                peer.handle.close()
            if connection is not None:
                connection.end_pushes()
            (made or sock).close()

    def _named_as(self, connection: _Connection) -> None:
        with self._lock:
            self._named[connection.name] = connection

    def _complain(self, host: str, why: str) -> None:
        """Log why a connection ended, at a limited rate, so that repeated attempts cannot fill the log."""
        with self._lock:
            if time.monotonic() < self._next_complaint:
                self._unsaid += 1
                return
            self._next_complaint = time.monotonic() + _COMPLAINT_S
            unsaid, self._unsaid = self._unsaid, 0
        more = f" ({unsaid} more since the last such message)" if unsaid else ""
        _log.warning("a native stream from %s was rejected or ended: %s%s", host, why, more)


class _Connection:
    """The loop of one connection: requests in, frames out.

    Attributes:
        name: that the taker has given it; 0: none.
    """

    def __init__(
        self, table: Table, made: Link, checksum: bool, timeout_s: float, named: Callable[[_Connection], None]
    ) -> None:
        self.name = 0
        self._named = named
        self._sending = threading.Lock()  # held while something is sent
        self._reading = threading.Lock()  # held while something is received and taken
        self._pushes = threading.Lock()  # guards the next four
        self._pushed: dict[int, queue.SimpleQueue[bool]] = {}  # where the answers to pushed objects go, by ticket
        self._ended = False
        self._poll: select.epoll | None = None  # what the connection's thread sleeps in, once it has a name
        self._is_lent = False  # a pushing thread reads
        self._error: wire.WireError | None = None  # found by a pushing thread
        self._tickets = itertools.count()
        self._table = table
        self._link = made
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

    def push(self, objref: int, sealed: Sealed, timeout_s: float) -> bool:
        """Send an object unasked; whether the taker has it. Called on other threads than the connection's."""
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        size = len(sealed.pin)
        with self._pushes:
            if self._ended or len(self._pushed) >= _PUSHES_MAX:
                return False
            ticket = next(self._tickets) & 0xFFFFFFFF
            self._pushed[ticket] = answer
            reads = self._poll is not None and not self._is_lent
            if reads:
                self._is_lent = True
                self._watch(0)
        crc = stream.crc32c(sealed.pin) if self._checksum else 0
        flags = wire.ERROR * sealed.is_error | wire.CHECKED * self._checksum
        head = wire.pack_frame(Frame(wire.PUSH, sealed.kind, flags, 0, ticket, objref, size, 0, size, crc))
        try:
            self._send([head, sealed.pin])
            if reads:
                self._read_until(answer, time.monotonic() + timeout_s)
            return answer.get(timeout=0.0 if reads else timeout_s)
        except (OSError, EOFError, queue.Empty):
            self._link.shutdown()  # part of a frame may have been sent, and an answer may come later
            return False
        finally:
            if reads:
                self._stop_reading()

    def _read_until(self, answer: queue.SimpleQueue[bool], until: float) -> None:
        """Receive on a pushing thread until its answer has come; `until`: by the monotonic clock."""
        with self._reading:
            while answer.empty():
                got = self._link.receive([self._room()], 1, max(0.0, until - time.monotonic()))
                try:
                    self._take_all(got)
                except wire.WireError as exc:  # the connection's thread ends the connection, and reports it
                    self._error = exc
                    return
                if self._asked:
                    with self._pushes:
                        self._watch(select.EPOLLOUT)

    def _stop_reading(self) -> None:
        """Have the connection's thread read again; wake it if something that was read is left to it."""
        with self._pushes:
            self._is_lent = False
            is_left = self._asked or self._filled or self._error or self._link.has_begun()
            self._watch(select.EPOLLIN | select.EPOLLOUT if is_left else select.EPOLLIN)

    def _watch(self, events: int) -> None:
        """Set what the connection's thread wakes for, under the lock; EPOLLOUT wakes it at once."""
        if self._poll is not None and not self._ended:
            self._poll.modify(self._link.fileno(), events)

    def end_pushes(self) -> None:
        """Answer the objects that have no answer: the connection has ended."""
        with self._pushes:
            self._ended = True
            if self._poll is not None:
                self._poll.close()
            answers = list(self._pushed.values())
            self._pushed.clear()
        for answer in answers:
            answer.put(False)

    def _send(self, parts: list[object]) -> None:
        with self._sending:
            self._link.send(parts, self._timeout_s)

    def _send_batch(self) -> None:
        """Send some frames; their memory is released before the next wait."""
        parts: list[object] = []
        nbytes = self._bundle(parts) if len(self._asked) > 1 else 0
        while nbytes < _BATCH_BYTES and len(parts) < _BATCH_PARTS:
            while self._asked and len(self._active) < ACTIVE_MAX and len(parts) < _BATCH_PARTS:
                if (self._active or parts) and not self._table.is_at_hand(self._asked[0].objref):
                    break  # the objects pinned here may fill the room that restoring it needs
                self._start(parts)
            if not self._active or len(parts) >= _BATCH_PARTS:
                break
            sending = self._active.popleft()
            nbytes += sending.next_frame(parts)
            if sending.offset < sending.end:
                self._active.append(sending)
        if parts:
            self._send(parts)

    def _bundle(self, parts: list[object]) -> int:
        """Append a bundle of the small objects among the requests; returns its bytes of data.

        They overtake large objects, and those that cannot be sent at once.
        """
        asked = list(itertools.islice(self._asked, wire.BUNDLE_MAX))
        pins = self._table.read_many([request.objref for request in asked], wire.SMALL_BYTES, wire.FRAME_BYTES)
        entries = []
        data: list[object] = []
        left = []
        for request, found in zip(asked, pins, strict=True):
            if found is None or request.offset or request.end:
                left.append(request)
                continue
            kind, is_error, pin = found
            crc = stream.crc32c(pin) if self._checksum else 0
            flags = wire.ERROR * is_error | wire.CHECKED * self._checksum
            entries.append(wire.Entry(request.ticket, kind, flags, request.objref, len(pin), crc))
            data.append(pin)
        if len(entries) < 2:
            return 0  # a single one is sent like any other object
        for _ in asked:
            self._asked.popleft()
        self._asked.extendleft(reversed(left))
        parts.append(wire.pack_bundle(entries))
        parts += data
        return sum(entry.total for entry in entries)

    def _start(self, parts: list[object]) -> None:
        """Pin the next requested object, or send the reason why it cannot be sent."""
        request = self._asked.popleft()
        ticket, objref, offset, end = request
        try:
            sealed = self._table.read(objref)
            size = len(sealed.pin)
            if (offset or end) and not offset < (end or size) <= size:
                raise FastrtError(f"object {objref:#x} has {size} bytes, not those from {offset} to {end or size}")
        except FastrtError as exc:
            status = wire.ABSENT if isinstance(exc, NotFoundError) else wire.REFUSED
            text = str(exc).encode()[: wire.TEXT_BYTES_MAX]
            parts.append(wire.pack_frame(Frame(status, 0, 0, 0, ticket, objref, 0, 0, len(text), 0)) + text)
        else:
            self._active.append(_Sending(request, sealed, self._checksum))

    def _read_requests(self) -> None:
        """Read the requests that have arrived; wait for one when there is nothing to send."""
        if self._error is not None:
            raise self._error
        is_idle = not (self._active or self._asked)
        if self._poll is None and is_idle:
            with self._reading:
                self._take_all(self._receive_patiently(self._room()))
        elif not self._read_ready() and is_idle:
            self._wait_patiently(self._poll)

    def _read_ready(self) -> bool:
        """Read the requests that have arrived, unless a pushing thread reads; return whether there were bytes."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            got = self._link.receive_ready(self._room())
            self._take_all(got)
            return got > 0
        finally:
            self._reading.release()

    def _wait_patiently(self, poll: select.epoll | None) -> None:
        """Wait for something to read or to send, as long as `_receive_patiently` would."""
        assert poll is not None
        begun = self._filled > 0 or self._link.has_begun()
        events = poll.poll(self._timeout_s if begun else _IDLE_S)
        if not events and begun and not self._is_lent:
            raise TimeoutError("the taker has sent a part of a request only")
        if any(event & select.EPOLLOUT for _, event in events):
            with self._pushes:
                self._watch(0 if self._is_lent else select.EPOLLIN)

    def _room(self) -> memoryview:
        """The free part of the buffer for requests."""
        return memoryview(self._inbox)[self._filled :]

    def _take_all(self, got: int) -> None:
        """Take the complete requests in the buffer, after `got` more bytes have come."""
        self._filled += got
        whole = self._filled - self._filled % wire.REQUEST.size
        for at in range(0, whole, wire.REQUEST.size):
            self._take(*wire.read_request(self._inbox, at))
        if len(self._asked) + len(self._active) > wire.REQUESTS_MAX:
            raise wire.WireError(f"the taker has more than {wire.REQUESTS_MAX} requests open")
        self._inbox[: self._filled - whole] = self._inbox[whole : self._filled]
        self._filled -= whole

    def _take(self, magic: bytes, request: Request) -> None:
        """Take a request, a name or an answer."""
        if magic == wire.REQUEST_MAGIC:
            self._asked.append(request)
        elif magic == wire.NAME_MAGIC:
            if self.name or not request.objref:
                raise wire.WireError("the taker gives its connection no name, or a second one")
            self.name = request.objref
            self._poll = select.epoll()
            self._poll.register(self._link.fileno(), select.EPOLLIN)
            self._named(self)
        else:
            with self._pushes:
                answer = self._pushed.pop(request.ticket, None)
            if answer is None:
                raise wire.WireError(f"the taker answers for object {request.objref:#x}, which was not sent")
            answer.put(request.offset == wire.TAKEN)

    def _receive_patiently(self, room: memoryview) -> int:
        """Wait for the next request without a limit, but with the usual timeout once its first byte has arrived."""
        while True:
            begun = self._filled > 0 or self._link.has_begun()
            try:
                return self._link.receive([room], 1, self._timeout_s if begun else _IDLE_S)
            except TimeoutError:
                if begun:
                    raise  # a taker may keep its connection idle; keep-alive detects one that vanished
