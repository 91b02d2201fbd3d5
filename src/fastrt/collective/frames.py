"""Frames over a TCP connection between two ranks of different machines, each with the number of its operation.

The connection is encrypted or not; both ends have proved the group's secret before the first frame.

A frame of an operation that this rank has given up is read and dropped. A frame of a later operation than this rank's
means that the other rank has given this operation up. A timeout inside a frame makes the connection unusable.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

from fastrt.errors import CollectiveTimeout
from fastrt.net.grpc.sealed import Link

_HEAD = struct.Struct("<QQ")  # operation, bytes of the body
_WASTE_BYTES = 1 << 20
_PROBE_S = 0.5


class Broken(ConnectionError):
    """The peer is gone, or the connection cannot be used any more."""


class Frames:
    """One or both directions of a connection, which this object owns."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next: tuple[int, int] | None = None  # the head of a frame whose body has not been received
        self._usable = True

    def close(self) -> None:
        """Close the connection and wake a thread that waits on it."""
        self._link.shutdown()
        self._link.close()

    @property
    def usable(self) -> bool:
        """Whether the connection is at the boundary of a frame, or inside one that can be continued."""
        return self._usable and self._link.fileno() >= 0

    def send(self, seq: int, body: Any, timeout: float) -> None:
        """Send a frame.

        Raises:
            CollectiveTimeout: the peer read nothing for this long.
            Broken: the peer is gone.
        """
        view = memoryview(body).cast("B") if memoryview(body).nbytes else memoryview(b"")
        self._require()
        try:
            self._link.send([_HEAD.pack(seq, view.nbytes), view], timeout)
        except TimeoutError as error:
            self._usable = False
            raise CollectiveTimeout(str(error)) from None
        except OSError as error:
            raise Broken(str(error)) from None

    def wait(self, seq: int, deadline: float) -> int:
        """Wait for a frame of an operation, and return the size of its body, to be received next.

        Raises:
            CollectiveTimeout: it did not come in time, or the peer has given the operation up.
            Broken: the peer is gone.
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
        """Receive the body of a frame with this number if its head has come, else return None."""
        if self._next is None or self._next[0] != seq:
            return None
        body = bytearray(self._next[1])
        self._fill(memoryview(body), deadline)
        return bytes(body)

    def receive(self, into: Any, deadline: float) -> None:
        """Receive part of the body of the frame that `wait` returned.

        Raises:
            CollectiveTimeout: it did not come in time; the connection is unusable then.
            Broken: the peer is gone.
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
            # After a timeout here nothing of the frame has been read: the connection stays usable.
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            if not self._link.has_begun() and not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
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
            self._link.receive([view], view.nbytes, left)
        except TimeoutError as error:
            self._usable = False
            raise CollectiveTimeout(str(error)) from None
        except (OSError, EOFError) as error:
            self._usable = False
            raise Broken(str(error)) from None

    def _require(self) -> None:
        if not self.usable:
            raise Broken("the connection was given up in the middle of a message")


def has_ended(address: tuple[str, int]) -> bool:
    """Whether the process that listened at an address has ended. A machine that does not answer counts as slow."""
    try:
        socket.create_connection(address, _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
