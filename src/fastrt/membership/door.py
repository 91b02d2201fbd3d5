"""A listener for frames that limits the connections which have not authenticated yet.

With TLS, a connection belongs to the cluster once both certificates are verified; no byte of it is parsed before. In
the clear (foreign members have no secret) it belongs to the cluster once its owner calls `FrameConnection.settle`.
Until then the connection is a visitor: it has a deadline, and when there are too many visitors the oldest is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from fastrt.membership.links import FrameConnection
from fastrt.net.grpc.visitors import BACKLOG, GREETING_S, VISITORS_MAX, Reserve, hold_silent
from fastrt.shortage import is_short

_log = logging.getLogger(__name__)

_RETRY_S = 0.1


class Door:
    """Listens from `open` until `close`, on the event loop that calls these methods.

    Args:
        make: makes the protocol of a new connection, given the peer's host.
        context: the TLS context; None: frames go in the clear.
        visitors_max: most connections at a time that do not belong to the cluster yet.
    """

    def __init__(
        self,
        make: Callable[[str], FrameConnection],
        context: ssl.SSLContext | None,
        visitors_max: int = VISITORS_MAX,
    ) -> None:
        self._make = make
        self._context = context
        self._visitors_max = visitors_max
        self._visitors: dict[asyncio.Task[None], None] = {}  # oldest first
        self._listener: socket.socket | None = None
        self._reserve = Reserve()

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Args:
            host: name or address.
            port: 0 takes any free one.
        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
            hold_silent(self._listener)
        except BaseException:
            self._reserve.close()
            raise
        self._listener.setblocking(False)
        # Not `sock_accept`: a connection that it has accepted is lost when its task is cancelled.
        loop.add_reader(self._listener, self._accept, self._listener)
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Stop accepting, and close all visitors. Connections that belong to the cluster stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        ending = list(self._visitors)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._reserve.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection per call, so that a long backlog does not delay the connections that are open."""
        try:
            sock, peer = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.warning("a connection cannot be accepted: %s", error)
            self._drop_oldest()
            if not (is_short(error) and self._reserve.turn_away(listener)):
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_RETRY_S, self._go_on, listener)
            return
        if len(self._visitors) >= self._visitors_max:
            self._drop_oldest()
        sock.setblocking(False)
        connection = self._make(str(peer[0]))
        task = asyncio.get_running_loop().create_task(self._receive(sock, str(peer[0]), connection))
        self._visitors[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            self._visitors.pop(task, None)
            if not connection.is_settled:  # it was cancelled before its first step
                sock.close()

        task.add_done_callback(ended)

    def _go_on(self, listener: socket.socket) -> None:
        if self._listener is listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._visitors), None)
        if oldest is not None:
            del self._visitors[oldest]
            oldest.cancel()

    async def _receive(self, sock: socket.socket, host: str, connection: FrameConnection) -> None:
        """Authenticate a visitor: keep its connection when it proves the secret, and close it otherwise."""
        loop = asyncio.get_running_loop()
        until = loop.time() + GREETING_S
        why = "it was closed to make room for newer connections"
        try:
            opening = loop.connect_accepted_socket(lambda: connection, sock, ssl=self._context)
            await asyncio.wait_for(opening, GREETING_S)
            if self._context is not None:
                connection.settle()
            await asyncio.wait_for(connection.settled(), max(0.0, until - loop.time()))
        except asyncio.TimeoutError:
            why = f"it did not authenticate within {GREETING_S:g} s"
        except OSError as error:  # also ssl.SSLError
            why = str(error)
        finally:
            if not connection.is_settled:
                _log.debug("the connection from %s is closed: %s", host, why)
                connection.abort(why)
                sock.close()  # for a socket that no transport owns yet
