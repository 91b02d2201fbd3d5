"""Frames of the parameter-server cluster's TCP connections: a 16-byte header, the meta message, the data.

The header is three little-endian numbers: the kind of data, the meta's length, and the length of meta and data
together. There is neither a magic number nor a version in it, so a connection on which one header makes no sense is
lost: the parser raises, and the connection is to be closed. Parsing is incremental and looks at each byte once.

Source: MindSpore's `ps/core/communicator/message.h` and `tcp_message_handler.cc`. There a wrong header, or a frame
without a body, wedges the connection.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

from fastrt.errors import FastrtError

HEADER = struct.Struct("<IIQ")
# A whole parameter may be in one frame; upstream takes just under 4 GiB.
FRAME_BYTES_MAX = (1 << 32) - 2
# Seven small fields; upstream puts nothing else there.
META_BYTES_MAX = 4096


class Kind(enum.IntEnum):
    """What a frame's data is."""

    RAW = 0
    PROTOBUF = 1
    FLATBUFFERS = 2


class FramingError(FastrtError):
    """The other end of a connection does not speak the cluster's framing. Close the connection."""


class Frame(NamedTuple):
    """One message as it travels.

    Attributes:
        kind: of the data.
        meta: a serialised `MessageMeta`.
        data: the message's own bytes.
    """

    kind: int
    meta: bytes
    data: bytes

    def head(self) -> bytes:
        """Header and meta: what precedes the data on the wire."""
        return HEADER.pack(self.kind, len(self.meta), len(self.meta) + len(self.data)) + self.meta

    def pack(self) -> bytes:
        """The whole frame, in one copy."""
        return self.head() + self.data


class Parser:
    """Takes the bytes of one connection as they come, in pieces of any size, and gives whole frames.

    Args:
        frame_bytes_max: largest frame taken, without its header.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = min(frame_bytes_max, FRAME_BYTES_MAX)
        self._buffer = bytearray()
        self._header: tuple[int, int, int] | None = None

    def feed(self, piece: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take a piece; yields the frames that it completes. The buffer grows with what came, not with what is said.

        Raises:
            FramingError: a header makes no sense. Frames before it have been yielded.
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
        """Whether a frame has begun and not ended: the connection must not end here."""
        return self._header is not None or bool(self._buffer)

    def _checked(self, header: tuple[int, int, int]) -> tuple[int, int, int]:
        kind, meta_bytes, total_bytes = header
        if kind > Kind.FLATBUFFERS:
            raise FramingError(f"a frame of kind {kind} came; 0 to 2 are known. Is the other end no cluster's node?")
        if total_bytes == 0:
            raise FramingError("a frame without meta and data came; a request needs a request_id of 1 or more.")
        if meta_bytes > total_bytes:
            raise FramingError(f"a frame of {total_bytes} bytes claims {meta_bytes} bytes of meta.")
        if meta_bytes > META_BYTES_MAX:
            raise FramingError(f"a frame claims {meta_bytes} bytes of meta; at most {META_BYTES_MAX} are taken.")
        if total_bytes > self._frame_bytes_max:
            raise FramingError(f"a frame of {total_bytes} bytes came; at most {self._frame_bytes_max} are taken.")
        return header
