"""Frames of the parameter-server cluster's TCP connections: a 16-byte header, the meta message, the data.

The header is three little-endian numbers: the kind of data, the meta's length, and the length of meta and data
together. It has neither a magic number nor a version, so a connection with one invalid header cannot be used any more:
the parser raises, and the connection must be closed. Parsing is incremental and looks at each byte once.

Source: MindSpore's `ps/core/communicator/message.h` and `tcp_message_handler.cc`. There a wrong header, or a frame
without a body, blocks the connection.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

from fastrt.errors import FastrtError

HEADER = struct.Struct("<IIQ")
# A frame may hold a whole parameter; upstream's limit is just under 4 GiB.
FRAME_BYTES_MAX = (1 << 32) - 2
# The meta has seven small fields; upstream sends no others.
META_BYTES_MAX = 4096


class Kind(enum.IntEnum):
    """Encoding of a frame's data."""

    RAW = 0
    PROTOBUF = 1
    FLATBUFFERS = 2


class FramingError(FastrtError):
    """The peer of a connection does not speak the cluster's framing. Close the connection."""


class Frame(NamedTuple):
    """One message with its header fields.

    Attributes:
        kind: encoding of the data, one of `Kind`.
        meta: a serialised `MessageMeta`.
        data: the payload.
    """

    kind: int
    meta: bytes
    data: bytes

    def head(self) -> bytes:
        """Header and meta, which precede the data on the wire."""
        return HEADER.pack(self.kind, len(self.meta), len(self.meta) + len(self.data)) + self.meta

    def pack(self) -> bytes:
        """The whole frame as bytes, in one copy."""
        return self.head() + self.data


class Parser:
    """Splits the bytes of one connection, which come in pieces of any size, into frames.

    Args:
        frame_bytes_max: largest frame accepted, without its header.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = min(frame_bytes_max, FRAME_BYTES_MAX)
        self._buffer = bytearray()
        self._header: tuple[int, int, int] | None = None

    def feed(self, piece: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Add a piece and yield the frames that it completes. The buffer grows with received bytes, not announced ones.

        Raises:
            FramingError: a header is invalid. Frames before it have been yielded.
        """
        self._buffer += piece
        at = 0
        try:
            while True:
                if self._header is None:
                    if len(self._buffer) - at < HEADER.size:
                        return
                    self._header = self._checked(HEADER.unpack_from(self._buffer, at))
                    at += HEADER.size
                kind, meta_bytes, total_bytes = self._header
                if len(self._buffer) - at < total_bytes:
                    return
                with memoryview(self._buffer) as view:
                    meta = bytes(view[at : at + meta_bytes])
                    data = bytes(view[at + meta_bytes : at + total_bytes])
                at += total_bytes
                self._header = None
                yield Frame(kind, meta, data)
        finally:
            del self._buffer[:at]

    def is_torn(self) -> bool:
        """Whether the last frame is incomplete: a connection that ends here has lost data."""
        return self._header is not None or bool(self._buffer)

    def _checked(self, header: tuple[int, int, int]) -> tuple[int, int, int]:
        kind, meta_bytes, total_bytes = header
        if kind > Kind.FLATBUFFERS:
            raise FramingError(f"a frame of kind {kind} came; the known ones are 0 to 2. Is the peer a cluster node?")
        if total_bytes == 0:
            raise FramingError("a frame without meta and data came; a request needs a request_id of 1 or more.")
        if meta_bytes > total_bytes:
            raise FramingError(f"a frame of {total_bytes} bytes claims {meta_bytes} bytes of meta.")
        if meta_bytes > META_BYTES_MAX:
            raise FramingError(f"a frame claims {meta_bytes} bytes of meta; at most {META_BYTES_MAX} are accepted.")
        if total_bytes > self._frame_bytes_max:
            raise FramingError(f"a frame of {total_bytes} bytes came; at most {self._frame_bytes_max} are accepted.")
        return header
