"""Bounds for listeners: places for connections that have not proved the secret, and a descriptor kept in reserve.

The client sends first at all these listeners. So the kernel can hold a connection back until its first bytes arrive.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading

VISITORS_MAX = 64
GREETING_S = 10.0  # from the connection until the proof, no matter how its bytes are spread over that time
BACKLOG = 4096  # a flood must not make the kernel drop connections of members


def hold_silent(listener: socket.socket) -> None:
    """Let the kernel hold connections of a listener back until their first bytes arrive.

    A silent connection then takes no place, and no descriptor, for about `GREETING_S`. After that time the kernel
    accepts it without bytes. Without this, 2,000 silent connections take one of two processors, to accept and end them.

    Args:
        listener: of TCP, before or after it listens.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(GREETING_S))


class Reserve:
    """A descriptor kept for the time when the process has no other left.

    Without it, connections that cannot be accepted stay in the listener's queue, and the process spins on them.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._take()

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def turn_away(self, listener: socket.socket) -> bool:
        """Accept a connection and close it; returns whether there was one.

        Args:
            listener: non-blocking.
        """
        self.close()
        try:
            sock, _ = listener.accept()
            sock.close()
        except OSError:
            return False
        finally:
            self._take()
        return True

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # another thread took the last one; the next call tries again
            self._fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


class Visitors:
    """Connections of a threaded listener that have not proved yet that they belong to the cluster.

    If there are too many, the oldest is ended. A duplicate of each descriptor is kept for that: the thread that serves
    the connection can close the original, or pass it to TLS, at any time.

    Args:
        limit: the number of places.
    """

    def __init__(self, limit: int = VISITORS_MAX) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._places: dict[int, socket.socket] = {}  # oldest first

    def enter(self, sock: socket.socket) -> int:
        """Take a place; returns its number, for `leave`.

        Raises:
            OSError: there is no descriptor left.
        """
        with self._lock:
            if len(self._places) >= self._limit:
                self._end_oldest()
            number = next(self._numbers)
            self._places[number] = sock.dup()
            return number

    def leave(self, number: int) -> None:
        """Free a place: the connection belongs to the cluster, or has ended."""
        with self._lock:
            kept = self._places.pop(number, None)
            if kept is not None:
                kept.close()

    def make_room(self) -> None:
        """End the oldest connection."""
        with self._lock:
            self._end_oldest()

    def end_all(self) -> None:
        """End all connections."""
        with self._lock:
            while self._places:
                self._end_oldest()

    def _end_oldest(self) -> None:
        if self._places:
            kept = self._places.pop(next(iter(self._places)))
            with contextlib.suppress(OSError):
                kept.shutdown(socket.SHUT_RDWR)
            kept.close()
