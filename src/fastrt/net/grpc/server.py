"""Chooses between the two implementations of a gRPC server.

`queue_server` is many times faster and needs parts of grpcio that are not public. If a future grpcio lacks these,
`aio_server` does the same on the public `grpc.aio`, and a warning is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from fastrt.net.grpc.aio_server import AioServer
from fastrt.net.grpc.contract import Handler, Metadata, Server, Stream
from fastrt.net.grpc.door import Limits

_log = logging.getLogger(__name__)

# The versions of grpcio with which the fast server was tested; others are used if they have what it needs.
TRIED_GRPCIO = "1.60 to 1.85"
_NEEDED = (
    "CompletionQueue",
    "CompletionType",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
    "Server",
)


def open_server(
    handler: Handler,
    methods: Sequence[str],
    streams: Mapping[str, Callable[[Stream], None]] | None = None,
    message_bytes_max: int = 64 << 20,
    authorize: Callable[[str, Metadata], str | None] | None = None,
    options: Sequence[tuple[str, Any]] = (),
    limits: Limits | None = None,
) -> Server:
    """Make a server, to be bound and started.

    Args:
        handler: takes the calls of `methods`.
        methods: paths `/package.Service/Method`; any other is UNIMPLEMENTED.
        streams: for each streaming path, a function that is called with each new `Stream` and sets its receiver.
        message_bytes_max: largest request taken; a larger one is RESOURCE_EXHAUSTED. Answers are not limited.
        authorize: given a path and the caller's metadata, the reason to refuse a call as UNAUTHENTICATED, or None.
        options: further options of gRPC's.
        limits: bounds on connections, calls and bytes; None takes the defaults of `Limits`.
    """
    missing = _missing()
    if not missing:
        from fastrt.net.grpc.queue_server import QueueServer

        return QueueServer(handler, methods, streams, message_bytes_max, authorize, options, limits)
    _log.warning(
        "grpcio %s lacks %s, which the fast server needs; serving on grpc.aio, several times slower. Use grpcio %s.",
        grpc.__version__,
        ", ".join(missing),
        TRIED_GRPCIO,
    )
    return AioServer(handler, methods, streams, message_bytes_max, authorize, options, limits)


def _missing() -> list[str]:
    """Return the names that the fast server needs and grpcio lacks."""
    try:
        from grpc._cython import cygrpc
    except ImportError:
        return ["grpc._cython.cygrpc"]
    module: Any = cygrpc
    return [name for name in _NEEDED if not hasattr(module, name)]
