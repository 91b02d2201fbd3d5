"""Calls between two processes of one user on this machine, over a Unix socket: unary ones, and such that open a stream.

A call over gRPC with TLS takes 0.35 ms between two processes of a machine, and one over a Unix socket without TLS not
much less: it is the work of two HTTP/2 stacks. Here a message is a frame: how long it is, a code, the number of its
call, and the body. The socket lies in a private folder, so that only processes of this user can connect.

`LocalCaller` is a `Caller` as those of `net.grpc`; `LocalServer` passes calls on as they come, on one thread for each
connection. Neither end ever waits for the other one to read: what the socket does not take is sent later.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fastrt.folders import private_files

BODY_BYTES_MAX = 32 << 20
OK, CANCELLED, DEADLINE_EXCEEDED, UNIMPLEMENTED, UNAVAILABLE = 0, 1, 4, 12, 14  # gRPC's codes
_HEAD = struct.Struct("<IIQ")  # bytes of the body; of a request: the method, of an answer: a status code; the number
_BACKLOG_BYTES_MAX = 64 << 20  # of a peer that does not read; it is given up then
_READ_BYTES = 1 << 16
_TICK_S = 1.0
_BACKLOG = 16  # connections that were not accepted yet

Done = Callable[[int, str, bytes], None]


class Wire:
    """One end of a connection; `start` begins to read.

    Args:
        sock: the connection.
        on_frame: called on this object's thread with number, code and body of each frame.
        on_end: called there once, when the connection has ended.
        on_tick: called there about every second.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Wire, int, int, bytes], None],
        on_end: Callable[[Wire], None],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._sock, self._on_frame, self._on_end, self._on_tick = sock, on_frame, on_end, on_tick
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.has_ended = False
        self._thread = threading.Thread(target=self._run, name="fastrt-local", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def send(self, number: int, code: int, body: bytes) -> None:
        """Send a frame after those before; has no effect once the connection has ended."""
        frame = _HEAD.pack(len(body), code, number) + body
        with self._lock:
            if self.has_ended:
                return
            sent = 0
            if not self._unsent:
                try:
                    sent = self._sock.send(frame)
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the thread notices the end
            if sent < len(frame):
                self._unsent += frame[sent:]
                self.has_ended = len(self._unsent) > _BACKLOG_BYTES_MAX
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the connection; wait for the thread, unless this is called on it."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        with self._lock:
            if not self.has_ended:
                self.has_ended = True
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        received = bytearray()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        own, tick_at = self._sock.fileno(), time.monotonic() + _TICK_S
        try:
            while not self.has_ended:
                poll.register(own, select.POLLIN | (select.POLLOUT if self._unsent else 0))
                events = dict(poll.poll(_TICK_S * 1e3))
                if time.monotonic() >= tick_at:
                    tick_at = time.monotonic() + _TICK_S
                    self._on_tick()
                if self._wake in events:
                    os.eventfd_read(self._wake)
                happened = events.get(own, 0)
                if happened & select.POLLOUT and not self._flush():
                    break
                if happened & ~select.POLLOUT and not self._read(received):
                    break
        finally:
            self._end()
            with self._lock:
                self._sock.close()
                os.close(self._wake)
            self._on_end(self)

    def _flush(self) -> bool:
        """Send what the socket takes now; False at the end."""
        with self._lock:
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except BlockingIOError:
                return True
            except OSError:
                return False
            return True

    def _read(self, received: bytearray) -> bool:
        """Read what there is, and pass on the frames that are complete; False at the end."""
        try:
            new = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        received += new
        at = 0
        while len(received) - at >= _HEAD.size and not self.has_ended:
            size, code, number = _HEAD.unpack_from(received, at)
            if size > BODY_BYTES_MAX:
                return False
            if len(received) - at - _HEAD.size < size:
                break
            at += _HEAD.size + size
            self._on_frame(self, number, code, bytes(received[at - size : at]))
        del received[:at]
        return bool(new)


class _Call(NamedTuple):
    """A call that was made: over which connection, until when it may take, and who gets the answer."""

    wire: Wire
    until: float
    receive: Callable[[bytes], None] | None  # of a stream
    done: Done


class LocalCaller:
    """A connection to a `LocalServer`, opened by the first call, and again by the first one after its end.

    Args:
        path: of the server's socket.
        methods: the paths of the methods, in the server's order.
    """

    def __init__(self, path: str, methods: Sequence[str]) -> None:
        self._path = path
        self._methods = {method: k for k, method in enumerate(methods)}
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._closed = False

    def call(self, path: str, body: bytes, timeout_s: float, done: Done, wait_for_ready: bool = False) -> None:
        """Make a unary call; see `net.grpc.caller.Caller`. Without a server it fails at once."""
        self._start(path, body, time.monotonic() + timeout_s, None, done)

    def stream(
        self, path: str, body: bytes, receive: Callable[[bytes], None], done: Callable[[int, str], None]
    ) -> None:
        """Make a call that is answered by a stream; see `net.grpc.caller.Caller`."""
        self._start(path, body, math.inf, receive, lambda code, message, body: done(code, message))

    def _start(self, path: str, body: bytes, until: float, receive: Callable[[bytes], None] | None, done: Done) -> None:
        with self._lock:
            wire, why = self._connected()
            if wire is not None:
                number = next(self._numbers)
                self._calls[number] = _Call(wire, until, receive, done)
                wire.send(number, self._methods[path], body)
                return
        done(UNAVAILABLE, why, b"")

    def is_ready(self) -> bool:
        """Whether the connection is open; it is opened if not."""
        with self._lock:
            return self._connected()[0] is not None

    def close(self) -> None:
        """Cancel all calls, and end the thread. Not to be called by a callback."""
        with self._lock:
            self._closed = True
            wire = self._wire
        if wire is not None:
            wire.close()

    def _connected(self) -> tuple[Wire | None, str]:
        """Return the connection, or why there is none. `_lock` is held."""
        if self._closed:
            return None, "this connection is closed"
        if self._wire is None or self._wire.has_ended:
            with contextlib.ExitStack() as stack:
                try:
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    sock.connect(self._path)
                    self._wire = Wire(sock, self._on_frame, self._on_end, self._on_tick)
                except OSError as error:
                    return None, f"{self._path}: {error.strerror}"
                stack.pop_all()
            self._wire.start()
        return self._wire, ""

    def _on_frame(self, wire: Wire, number: int, code: int, body: bytes) -> None:
        with self._lock:
            call = self._calls.get(number)
            if call is not None and (call.receive is None or code):
                del self._calls[number]
        if call is None:
            return  # it was late
        if code:
            call.done(code, body.decode(errors="replace"), b"")
        elif call.receive is not None:
            call.receive(body)
        else:
            call.done(OK, "", body)

    def _on_tick(self) -> None:
        now = time.monotonic()
        self._end(lambda call: call.until < now, DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _on_end(self, wire: Wire) -> None:
        code, why = (CANCELLED, "this connection is closed") if self._closed else (UNAVAILABLE, "the connection ended")
        self._end(lambda call: call.wire is wire, code, why)

    def _end(self, is_meant: Callable[[_Call], bool], code: int, why: str) -> None:
        with self._lock:
            ended = [number for number, call in self._calls.items() if is_meant(call)]
            calls = [self._calls.pop(number) for number in ended]
        for call in calls:
            call.done(code, why, b"")


class LocalCall:
    """A call that has arrived, or the stream that it opens.

    Args:
        connection: over which it has come: the same object for all calls of one.
        number: the caller's, for answers.

    Attributes:
        on_closed: of a stream: called once when the connection has ended; None: it is no stream.
    """

    def __init__(self, connection: Wire, number: int) -> None:
        self.connection, self._number = connection, number
        self.on_closed: Callable[[], None] | None = None

    def finish(self, code: int = OK, message: str = "", body: bytes = b"") -> None:
        """Answer the call, or end the stream by an error."""
        self.connection.send(self._number, code, body if code == OK else message.encode())

    def send(self, body: bytes) -> None:
        """Send a message of the stream."""
        self.connection.send(self._number, OK, body)


class LocalServer:
    """Serves processes of this user on this machine.

    Args:
        path: of the socket, in a private folder; a file that is there is replaced.
        methods: called with each call and its body, on the thread of its connection; a caller names them by number.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, path: str, methods: Sequence[Callable[[LocalCall, bytes], None]]) -> None:
        self._methods = methods
        self._lock = threading.Lock()
        self._streams: dict[Wire, list[LocalCall]] = {}  # by open connection
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            Path(path).unlink(missing_ok=True)
            with private_files():
                self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="fastrt-local-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        with self._lock:
            wires = list(self._streams)
        for wire in wires:
            wire.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_TICK_S)  # no descriptor is left
                continue
            try:
                wire = Wire(sock, self._on_frame, self._on_end)
            except OSError:  # the same
                sock.close()
                continue
            with self._lock:
                self._streams[wire] = []
            wire.start()

    def _on_frame(self, wire: Wire, number: int, code: int, body: bytes) -> None:
        call = LocalCall(wire, number)
        if code >= len(self._methods):
            call.finish(UNIMPLEMENTED, f"there is no method {code} here")
            return
        self._methods[code](call, body)
        if call.on_closed is not None:
            self._streams[wire].append(call)

    def _on_end(self, wire: Wire) -> None:
        with self._lock:
            streams = self._streams.pop(wire)
        for call in streams:
            if call.on_closed is not None:
                call.on_closed()
