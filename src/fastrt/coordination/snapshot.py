"""Snapshots of a live coordinator for `fastrt coordinator status`: members, keys and barriers."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from fastrt.coordination.dialects import INSIDE, shown
from fastrt.coordination.keyvalues import normalized
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure
from fastrt.errors import FastrtError
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set

SNAPSHOT_PATH = "/fastrt.coordination.Inspector/Snapshot"
_LISTED = 1000
_MISSING_LISTED = 10
_Request, _Response = message_set("coordination").methods("fastrt.coordination.Inspector")["Snapshot"]


def credentials(authority: Path | None, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """The TLS credentials to ask a coordinator.

    Args:
        authority: PEM file that signs the coordinator's certificate; None: the CAs of this machine.
        certificate, key: PEM files to show to the coordinator; None: none.
    Returns:
        None for plain text, if there are no files.
    Raises:
        OSError: a file cannot be read.
    """
    if authority is None and certificate is None:
        return None
    roots, chain, secret = (None if file is None else file.read_bytes() for file in (authority, certificate, key))
    return grpc.ssl_channel_credentials(roots, secret, chain)


def fetch(address: str, credentials: grpc.ChannelCredentials | None, timeout_s: float, **fields: Any) -> Any:
    """Fetch a snapshot of a live coordinator.

    Args:
        address: `host:port` of the coordinator.
        credentials: for TLS; None: in the clear.
        timeout_s: how long it has to answer.
        fields: of the SnapshotRequest.
    Returns:
        The SnapshotResponse.
    Raises:
        FastrtError: no coordinator answers there.
    """
    channel = open_channel(address, credentials)
    try:
        call: Callable[..., Any] = channel.unary_unary(SNAPSHOT_PATH, _Request.SerializeToString, _Response.FromString)
        return call(_Request(**fields), timeout=timeout_s)
    except grpc.RpcError as error:
        speaks = "use TLS with this certificate" if credentials else "want TLS (--tls-ca)"
        raise FastrtError(
            f"No coordinator answers on {address}: {error.details()}. Is it running, and does it {speaks}?"
        ) from error
    finally:
        channel.close()


def snapshot(
    state: CoordinationState, body: bytes, uptime_s: float, now: float, durable: bool
) -> tuple[int, str, bytes]:
    """Answer a SnapshotRequest: status code, message, and the response's bytes."""
    try:
        request = _Request.FromString(body)
    except Exception:  # protobuf's DecodeError differs between its runtimes
        words = f"The request's {len(body)} bytes are no valid fastrt.coordination.SnapshotRequest."
        return int(Code.INVALID_ARGUMENT), words, b""
    limit = request.limit or _LISTED
    answer = _Response(
        incarnation=state.settings.incarnation,
        uptime_s=uptime_s,
        version=state.version,
        key_count=len(state.keys),
        key_bytes=state.keys.bytes_count,
        waiting_calls=state.waiting_count(),
        durable=durable,
        barrier_count=len(state.barriers),
        error=_words(state.polls.error),
    )
    for member in state.members.ids():
        record = state.members[member]
        answer.members.add(
            role=member.role,
            rank=member.rank,
            state=record.state.name,
            incarnation=record.incarnation,
            recoverable=state.members.is_recoverable(member),
            silent_s=-1.0 if record.last_heard is None else now - record.last_heard,
            error_code=0 if record.error is None else int(record.error.code),
            error_message=_words(record.error),
        )
    if request.with_keys:
        for key in heapq.nsmallest(limit, state.keys.below(normalized(request.directory))):
            answer.keys.add(key=shown(key), value=state.keys.value(key))
    if request.with_barriers:
        _add_barriers(state, answer, limit, now)
    return 0, "", answer.SerializeToString()


def _add_barriers(state: CoordinationState, answer: Any, limit: int, now: float) -> None:
    """Add open barriers, then ended ones, the latest first."""
    barriers = state.barriers.views()
    chosen = [b for b in barriers if b.open] + [b for b in reversed(barriers) if not b.open]
    for barrier in chosen[:limit]:
        missing = state.barriers.missing(barrier) if barrier.open else []
        answer.barriers.add(
            id=barrier.barrier_id,
            counter=barrier.counter,
            open=barrier.open,
            arrived_count=len(barrier.arrived),
            member_count=state.barriers.size(barrier),
            missing=[f"{m.role}/{m.rank}" for m in missing[:_MISSING_LISTED]],
            remaining_s=barrier.deadline - now if barrier.open else 0.0,
            code=0 if barrier.result is None else int(barrier.result.code),
            message=_words(barrier.result),
        )


def _words(problem: Failure | None) -> str:
    return "" if problem is None else INSIDE.message(problem)
