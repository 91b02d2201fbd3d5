"""Client channels with the limits, keepalive and credentials of all fastrt clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from fastrt.net.grpc.forks import use_grpc

# A value of 64 MiB fits with the message around it; answers (a directory of keys) may be any size.
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A server that restarts is found again within this time.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the timeout of one attempt, TLS handshake included.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

# For streams of large messages, at both ends: 1 GiB in messages of 1 MiB takes 1.0 s of processor time of both
# processes with these, and 1.5 with the defaults. Other sizes of messages and frames were not better.
BULK_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.write_buffer_size", 16 << 20),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.bdp_probe", 0),
)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Open a blocking channel to `host:port`, with further options of gRPC's. It connects at its first call."""
    use_grpc()
    if credentials is None:
        return grpc.insecure_channel(address, options=[*OPTIONS, *options])
    return grpc.secure_channel(address, credentials, options=[*OPTIONS, *options])


def open_aio_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Open an asyncio channel to `host:port`, bound to the running loop. It connects at its first call."""
    use_grpc()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=[*OPTIONS, *options])
    return grpc.aio.secure_channel(address, credentials, options=[*OPTIONS, *options])


def bearer(token: str) -> Sequence[tuple[str, str]]:
    """Return call metadata with a session token."""
    return (("authorization", f"Bearer {token}"),)
