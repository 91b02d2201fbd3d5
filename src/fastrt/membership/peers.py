"""A member's connections to other processes: requests matched to responses by number, and requests of others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fastrt.errors import FastrtError
from fastrt.membership.events import MemberView, Role
from fastrt.membership.framing import Frame, FramingError, Kind
from fastrt.membership.links import FrameConnection, connect
from fastrt.membership.mailbox import Tag
from fastrt.membership.wire import Command, FetchResp, FetchServers, Meta, parse, request_frame, views
from fastrt.net.address import join_address, split_address
from fastrt.net.grpc.trust import Trust, trust_of

_CONNECT_S = 5.0
_LOOK_BYTES_MAX = 64 << 20


class MemberUnreachableError(FastrtError):
    """Another process of the cluster cannot be reached, or its connection ended before it answered.

    The request may or may not have been executed. Check whether that process lives, and repeat the request if a
    second execution does no harm.
    """


class Caller:
    """A connection on which this member sends requests. Make one with `open`.

    Args:
        name: of the other process, for error messages.
        request_ids: numbers for requests, from 1.
        on_end: called with the reason when the connection has ended.

    Attributes:
        place: host and port of the other process.
    """

    def __init__(self, name: str, request_ids: Iterator[int], on_end: Callable[[str], None]) -> None:
        self.place = ("", 0)
        self._name = name
        self._request_ids = request_ids
        self._on_end = on_end
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._ended: str | None = None
        self._connection: FrameConnection | None = None

    @classmethod
    async def open(
        cls,
        name: str,
        host: str,
        port: int,
        frame_bytes_max: int,
        trust: Trust | None,
        request_ids: Iterator[int] | None = None,
        on_end: Callable[[str], None] = lambda reason: None,
        timeout_s: float = _CONNECT_S,
    ) -> Caller:
        """Connect to another process.

        Raises:
            MemberUnreachableError: no process of this cluster answers there.
        """
        made = cls(name, itertools.count(1) if request_ids is None else request_ids, on_end)
        connection = FrameConnection(made._answered, made._end, frame_bytes_max)
        try:
            await asyncio.wait_for(connect(lambda: connection, host, port, trust), timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            place = join_address(host, port)
            raise MemberUnreachableError(f"{name} cannot be reached at {place}: {error or 'no answer'}") from None
        made._connection, made.place = connection, (host, port)
        return made

    @property
    def ended(self) -> bool:
        """Whether the connection has ended."""
        return self._ended is not None

    async def call(
        self,
        command: int,
        data: bytes,
        role: Role,
        rank: int | None,
        kind: int = Kind.PROTOBUF,
        user: int = 0,
        tag: Tag | None = None,
    ) -> tuple[Any, bytes]:
        """Send a request, wait for the response, and return its meta and data.

        Raises:
            MemberUnreachableError: the connection ended before the response.
        """
        if self._ended is not None or self._connection is None:
            raise MemberUnreachableError(f"The connection to {self._name} has ended: {self._ended}.")
        number = next(self._request_ids)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._connection.send(request_frame(command, number, data, role, rank, kind, user, tag))
            frame = await future
        finally:
            self._waiting.pop(number, None)
        return parse(Meta, frame.meta), frame.data

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close("this process has closed it")

    def abort(self) -> None:
        """End the connection at once, without TLS's closing handshake, which waits for the peer."""
        if self._connection is not None:
            self._connection.abort("this process has closed it")

    def _answered(self, frame: Frame) -> None:
        future = self._waiting.get(parse(Meta, frame.meta).request_id)
        if future is not None and not future.done():
            future.set_result(frame)

    def _end(self, reason: str) -> None:
        self._ended = reason
        for future in self._waiting.values():
            if not future.done():
                words = f"The connection to {self._name} ended before the response: {reason}."
                future.set_exception(MemberUnreachableError(words))
        self._on_end(reason)


class Incoming:
    """A connection on which another member sends requests to this one.

    Args:
        on_request: called with this connection, each request's meta, and its frame.
        frame_bytes_max: largest frame accepted.
    """

    def __init__(self, on_request: Callable[[Incoming, Any, Frame], None], frame_bytes_max: int) -> None:
        self._on_request = on_request
        self.protocol = FrameConnection(self._came, lambda reason: None, frame_bytes_max)

    def acknowledge(self, frame: Frame) -> None:
        """Acknowledge a request by echoing it."""
        self.protocol.send(Frame(Kind.RAW, frame.meta, frame.data))

    def answer(self, meta: Any, role: Role, rank: int, data: bytes) -> None:
        """Answer a request with bytes, in the name of this role and rank."""
        answer = Meta()
        answer.CopyFrom(meta)
        answer.role, answer.rank_id = int(role), rank
        self.protocol.send(Frame(Kind.RAW, answer.SerializeToString(), data))

    def close(self, reason: str) -> None:
        """End the connection."""
        self.protocol.close(reason)

    def _came(self, frame: Frame) -> None:
        if not frame.meta:
            raise FramingError("a request without meta came.")
        self.protocol.settle()
        self._on_request(self, parse(Meta, frame.meta), frame)


def look(address: str, token: str | None, timeout_s: float = 10.0) -> tuple[MemberView, ...]:
    """Fetch the list of members from a scheduler without joining the cluster.

    Args:
        address: `host:port` at which the scheduler accepts frames.
        token: the cluster's; None for a scheduler that allows anonymous members.
        timeout_s: for the answer; at most 5 s of it are for the connection.
    Raises:
        MemberUnreachableError: no process of the cluster answers there in time.
        ConfigError: the token is damaged.
    """
    trust = None if token is None else trust_of(token)
    place = split_address(address)

    async def ask() -> tuple[MemberView, ...]:
        ended = asyncio.Event()
        wait_s = min(timeout_s, _CONNECT_S)
        caller = await Caller.open(
            "the scheduler", *place, _LOOK_BYTES_MAX, trust, on_end=lambda reason: ended.set(), timeout_s=wait_s
        )
        try:
            data = FetchServers(node_id="look").SerializeToString()
            call = caller.call(Command.FETCH_METADATA, data, Role.WORKER, None)
            _, answer = await asyncio.wait_for(call, timeout_s)
        except asyncio.TimeoutError:
            raise MemberUnreachableError(f"The scheduler at {address} does not answer.") from None
        finally:
            caller.abort()
            await ended.wait()  # the event loop ends with this function, and the socket would stay open
        return views(parse(FetchResp, answer).servers_meta)

    return asyncio.run(ask())
