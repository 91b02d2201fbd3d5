"""What a gRPC server of fastrt is, to its handler and to the one who opens it: the calls it makes and those it takes.

Two implementations keep to it, `queue_server` and `aio_server`; `server.open_server` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc

# What gRPC is told by either implementation, beside `door.Limits.options`.
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),  # a second process must fail, not share the port
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)
# A call of these proves nothing of its caller: they are answered to anybody.
UNPROVING = frozenset({"/grpc.health.v1.Health/Check"})

Metadata = Sequence[tuple[str, "str | bytes"]]


class Handler(Protocol):
    """What the server calls, always on its own thread."""

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """A unary call has come; answer it with `Server.finish`, now or later."""

    def on_cancel(self, call: int) -> None:
        """The caller of a call not yet answered has gone; `finish` has no effect any more."""

    def on_idle(self) -> float | None:
        """No more events are at hand. Returns `time.monotonic()` at which to be called again at the latest."""

    def on_stop(self) -> None:
        """The server takes no more calls; those still open may be answered now, or are cancelled."""


class Stream(Protocol):
    """One streaming call. Its receiver gets every message, and None when the caller sends no more."""

    receiver: Callable[[bytes | None], None]
    on_closed: Callable[[], None]

    def send(self, body: bytes) -> None:
        """Send a message after those before."""

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the stream, after the messages before."""

    def hold(self) -> None:
        """Take no further message until `resume`: what is not taken holds the caller back, by gRPC's flow control."""

    def resume(self) -> None:
        """Go on taking messages, after `hold`."""


class Server(Protocol):
    """Serves unary methods by a handler, and streaming ones by receivers. Made by `open_server`."""

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `host:port` (port 0: any), from `start` on; returns the port.

        Raises:
            OSError: the address is taken or not this machine's.
        """

    def start(self) -> None:
        """Serve, on a thread of the server's own."""

    def stop(self) -> None:
        """Take no new calls, let the handler answer those still open (`on_stop`), and end the thread."""

    def finish(self, call: int, code: int = 0, message: str = "", body: bytes = b"", trailing: Metadata = ()) -> bool:
        """Answer a call, from any thread; False when its caller has gone, or it was answered before."""

    def pending_count(self) -> int:
        """How many calls wait for an answer."""
