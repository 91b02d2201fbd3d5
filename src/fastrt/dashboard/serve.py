"""Serves the dashboard by uvicorn: bounded connections, TLS, and the file by which this user's programs find it."""

from __future__ import annotations

import asyncio
import collections
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastrt.dashboard import app
from fastrt.dashboard.access import Access
from fastrt.dashboard.desk import Desk
from fastrt.errors import ConfigError
from fastrt.net.address import family_of, join_address

_UNPROVED_MAX = 64  # connections without a whole request
_UNPROVED_S = 10.0
_HEADERS_MAX = 16 << 10


class Bounded(H11Protocol):
    """A connection that must bring a whole request in time; of too many that have not, the oldest makes room."""

    _unproved: ClassVar[collections.OrderedDict[Bounded, asyncio.TimerHandle]] = collections.OrderedDict()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time within which the request must come."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._unproved[self] = self.loop.call_later(_UNPROVED_S, transport.abort)  # type: ignore[attr-defined]
        if len(self._unproved) > _UNPROVED_MAX:
            oldest, timer = self._unproved.popitem(last=False)
            timer.cancel()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stop the time once a request is whole."""
        super().data_received(data)
        if self.cycle is not None:
            self._proved()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._proved()
        super().connection_lost(exc)

    def _proved(self) -> None:
        timer = self._unproved.pop(self, None)
        if timer is not None:
            timer.cancel()


def listen(host: str, port: int, others: bool) -> socket.socket:
    """Listen at an address.

    Args:
        host, port: where.
        others: whether any other port will do if that one is taken.
    Raises:
        ConfigError: the address cannot be used.
    """
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for wanted in (port, 0) if others else (port,):
        try:
            sock.bind((host, wanted))
            sock.listen(128)
            return sock
        except OSError as exc:
            reason = exc
    sock.close()
    raise ConfigError(f"the dashboard cannot listen at {join_address(host, port)}: {reason}") from None


def names_in(certificate: Path) -> list[str]:
    """The hosts that a certificate is for.

    Raises:
        ConfigError: the file holds no certificate.
    """
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{certificate} holds no certificate: {exc}") from None
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


class Server(uvicorn.Server):
    """The dashboard's server.

    Args:
        sock: listens.
        desk: knows the sessions.
        rules: who is admitted.
        tls: certificate and key, or None.
        started: called when requests are answered.
        admitted: called when a browser has used the code.
    """

    def __init__(
        self, sock: socket.socket, desk: Desk, rules: Access, tls: tuple[Path, Path] | None,
        started: Callable[[], None], admitted: Callable[[], None],
    ) -> None:  # fmt: skip
        self._closing = asyncio.Event()
        files: dict[str, Any] = {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]} if tls is not None else {}
        config = uvicorn.Config(
            app.make(desk, rules, admitted, self._closing), http=Bounded, ws="none", lifespan="on", access_log=False,
            log_level="error", server_header=False, date_header=False, proxy_headers=False, timeout_keep_alive=5,
            h11_max_incomplete_event_size=_HEADERS_MAX, timeout_graceful_shutdown=1, **files,
        )  # fmt: skip
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        super().__init__(config)
        self._sock, self._started = sock, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        if self.started:
            self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams of open pages, then the server."""
        self._closing.set()
        await super().shutdown(sockets)

    def run_to_the_end(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has stopped
            signal.signal(number, lambda *_: None)
        self.run(sockets=[self._sock])
