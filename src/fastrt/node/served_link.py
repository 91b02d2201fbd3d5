"""The daemon's end of a connection: it never waits for the reader."""

from __future__ import annotations

import selectors
import socket

from fastrt.store.join import Link
from fastrt.store.messages import ANSWER_BYTES_MAX, Message


class ServedLink(Link):
    """A connection whose backlog goes out when the reader takes it: a stopped process must not stop the node.

    Args:
        sock: the connection.
        selector: the daemon's, where the connection is registered while it is read.
    """

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        super().__init__(sock)
        self._selector = selector
        self._events = selectors.EVENT_READ  # that the selector waits for

    def send(self, message: Message) -> bool:
        """Send one message, behind those posted before; False when the other end is gone, or asks and does not read."""
        if self.backlog > ANSWER_BYTES_MAX:
            self.hang_up()
            return False
        return self.post(message)

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Send the backlog, as far as the reader takes it in time; the selector reports when it takes more."""
        is_there = super().flush(timeout_s)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if events != self._events and self._is_watched():
            self._selector.modify(self, events, self._selector.get_key(self).data)
            self._events = events
        return is_there

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, as `Link.receive`; first send what the reader takes by now."""
        if self._outgoing:
            self.flush()
        return super().receive(timeout_s)

    def _is_watched(self) -> bool:
        return self.fileno() >= 0 and self.fileno() in self._selector.get_map()
