"""The scheduler's connections to members: two sockets over TCP, like upstream, or one stream over gRPC.

The life of a link is the life of its member's connection. Over TCP the member's requests come in on the socket that the
member opened. The scheduler's requests go out on a socket that it opens to the member's registered address when it
first needs it. When one of the two sockets ends, the other is closed. Sending never waits: data that cannot be written
at once is buffered, and a member that does not read is disconnected.

All of this runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from fastrt.membership.events import Refused, Role
from fastrt.membership.framing import Frame, FramingError, Kind, Parser
from fastrt.membership.wire import Comm, Command, Meta, parse, request_frame
from fastrt.net.grpc.contract import Stream
from fastrt.net.grpc.trust import Trust

_log = logging.getLogger(__name__)

_BUFFER_BYTES_MAX = 256 << 20
_CONNECT_S = 5.0
# How long a peer has to read the last messages before its connection is aborted.
_FLUSH_S = 1.0
_PAUSE_S = 0.001
_INVALID_ARGUMENT = 3
_numbers = itertools.count(1)
# The connections of each event loop that have not ended; see `end_connections`.
_open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakSet[FrameConnection]]
_open = weakref.WeakKeyDictionary()

OnRequest = Callable[["Link", Any, Frame], None]  # the link, its MessageMeta, the frame
OnLost = Callable[["Link", str], None]


def is_same_machine(host: str, other: str) -> bool:
    """Whether two IP addresses are equal, or both belong to this machine."""
    return host == other or (_is_ours(host) and _is_ours(other))


def _is_ours(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


class Link(ABC):
    """The connection of one member.

    Args:
        on_request: called with each request of the member.
        on_lost: called once, with the reason, when the connection has ended.

    Attributes:
        number: unique to this connection.
        wants_changes: whether the member asked for notifications of lost and returned members.
    """

    def __init__(self, on_request: OnRequest, on_lost: OnLost) -> None:
        self.number = next(_numbers)
        self.wants_changes = False
        self._on_request = on_request
        self._on_lost = on_lost
        self._request_ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._is_lost = False

    @abstractmethod
    def goes_to(self, host: str, port: int) -> None:
        """Set the address at which the member accepts the scheduler's requests, for links that need one.

        Raises:
            Refused: the address is on another machine than the member, and the member has proved no secret.
        """

    @abstractmethod
    def reply(self, request: Frame, data: bytes) -> None:
        """Answer a request with its own meta and this data."""

    @abstractmethod
    def _send(self, frame: Frame) -> None:
        """Send a request of the scheduler."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """End the connection after the queued data is written."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the connection at once."""

    @abstractmethod
    def settle(self) -> None:
        """Note that the connection belongs to a member now."""

    def notify(self, command: int, data: bytes) -> None:
        """Send a request and do not wait for its response."""
        self._send(request_frame(command, next(self._request_ids), data, Role.SCHEDULER))

    def ask(self, user_command: int, data: bytes) -> asyncio.Future[bytes]:
        """Send bytes to a server; the future holds its response, and is cancelled when the link is lost."""
        number = next(self._request_ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        self._send(request_frame(Command.SEND_DATA, number, data, Role.SCHEDULER, kind=Kind.RAW, user=user_command))
        return future

    def _answered(self, meta: Any, data: bytes) -> None:
        future = self._asked.get(meta.request_id)
        if future is not None and not future.done():
            future.set_result(data)

    def _lost(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            for future in list(self._asked.values()):
                future.cancel()
            self._on_lost(self, reason)


class FrameConnection(asyncio.Protocol):
    """A TCP connection that carries frames.

    Args:
        on_frame: called with each frame; FramingError from it ends the connection.
        on_end: called once, with the reason, when the connection has ended.
        frame_bytes_max: largest frame accepted.
        on_made: called when the connection is established; `on_end` is called only after that.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
        frame_bytes_max: int,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_made = on_made
        self._parser = Parser(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._reason = "the peer has closed it"
        self._settled: asyncio.Future[None] | None = None
        self.is_settled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and report the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _open.setdefault(asyncio.get_running_loop(), weakref.WeakSet()).add(self)
        self._on_made()

    def settle(self) -> None:
        """Note that the connection belongs to the cluster or has ended: its door stops waiting for it."""
        self.is_settled = True
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def settled(self) -> asyncio.Future[None]:
        """Future that is done once `settle` was called."""
        self._settled = asyncio.get_running_loop().create_future()
        if self.is_settled:
            self._settled.set_result(None)
        return self._settled

    def data_received(self, data: bytes) -> None:
        """Parse the bytes and pass on each complete frame; a framing error closes the connection."""
        try:
            for frame in self._parser.feed(data):
                self._on_frame(frame)
        except FramingError as error:
            self.close(str(error))

    def eof_received(self) -> bool:
        """Note an end inside a frame as the reason."""
        if self._parser.is_torn():
            self._reason = "it ended inside a frame"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection with its reason."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()  # on Python 3.10 a TLS transport that has lost its peer warns as unclosed otherwise
        self._transport = None
        _open[asyncio.get_running_loop()].discard(self)
        self.settle()
        self._on_end(self._reason if exc is None else str(exc))

    def send(self, frame: Frame) -> None:
        """Queue a frame; never waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(frame.head())
        if frame.data:
            transport.write(frame.data)
        try:
            queued = transport.get_write_buffer_size()
        except AttributeError:  # Python 3.10's TLS transport has lost its peer, and reports it in the loop's next turn
            return
        if queued > _BUFFER_BYTES_MAX:
            self._reason = f"the peer does not read: {_BUFFER_BYTES_MAX >> 20} MiB are queued for it"
            transport.abort()

    def close(self, reason: str) -> None:
        """End the connection after the queued data is written, and with TLS after the peer's answer to that."""
        if self._transport is not None and not self._transport.is_closing():  # a second `close` disables TLS's `abort`
            self._reason = reason
            self._transport.close()

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        self.settle()
        if self._transport is not None:
            self._reason = reason
            self._transport.abort()


async def connect(make: Callable[[], FrameConnection], host: str, port: int, trust: Trust | None) -> None:
    """Open a connection for frames to another process.

    Args:
        make: makes its protocol.
        host, port: of the other process.
        trust: the cluster's, which both ends prove over TLS; None: in the clear.
    Raises:
        OSError: the other process does not answer, or is not part of the cluster.
    """
    loop = asyncio.get_running_loop()
    if trust is None:
        await loop.create_connection(make, host, port)
    else:
        await loop.create_connection(make, host, port, ssl=trust.client, server_hostname=trust.name)


async def end_connections(reason: str) -> None:
    """End all connections and tasks of this event loop before it stops: else their sockets would stay open.

    The closing handshake of TLS waits for the peer. A connection whose peer does not answer in time is aborted.
    """
    connections = _open.get(asyncio.get_running_loop(), weakref.WeakSet())
    until = time.monotonic() + _FLUSH_S
    while time.monotonic() < until + _FLUSH_S:
        for connection in list(connections):
            if time.monotonic() < until:
                connection.close(reason)
            else:
                connection.abort(reason)
        all_ended = not connections
        await asyncio.sleep(_PAUSE_S)  # a task that waits for a connection gets its error before it is cancelled
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if all_ended and not tasks:
            return
        if all_ended:
            for task in tasks:  # one may open a connection
                task.cancel()
    _log.warning("%d connections and %d tasks have not ended", len(connections), len(tasks))


class TcpLink(Link):
    """A member that speaks frames. Pass `incoming` to a door as the protocol of its connection.

    Args:
        on_request, on_lost: see `Link`.
        on_made: called with this link when the connection is established.
        frame_bytes_max: largest frame accepted.
        host: the member's address.
        trust: the cluster's, which the member has proved; None: the member has proved nothing, and the scheduler only
            connects back to the machine that the member connects from.
    """

    def __init__(
        self,
        on_request: OnRequest,
        on_lost: OnLost,
        on_made: Callable[[Link], None],
        frame_bytes_max: int,
        host: str,
        trust: Trust | None,
    ) -> None:
        super().__init__(on_request, on_lost)
        self.incoming = FrameConnection(self._request, self._lost, frame_bytes_max, lambda: on_made(self))
        self._frame_bytes_max = frame_bytes_max
        self._host = host
        self._trust = trust
        self._target: tuple[str, int] | None = None
        self._outgoing: FrameConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[Frame] = []

    def goes_to(self, host: str, port: int) -> None:
        """Set the address at which the member listens.

        Raises:
            Refused: it is on another machine than the member, and no token proves the member.
        """
        if self._trust is None and not is_same_machine(self._host, host):
            raise Refused(
                f"a member at {self._host} cannot be called at {host!r}: without a token, its address must be an IP "
                "address of the machine that it connects from."
            )
        self._target = (host, port)

    def settle(self) -> None:
        """Count the connection as one that belongs to the cluster."""
        self.incoming.settle()

    def reply(self, request: Frame, data: bytes) -> None:
        """Answer a request."""
        self.incoming.send(Frame(Kind.PROTOBUF, request.meta, data))

    def close(self, reason: str) -> None:
        """End the link after the queued data is written."""
        self.incoming.close(reason)

    def abort(self, reason: str) -> None:
        """End the link at once."""
        self.incoming.abort(reason)

    def _request(self, frame: Frame) -> None:
        self._on_request(self, parse(Meta, frame.meta), frame)

    def _send(self, frame: Frame) -> None:
        if self._is_lost:
            return
        if self._outgoing is not None:
            self._outgoing.send(frame)
            return
        self._waiting.append(frame)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        host, port = self._target or ("", 0)
        made = FrameConnection(self._response, self._outgoing_ended, self._frame_bytes_max)
        try:
            await asyncio.wait_for(connect(lambda: made, host, port, self._trust), _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            self.incoming.close(f"the member cannot be reached at {host}:{port}: {error or 'no answer'}")
            return
        if self._is_lost:
            made.close("the member is gone")
            return
        self._outgoing = made
        for frame in self._waiting:
            made.send(frame)
        self._waiting.clear()

    def _response(self, frame: Frame) -> None:
        self._answered(parse(Meta, frame.meta), frame.data)

    def _outgoing_ended(self, reason: str) -> None:
        self.incoming.close(f"the connection to the member's port ended: {reason}")

    def _lost(self, reason: str) -> None:
        if self._outgoing is not None:
            self._outgoing.close("the member is gone")
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
        super()._lost(reason)


class StreamLink(Link):
    """A member that speaks gRPC. One stream carries everything; `role` in a message names the side that asked."""

    def __init__(self, on_request: OnRequest, on_lost: OnLost, stream: Stream) -> None:
        super().__init__(on_request, on_lost)
        self._stream = stream
        loop = asyncio.get_running_loop()

        def on_loop(call: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the service has stopped
                loop.call_soon_threadsafe(call, *arguments)

        stream.receiver = lambda body: on_loop(self._received, body)
        stream.on_closed = lambda: on_loop(self._lost, "its stream has ended")

    def goes_to(self, host: str, port: int) -> None:
        """Do nothing: requests use the stream."""

    def settle(self) -> None:
        """Do nothing: the gRPC server has decided who may call."""

    def reply(self, request: Frame, data: bytes) -> None:
        """Answer a request."""
        self._stream.send(Comm(pb_meta=parse(Meta, request.meta), data=data).SerializeToString())

    def close(self, reason: str) -> None:
        """End the link after the queued data is written."""
        self._stream.finish(_INVALID_ARGUMENT, reason)
        self._lost(reason)

    def abort(self, reason: str) -> None:
        """End the link at once."""
        self.close(reason)

    def _send(self, frame: Frame) -> None:
        if not self._is_lost:
            self._stream.send(Comm(pb_meta=parse(Meta, frame.meta), data=frame.data).SerializeToString())

    def _received(self, body: bytes | None) -> None:
        if self._is_lost:
            return
        if body is None:
            self._stream.finish()
            self._lost("its stream has ended")
            return
        try:
            came = parse(Comm, body)
            if came.pb_meta.role == Role.SCHEDULER:
                self._answered(came.pb_meta, came.data)
            else:
                frame = Frame(Kind.PROTOBUF, came.pb_meta.SerializeToString(), came.data)
                self._on_request(self, came.pb_meta, frame)
        except FramingError as error:
            self.close(str(error))
