"""Who connects to a rank says who it is in a line: read from all who have connected at once, for a second each.

Strangers who say nothing, or one byte after the other, keep nobody waiting, and only so many of them have a place.
"""

from __future__ import annotations

import select
import socket
import time

GREETING_S = 1.0  # also for what is answered
_LINE_BYTES_MAX = 4096
_PLACES = 64  # one more ends the one that has been silent for longest


class Greetings:
    """The connections of a listener that have not said who they are.

    Args:
        listener: stays the caller's.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._begun: dict[socket.socket, tuple[bytearray, float]] = {}  # what was said, until when; oldest first

    def wait(self, patience_s: float) -> list[tuple[socket.socket, bytes]]:
        """Connections whose line is whole, and the line; what comes behind it is left in the socket.

        Args:
            patience_s: how long to wait for anything at all.
        """
        # Those who have begun first: whom a new one would end may just have said all.
        ready = select.select([*self._begun, self._listener], [], [], patience_s)[0]
        greeted = []
        for sock in ready:
            if sock is self._listener:
                self._accept()
            elif (line := self._read(sock)) is not None:
                greeted.append((sock, line))
        now = time.monotonic()
        for sock in [sock for sock, (_, until) in self._begun.items() if until <= now]:
            self._drop(sock)
        return greeted

    def close(self) -> None:
        """Hang up on all who have not said who they are."""
        for sock in list(self._begun):
            self._drop(sock)

    def _accept(self) -> None:
        sock = self._listener.accept()[0]
        sock.setblocking(False)
        if len(self._begun) >= _PLACES:
            self._drop(next(iter(self._begun)))
        self._begun[sock] = bytearray(), time.monotonic() + GREETING_S

    def _drop(self, sock: socket.socket) -> None:
        del self._begun[sock]
        sock.close()

    def _read(self, sock: socket.socket) -> bytes | None:
        """The line, if it is whole now; then the connection is not ours any more."""
        said, _ = self._begun[sock]
        try:
            there = sock.recv(_LINE_BYTES_MAX, socket.MSG_PEEK)
            said += sock.recv(there.find(b"\n") + 1 or len(there)) if there else b""
        except BlockingIOError:
            return None
        except OSError:
            there = b""
        if not there or len(said) > _LINE_BYTES_MAX:
            self._drop(sock)
        elif said.endswith(b"\n"):
            del self._begun[sock]
            sock.settimeout(GREETING_S)
            return bytes(said[:-1])
        return None
