"""The interfaces of a gRPC server of fastrt: towards its handler, and towards the code that opens it.

Two modules implement them, `queue_server` and `aio_server`; `server.open_server` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc

from fastrt.net.grpc.door import Door, Limits

# Options of gRPC in both implementations, beside `door.Limits.options`.
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),  # a second process must fail, not share the port
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)
SHUTTING_DOWN = "The service is shutting down."
# Every caller may make these calls, so they prove nothing about it.
UNPROVING = frozenset({"/grpc.health.v1.Health/Check"})

Metadata = Sequence[tuple[str, "str | bytes"]]


class Handler(Protocol):
    """The service behind a server, which calls it on the server's thread only."""

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Take a unary call; answer it with `Server.finish`, now or later."""

    def on_cancel(self, call: int) -> None:
        """Drop a call whose caller has gone before the answer; `finish` has no effect any more."""

    def on_idle(self) -> float | None:
        """Do deferred work: no more events are at hand. Returns the latest `time.monotonic()` for the next call."""

    def on_stop(self) -> None:
        """Answer open calls: the server takes no more, and cancels those that are still open after this."""


class Stream(Protocol):
    """One streaming call. Its receiver gets every message, and None when the caller sends no more.

    `on_sent` is called on the server's thread after each message that the connection has taken.
    """

    receiver: Callable[[bytes | None], None]
    on_sent: Callable[[], None]
    on_closed: Callable[[], None]

    def send(self, body: bytes) -> None:
        """Send a message after those before."""

    def finish(self, code: int = 0, message: str = "") -> None:
        """End the stream, after the messages before."""

    def hold(self) -> None:
        """Take no further message until `resume`; gRPC's flow control then holds the caller back."""

    def resume(self) -> None:
        """Continue to take messages, after `hold`."""


class Server(Protocol):
    """Serves unary methods by a handler, and streaming ones by receivers. Made by `open_server`."""

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `host:port` (port 0: any), from `start` on; returns the port.

        Raises:
            OSError: the address is taken or not this machine's.
        """

    def start(self) -> None:
        """Serve, on a thread that the server starts."""

    def stop(self) -> None:
        """Take no new calls, let the handler answer those still open (`on_stop`), and end the thread."""

    def finish(self, call: int, code: int = 0, message: str = "", body: bytes = b"", trailing: Metadata = ()) -> bool:
        """Answer a call, from any thread; False when its caller has gone, or it was answered before."""

    def peer(self, call: int) -> object:
        """The name of the connection of a call that is not answered yet."""

    def is_open(self, peer: object) -> bool:
        """Whether a connection is open, by its name; one of a Unix socket counts as open. Looks at all descriptors."""

    def pending_count(self) -> int:
        """Number of calls that wait for an answer."""


class ServerParts(Server):
    """The parts of a `Server` that both implementations have. `open_server` describes the arguments."""

    def __init__(
        self,
        handler: Handler,
        methods: Sequence[str],
        streams: Mapping[str, Callable[[Stream], None]] | None = None,
        message_bytes_max: int = 64 << 20,
        authorize: Callable[[str, Metadata], str | None] | None = None,
        options: Sequence[tuple[str, Any]] = (),
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self._door = Door(limits)
        self._handler = handler
        self._methods = frozenset(methods)
        self._streams = dict(streams or {})
        self._authorize = authorize
        self._options = (
            *_OPTIONS,
            *limits.options(),
            ("grpc.max_receive_message_length", message_bytes_max),
            *options,
        )
        self._pending: dict[int, Any] = {}  # open calls by number
        self._open_streams: set[Any] = set()
        self._next_number = 0
        self._ports: dict[int, bool] = {}  # whether TLS is spoken there
        self._has_stopped = False

    def pending_count(self) -> int:
        """Number of calls that wait for an answer."""
        return len(self._pending)

    def _end_calls(self) -> None:
        """Answer the calls that are open, and end the streams; later calls are refused."""
        self._has_stopped = True
        self._handler.on_stop()
        unavailable = grpc.StatusCode.UNAVAILABLE.value[0]
        for number in list(self._pending):
            self.finish(number, unavailable, SHUTTING_DOWN)
        for stream in list(self._open_streams):
            stream.finish(unavailable, SHUTTING_DOWN)
