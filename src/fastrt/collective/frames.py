"""A TCP connection between two ranks of different machines: whole frames, each with the operation it belongs to.

The connection is encrypted or not; both ends have proved the group's secret before the first frame.

A frame that belongs to an operation which this side has given up is read and thrown away; one of a later operation
than ours tells that the other side has given ours up. A time that runs out inside a frame makes the connection useless.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from typing import Any

from fastrt._core import stream
from fastrt.errors import CollectiveTimeout

_HEAD = struct.Struct("<QQ")  # operation, bytes of the body
_WASTE_BYTES = 1 << 20
_PROBE_S = 0.5
_RECORD_BYTES = 1 << 14  # of TLS


class Broken(ConnectionError):
    """The other end is gone, or the connection cannot be used any more."""


class Frames:
    """One direction or both of a connected socket; it belongs to this object.

    Args:
        sock: connected; a TLS socket carries frames in one direction only.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._next: tuple[int, int] | None = None  # the head of a frame whose body is still to come
        self._usable = True

    def close(self) -> None:
        """Close the connection; whoever waits on it is woken."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    @property
    def usable(self) -> bool:
        """Whether frames can still be told from each other."""
        return self._usable and self._sock.fileno() >= 0

    def send(self, seq: int, body: Any, timeout: float) -> None:
        """Send a frame.

        Raises:
            CollectiveTimeout: the other end took nothing for so long.
            Broken: it is gone.
        """
        view = memoryview(body).cast("B") if memoryview(body).nbytes else memoryview(b"")
        self._require()
        try:
            head = _HEAD.pack(seq, view.nbytes)
            if self._tls is not None:
                _send_tls(self._tls, head, view, timeout)
            else:
                stream.send_parts(self._sock.fileno(), [head, view], timeout)
        except TimeoutError as error:
            self._usable = False
            raise CollectiveTimeout(str(error)) from None
        except OSError as error:
            raise Broken(str(error)) from None

    def wait(self, seq: int, deadline: float) -> int:
        """Wait for a frame of an operation: the size of its body, which is to be received next.

        Raises:
            CollectiveTimeout: it did not come in time, or the other end has given the operation up.
            Broken: the other end is gone.
        """
        while True:
            found, size = self._head(deadline)
            if found == seq:
                return size
            if found > seq:
                raise CollectiveTimeout(f"operation {seq} was given up by another rank")
            waste = bytearray(min(size, _WASTE_BYTES))
            while size:
                part = memoryview(waste)[:size]
                self._fill(part, deadline)
                size -= len(part)
            self._next = None

    def last_words(self, seq: int, deadline: float) -> bytes | None:
        """The body of a frame of that number, if one is there; None otherwise."""
        if self._next is None or self._next[0] != seq:
            return None
        body = bytearray(self._next[1])
        self._fill(memoryview(body), deadline)
        return bytes(body)

    def receive(self, into: Any, deadline: float) -> None:
        """Receive a part of the body of the frame that `wait` found.

        Raises:
            CollectiveTimeout: it did not come in time; the connection is of no use then.
            Broken: the other end is gone.
        """
        view = memoryview(into)
        if view.nbytes == 0:
            return
        assert self._next is not None
        self._fill(view.cast("B"), deadline)
        seq, size = self._next
        self._next = (seq, size - view.nbytes) if size > view.nbytes else None

    def _head(self, deadline: float) -> tuple[int, int]:
        self._require()
        if self._next is None:
            # Nothing of it has come when the time runs out here: the connection is as good as before.
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            is_there = self._tls is not None and self._tls.pending() > 0
            if not is_there and not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                raise CollectiveTimeout("nothing came in time")
            head = bytearray(_HEAD.size)
            self._fill(memoryview(head), max(deadline, time.monotonic() + 1.0))
            seq, size = _HEAD.unpack(head)
            self._next = seq, size
            if size == 0:
                self._next = None
                return seq, 0
        return self._next

    def _fill(self, view: memoryview, deadline: float) -> None:
        self._require()
        try:
            left = max(deadline - time.monotonic(), 0.001)
            if self._tls is not None:
                _receive_tls(self._tls, view, left)
            else:
                stream.receive_parts(self._sock.fileno(), [view], view.nbytes, left)
        except TimeoutError as error:
            self._usable = False
            raise CollectiveTimeout(str(error)) from None
        except (OSError, EOFError) as error:
            self._usable = False
            raise Broken(str(error)) from None

    def _require(self) -> None:
        if not self.usable:
            raise Broken("the connection was given up in the middle of a message")


def _send_tls(sock: ssl.SSLSocket, head: bytes, body: memoryview, timeout: float) -> None:
    """Send a frame, the head and the begin of the body in one record.

    Raises:
        TimeoutError: the other end took nothing for so long.
    """
    sock.settimeout(timeout)
    begin = _RECORD_BYTES - len(head)
    sock.sendall(head + bytes(body[:begin]))
    if body.nbytes > begin:
        sock.sendall(body[begin:])


def _receive_tls(sock: ssl.SSLSocket, view: memoryview, timeout: float) -> None:
    """Receive exactly so many bytes.

    Raises:
        TimeoutError: nothing came for so long.
        EOFError: the other end is gone.
    """
    sock.settimeout(timeout)
    done = 0
    while done < view.nbytes:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError("the other end is gone")
        done += count


def has_ended(address: tuple[str, int]) -> bool:
    """Whether the process that listened there has ended; a machine that does not answer may be slow."""
    try:
        socket.create_connection(address, _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
