"""Frames between a front and its keeper, over two socket pairs.

The first pair is a request and response channel: the front sends a batch of calls, closed by an END, and the keeper
sends the answers that the batch caused, closed by an END. The second pair goes one way: answers that deadlines caused.

Both ends are one installation of fastrt, started together, so there is no version in a frame:

    u8 kind | u8 code | u16 path | u64 call | u32 message length | u32 details length | u32 body length
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

SETTINGS, READY, CALL, WRITE, ASIDE, FORGET, STOP, KEY, REPLY, END, FULL, FAILED = range(12)
# The values of `code` in a KEY.
NO_VALUE, WITH_VALUE, LONG_VALUE = range(3)

_HEADER = struct.Struct("<BBHQIII")
_TIME = struct.Struct("<d")
_READ_BYTES = 1 << 18


class Frame(NamedTuple):
    """One frame; the meaning of its fields depends on `kind`.

    SETTINGS: body is JSON. READY: call is the service's incarnation, details the number of the last WRITE as text,
    code 1 when KEYs of all keys were sent before it.
    CALL: path is an index of `core.PATHS`, body the request, details the `packed_time` at which the front received it.
    WRITE: a key that the front has set and logged: call is its number in the log, message the key, body the value.
    ASIDE: the front waits for no answer to this batch. FORGET: call.
    KEY: message is a key, code one of NO_VALUE, WITH_VALUE (its body) and LONG_VALUE (too long to be sent).
    REPLY: call, code, message, details, body. STOP and END carry nothing.
    FULL: the keeper's disk is full (code 1) or has room again (code 0). The front sets no keys itself meanwhile.
    FAILED: the keeper ends; message says why, code 1 when the reason is damaged state.
    """

    kind: int
    call: int = 0
    path: int = 0
    code: int = 0
    message: bytes = b""
    details: bytes = b""
    body: bytes = b""

    def pack(self) -> bytes:
        """The frame's bytes."""
        lengths = (len(self.message), len(self.details), len(self.body))
        header = _HEADER.pack(self.kind, self.code, self.path, self.call, *lengths)
        return b"".join((header, self.message, self.details, self.body))


END_BYTES = Frame(END).pack()


def packed_time() -> bytes:
    """The current time, by the clock that all processes of one machine share."""
    return _TIME.pack(time.monotonic())


def seconds_since(packed: bytes) -> float:
    """The seconds since a `packed_time`."""
    return max(0.0, time.monotonic() - float(_TIME.unpack(packed)[0]))


class LinkClosed(Exception):
    """Raised when the other end of a link is closed. It never leaves the front and the keeper."""


class Link:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()
        self._ready: list[Frame] = []
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def read(self, timeout_s: float | None = None) -> list[Frame]:
        """The received frames, [] at the timeout.

        Raises:
            LinkClosed: the other end is gone.
        """
        if self._ready:
            frames, self._ready = self._ready, []
            return frames
        try:
            data = self._receive(timeout_s)
        except TimeoutError:
            return []
        except OSError as error:
            raise LinkClosed from error
        if not data:
            raise LinkClosed
        self._buffer += data
        return list(self._whole_frames())

    def read_batch(self, timeout_s: float | None = None) -> list[Frame] | None:
        """The frames before the next END; None when no byte was received before the timeout.

        Raises:
            LinkClosed: the other end is gone.
        """
        batch = self.read(timeout_s)
        if not batch and not self._buffer:
            return None
        while not any(frame.kind == END for frame in batch):
            batch += self.read(None)
        end = next(index for index, frame in enumerate(batch) if frame.kind == END)
        self._ready = batch[end + 1 :]
        return batch[:end]

    def write(self, data: bytes) -> None:
        """Send packed frames.

        Raises:
            LinkClosed: the other end is gone.
        """
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise LinkClosed from error

    def close(self) -> None:
        """Close this end; the other one reads the end of the stream."""
        self.socket.close()

    def _receive(self, timeout_s: float | None) -> bytes:
        # No spinning before the sleep: on an idle machine it saves 20 of 30 us a hop, but beside other work the kernel
        # takes that time back: a hop that sleeps takes 12 us, and one that spins at both ends 600.
        if timeout_s is not None and not self._poll.poll(timeout_s * 1000):
            raise TimeoutError
        return self.socket.recv(_READ_BYTES)

    def _whole_frames(self) -> Iterator[Frame]:
        buffer, start = self._buffer, 0
        size = _HEADER.size
        while len(buffer) - start >= size:
            kind, code, path, call, *lengths = _HEADER.unpack_from(buffer, start)
            end = start + size + sum(lengths)
            if len(buffer) < end:
                break
            message_end = start + size + lengths[0]
            details_end = message_end + lengths[1]
            message = bytes(buffer[start + size : message_end])
            details = bytes(buffer[message_end:details_end])
            yield Frame(kind, call, path, code, message, details, bytes(buffer[details_end:end]))
            start = end
        del buffer[:start]
