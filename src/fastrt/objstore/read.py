"""The sender of one `Transfer.Read`: the next chunk leaves when the connection has taken the one before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from fastrt.net.grpc.contract import Stream
from fastrt.objstore.push import Part, write_chunk


class Reading:
    """Sends chunks to a stream until they end or its caller has gone; then it drops them, and with them the pin.

    Args:
        stream: of the caller.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._left: Iterator[Part] | None = None
        self._ended = False
        stream.on_sent, stream.on_closed = self._send, self._close

    def begin(self, parts: Iterator[Part]) -> None:
        """Send these chunks."""
        with self._lock:
            if not self._ended:
                self._left = parts
        self._send()

    def _send(self) -> None:
        with self._lock:
            if self._left is None:
                return
            part = next(self._left, None)
            if part is None:
                self._left = None
        if part is None:
            self._stream.finish()
        else:
            self._stream.send(write_chunk(part))

    def _close(self) -> None:
        with self._lock:
            self._ended, self._left = True, None
        # The stream and this object refer to each other: both would live until the garbage collector runs.
        self._stream.on_sent = self._stream.on_closed = lambda: None
