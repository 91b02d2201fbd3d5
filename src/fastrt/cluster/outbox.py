"""The send queue of a stream to another node: small messages in order, large values in pieces between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# The approximate size of a frame: large enough for full network speed, small enough that no task waits long behind one.
FRAME_BYTES = 1 << 20
PIECE_BYTES = 1 << 18


class Outgoing:
    """Collects messages and hands them out as frames.

    Small messages and the first pieces of large values are sent in the order in which they were added: a first piece
    may name objects whose values follow it. Further pieces take turns, so a value of a gigabyte delays no other one.

    Args:
        frame: creates a Frame, called without arguments or with leaving=True.
        piece: creates a further piece of a value: called with transfer, at, data.
    """

    def __init__(self, frame: Callable[..., Any], piece: Callable[..., Any]) -> None:
        self._frame = frame
        self._piece = piece
        self._small: deque[tuple[str, Any, int, bool]] = deque()  # the last: in the frame of the message before it
        self._following: deque[Callable[[], None]] = deque()
        self._follows = False
        self._large: deque[tuple[Iterator[Any], Callable[[], None]]] = deque()
        self._transfers = 0
        self.nbytes = 0  # of the queued small messages and first pieces
        self._news = asyncio.Event()
        self._closed = self._stirred = self._is_leaving = False

    def add(self, field: str, message: Any, nbytes: int = 64) -> None:
        """Queue a message, or a number, for a repeated field of the next frame."""
        self._small.append((field, message, nbytes, self._follows))
        self.nbytes += nbytes
        self._news.set()
        if self._following and not self._follows:
            self._follow()

    def follow(self, add: Callable[[], None]) -> None:
        """Call `add` after the next message has been added: the messages that it adds go in the frame of that one.

        So the peer has the value of an object as soon as it has the name, however this process ends. Without a next
        message, `add` is called for the next frame.
        """
        self._following.append(add)
        self._news.set()

    def _follow(self) -> None:
        self._follows = True
        try:
            while self._following:
                self._following.popleft()()
        finally:
            self._follows = False

    def add_value(self, first: Any, data: memoryview, then: Callable[[], None]) -> None:
        """Queue a value; `then` is called when its last piece has been taken from the queue.

        Args:
            first: the Value message without its data.
            data: the bytes, flat.
        """
        first.data = bytes(data[:PIECE_BYTES])
        if data.nbytes > PIECE_BYTES:
            self._transfers += 1
            first.transfer = self._transfers
            self._large.append((self._pieces(first.transfer, data), then))
        self.add("value", first, len(first.data) + 64)
        if data.nbytes <= PIECE_BYTES:
            then()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing waits to be sent."""
        return not (self._small or self._large or self._following)

    def stir(self) -> None:
        """Send a frame even if it is empty, because every frame reports this node's load."""
        self._stirred = True
        self._news.set()

    def close(self, is_leaving: bool = False) -> None:
        """Hand out no more frames, apart from one that says that this node leaves the cluster if it does."""
        self._closed = True
        self._is_leaving = is_leaving
        self._news.set()

    async def next_frame(self) -> Any | None:
        """Wait until there is something to send, and return the next frame; None after `close`."""
        while self.is_empty and not (self._closed or self._stirred):
            self._news.clear()
            await self._news.wait()
        if self._closed:
            last = self._frame(leaving=True) if self._is_leaving else None
            self._is_leaving = False
            return last
        self._stirred = False
        self._follow()
        frame, room = self._frame(), FRAME_BYTES
        while self._small and (room > 0 or self._small[0][3]):
            field, message, nbytes, _ = self._small.popleft()
            getattr(frame, field).append(message)
            room -= nbytes
            self.nbytes -= nbytes
        while self._large and room > 0:
            pieces, then = self._large.popleft()
            piece = next(pieces, None)
            if piece is None:
                then()
                if self._small and room > 0:  # end this frame: what `then` added follows the last piece in the next one
                    break
                continue
            frame.value.append(piece)
            room -= len(piece.data)
            self._large.append((pieces, then))
        return frame

    def _pieces(self, transfer: int, data: memoryview) -> Iterator[Any]:
        for at in range(PIECE_BYTES, data.nbytes, PIECE_BYTES):
            yield self._piece(transfer=transfer, at=at, data=bytes(data[at : at + PIECE_BYTES]))
