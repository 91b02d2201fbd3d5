"""Calls to one gRPC server with a callback for each answer, and no thread of the caller waiting.

Two modules implement them: `queue_client`, which needs parts of grpcio that are not public, and `future_client`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc

from fastrt.net.grpc.channel import OPTIONS
from fastrt.net.grpc.contract import Metadata
from fastrt.net.grpc.future_client import FutureCaller

_NEEDED = (
    "Channel",
    "ConnectivityState",
    "InitialMetadataFlags",
    "ReceiveInitialMetadataOperation",
    "ReceiveMessageOperation",
    "ReceiveStatusOnClientOperation",
    "SendCloseFromClientOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "StatusCode",
)


class Caller(Protocol):
    """A connection to one server. All methods may be called from any thread."""

    def call(
        self,
        path: str,
        body: bytes,
        timeout_s: float,
        done: Callable[[int, str, bytes], None],
        wait_for_ready: bool = False,
    ) -> None:
        """Make a unary call.

        Args:
            path: `/package.Service/Method`.
            body: the request.
            timeout_s: seconds until DEADLINE_EXCEEDED.
            done: called once with status code, message and answer (empty after an error), on a thread of this object
                or, if it is closed, at once. It must not block.
            wait_for_ready: wait for the connection until the timeout, instead of failing as UNAVAILABLE.
        """

    def stream(
        self, path: str, body: bytes, receive: Callable[[bytes], None], done: Callable[[int, str], None]
    ) -> None:
        """Make a call that is answered by a stream.

        Args:
            path: `/package.Service/Method`.
            body: the request.
            receive: called with each message.
            done: called once with status code and message, when the stream has ended.
        """

    def is_ready(self) -> bool:
        """Whether the connection is open; if not, gRPC is asked to open it."""

    def close(self) -> None:
        """Cancel all calls, and wait until each one's `done` has been called. Not to be called by one of those."""


def open_caller(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    options: Sequence[tuple[str, Any]] = (),
    metadata: Metadata = (),
) -> Caller:
    """Open a connection for calls with callbacks; it connects at its first call, or when `is_ready` is called.

    Args:
        address: `host:port`.
        credentials: for TLS; None: plain text.
        options: further options of gRPC's.
        metadata: sent with each call.
    """
    every = [*OPTIONS, *options]
    if not _missing():
        from fastrt.net.grpc.queue_client import QueueCaller

        return QueueCaller(address, credentials, every, metadata)
    return FutureCaller(address, credentials, every, metadata)


def _missing() -> list[str]:
    """Return the names that the fast client needs and grpcio lacks."""
    try:
        from grpc._cython import cygrpc
    except ImportError:
        return ["grpc._cython.cygrpc"]
    module: Any = cygrpc
    return [name for name in _NEEDED if not hasattr(module, name)]
