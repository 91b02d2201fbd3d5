"""A small HTTP/1.1 server for machines: one request a connection, on threads, everything bounded.

A connection has `GREETING_S` for its whole request, TLS handshake included; `Visitors` bounds the connections whose
request is incomplete, so that silent ones keep no place. Head and body have limits. With a TLS context nothing is
parsed before the handshake; a context that demands certificates has then authenticated the client.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

from fastrt.foreign_text import ForeignTextError, read_int
from fastrt.net.address import split_address, with_port
from fastrt.net.grpc.visitors import BACKLOG, GREETING_S, Reserve, Visitors, hold_silent
from fastrt.shortage import is_short

_log = logging.getLogger(__name__)

BODY_BYTES_MAX = 1 << 20
_HEAD_BYTES_MAX = 32 << 10
_SOCKET_S = 30.0
_THREADS_MAX = 256
_BAD, _TOO_LARGE = 400, 413


class Request(NamedTuple):
    """A request that has come whole.

    Attributes:
        method: GET or POST.
        path: without the query.
        query: the text after "?", or "".
        headers: names in lower case; of several with one name the first.
        body: its bytes.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """An answer.

    Attributes:
        status: HTTP's.
        content: the body.
        content_type: MIME.
        headers: further ones.
    """

    status: int
    content: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class SmallHttpServer:
    """Serves requests on its own threads until `stop`.

    Args:
        address: `host:port`; port 0 takes any free one.
        tls: the context of accepted connections; None: they are in the clear.
        answer: answers a request; called on the connection's thread.
        refuse: makes the body of the answer to a request that cannot be read, from the reason in words.

    Attributes:
        address: `host:port` with the actual port.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        tls: ssl.SSLContext | None,
        answer: Callable[[Request], Answer],
        refuse: Callable[[int, str], Answer],
    ) -> None:
        self._server = _Server(split_address(address, 0), tls, answer, refuse)
        self.address = with_port(address, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="fastrt-http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(HTTPServer):
    """Serves each connection on a thread. `Visitors` bounds those whose request is incomplete."""

    request_queue_size = BACKLOG

    def __init__(
        self,
        address: tuple[str, int],
        tls: ssl.SSLContext | None,
        answer: Callable[[Request], Answer],
        refuse: Callable[[int, str], Answer],
    ) -> None:
        self.tls, self.answer, self.refuse = tls, answer, refuse
        self.visitors = Visitors()
        self._reserve = Reserve()
        self._threads: set[threading.Thread] = set()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, BaseHTTPRequestHandler)  # `_receive` makes the handlers
        except BaseException:
            self._reserve.close()
            raise
        hold_silent(self.socket)
        self.socket.setblocking(False)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError as error:
            if is_short(error):
                self.visitors.make_room()
                self._reserve.turn_away(self.socket)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._threads) >= _THREADS_MAX:
            self.shutdown_request(request)
            return
        place = self.visitors.enter(request)
        thread = threading.Thread(target=self._receive, args=(request, client_address, place), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _receive(self, sock: socket.socket, client_address: Any, place: int) -> None:
        try:
            until = time.monotonic() + GREETING_S
            with contextlib.ExitStack() as stack:
                stack.enter_context(sock)
                if self.tls is not None:
                    sock.settimeout(GREETING_S)
                    sock.getpeername()  # on a connection that is gone already `wrap_socket` leaks an open socket
                    sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                stack.enter_context(sock)
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                Handler(sock, client_address, self, until, lambda: self.visitors.leave(place))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            _log.debug("a connection from %s ended: %s", client_address[0], error)
        finally:
            self.visitors.leave(place)
            self._threads.discard(threading.current_thread())

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s could not be served", client_address[0], exc_info=True)

    def server_close(self) -> None:
        super().server_close()
        self.visitors.end_all()
        for thread in list(self._threads):
            thread.join(_SOCKET_S)
        self._reserve.close()


class _Incoming(io.RawIOBase):
    """The bytes of one request, up to a limit and a deadline.

    Attributes:
        left: how many more bytes may be read.
        ended: whether the reader asked for more than came or may be read.
    """

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.left = _HEAD_BYTES_MAX
        self.ended = False
        self._sock = sock
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: self.left]
        if not view:
            self.ended = True
            return 0
        self._sock.settimeout(max(1e-3, self._until - time.monotonic()))
        got = self._sock.recv_into(view)
        self.ended = not got
        self.left -= got
        return got


class Handler(BaseHTTPRequestHandler):
    """Handles one connection with one request."""

    server: _Server

    def __init__(
        self, sock: socket.socket, client_address: Any, server: _Server, until: float, came: Callable[[], None]
    ) -> None:
        self._until, self._came = until, came
        super().__init__(sock, client_address, server)

    def setup(self) -> None:
        """Read from a bounded stream instead of the socket's own."""
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection, self._until)
        self.rfile = io.BufferedReader(self._incoming)

    def do_GET(self) -> None:
        """Answer a GET."""
        self._serve()

    def do_POST(self) -> None:
        """Answer a POST."""
        self._serve()

    def _serve(self) -> None:
        self.close_connection = True
        try:
            body = self._body()
        except ForeignTextError as error:
            status = _TOO_LARGE if isinstance(error, _TooLarge) else _BAD
            self._send(self.server.refuse(status, str(error)))
            return
        self._came()
        self.connection.settimeout(_SOCKET_S)
        path, _, query = self.path.partition("?")
        headers: dict[str, str] = {}
        for name, value in self.headers.items():
            headers.setdefault(name.lower(), value)
        self._send(self.server.answer(Request(self.command, path, query, headers, body)))

    def _body(self) -> bytes:
        """Read the request's body.

        Raises:
            ForeignTextError: its length is missing or ambiguous, it is too large, or the request is incomplete.
        """
        if self._incoming.ended:
            raise ForeignTextError(f"the request's head is incomplete, or has more than {_HEAD_BYTES_MAX} bytes")
        if self.request_version == "HTTP/0.9":  # it has no headers
            raise ForeignTextError("the request names no version of HTTP; HTTP/1.1 is spoken here")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            raise ForeignTextError("a body needs exactly one Content-Length, and no Transfer-Encoding")
        length = read_int(lengths[0], "Content-Length")
        if length > BODY_BYTES_MAX:
            raise _TooLarge(f"the body has {length} bytes; the limit is {BODY_BYTES_MAX}")
        self._incoming.left += length
        body = self.rfile.read(length)
        if len(body) < length:
            raise ForeignTextError(f"only {len(body)} of {length} bytes of the body came")
        return body

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write to the module's log instead of standard error."""
        _log.debug(format, *args)


class _TooLarge(ForeignTextError):
    """A body is larger than the server accepts."""
