"""A parameter-server cluster's scheduler in this process: frames over TCP, the same messages over gRPC, and HTTP.

A thin shell around the state machine, on one event loop. Requests become events. The records that follow from all
events at hand are written to the journal in one batch before any reply or notification is sent. A member is lost as
soon as its connection ends, or after the heartbeat timeout without a message. A notification to all members is queued
for each of them and does not wait for any.

With a token, frames, gRPC and HTTP use TLS with certificates on both sides, made from the identity that the token
stands for: a connection has proved the secret before a byte of it is parsed. Foreign members (MindSpore's) have no
secret. With `allow_anonymous` a cluster accepts them instead of fastrt's members, since members also connect to each
other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from fastrt.durable import DiskFullError, Journal, StateDirectoryError
from fastrt.errors import ConfigError, FastrtError
from fastrt.foreign_text import read_object
from fastrt.membership import events as ev
from fastrt.membership.door import Door
from fastrt.membership.events import Answer, Effect, Event, Persist, Phase, Refused
from fastrt.membership.framing import Frame, FramingError
from fastrt.membership.http import ManagementServer
from fastrt.membership.links import FrameConnection, Link, StreamLink, TcpLink, end_connections
from fastrt.membership.state import ClusterState, Settings
from fastrt.membership.wire import EXCHANGE, SERVICE, Command, Encoder, parse_request
from fastrt.net.address import split_address, with_port
from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.contract import Server, Stream
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.server import open_server
from fastrt.net.grpc.standard import CHECK_PATH, StandardServices
from fastrt.net.grpc.trust import Trust, trust_of
from fastrt.net.grpc.visitors import VISITORS_MAX
from fastrt.net.loop_thread import LoopThread

_log = logging.getLogger(__name__)

_ASK_S = 10.0
_STOP_S = 5.0
_FULL_RETRY_S = 0.2
# Larger than the records of any request that may be refused.
_REQUEST_BYTES = 4096


@dataclass
class ClusterOptions:
    """Options of a cluster's scheduler.

    Attributes:
        address: `host:port` for frames over TCP; port 0 takes any free one.
        settings: of the state machine: numbers of members, and timeouts.
        grpc_address: `host:port` for the same messages over gRPC; None: not served.
        http_address: `host:port` for managing the cluster over HTTP; None: not served.
        manage: handles HTTP requests instead of the scheduler's `ask`; same signature.
        token: the cluster's; fastrt's members and management clients prove it over TLS.
        tls: PEM files for gRPC instead, with the authority of its clients' certificates.
        allow_anonymous: serve foreign members, which have no secret, in the clear instead of fastrt's own; gRPC and
            HTTP too without a token. Every process that reaches such an address can join and end the cluster.
        accept_loss: continue with the intact part of a damaged `state_dir`; see `fastrt.durable.Journal`.
        state_dir: folder that keeps members, ranks and counts over restarts; None: nothing is kept.
        power: keep them over a loss of power too (an fsync per batch).
        links_max: most connections at a time.
        frame_bytes_max: largest frame accepted from a member.
    """

    address: str = "127.0.0.1:0"
    settings: Settings = field(default_factory=Settings)
    grpc_address: str | None = None
    http_address: str | None = None
    manage: Callable[[Callable[[int], Event]], Any] | None = None
    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    allow_anonymous: bool = False
    state_dir: str | os.PathLike[str] | None = None
    accept_loss: bool = False
    power: bool = False
    links_max: int = 10_000
    frame_bytes_max: int = 16 << 20

    def check(self) -> None:
        """Reject numbers that make no sense, and a configuration without authentication that was not asked for.

        Raises:
            ConfigError: a number is out of range; there is no token, and anonymous members are not allowed.
        """
        wanted = self.settings
        total = wanted.workers + wanted.servers
        if wanted.workers < 0 or wanted.servers < 0 or not 1 <= total <= wanted.members_max:
            raise ConfigError(
                f"{wanted.workers} workers and {wanted.servers} servers: there must be from 1 to {wanted.members_max}."
            )
        if min(wanted.heartbeat_timeout_s, wanted.available_timeout_s, wanted.scale_timeout_s) <= 0:
            raise ConfigError("the heartbeat, available and scale timeouts must be more than 0 seconds.")
        if self.token is None and not self.allow_anonymous:
            raise ConfigError(
                "without a token every process that reaches the scheduler could join and end the cluster. Name a token "
                "file, or allow anonymous members (--allow-anonymous) where members are not fastrt's."
            )
        if self.tls is not None and self.tls.client_ca is None:
            raise ConfigError("TLS files for gRPC need the certificate authority of the clients (--tls-ca).")


class ClusterScheduler:
    """A cluster's scheduler inside this process.

    Args:
        options: see `ClusterOptions`.

    Attributes:
        address: where the scheduler accepts frames, once started.
        grpc_address: where gRPC is served.
        http_address: where HTTP is served.

    Raises:
        ConfigError: an option makes no sense, or the token is damaged.
        StateDirectoryError: the state directory cannot be used.
    """

    def __init__(self, options: ClusterOptions) -> None:
        options.check()
        self.options = options
        self._trust = None if options.token is None else trust_of(options.token)
        self.address = self.grpc_address = self.http_address = ""
        self.finished = threading.Event()
        self._journal: Journal | None = None
        if options.state_dir is not None:
            self._journal = Journal(options.state_dir, options.power, accept_loss=options.accept_loss)
        self._state = ClusterState(options.settings, time.monotonic())
        self._encoder = Encoder()
        self._links: dict[int, Link] = {}
        self._callers: dict[int, Callable[[Any], None]] = {}
        self._next_call = 0
        self._effects: list[Effect] = []
        self._settle_soon = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._broken: StateDirectoryError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: LoopThread | None = None
        self._door: Door | None = None
        self._grpc: Server | None = None
        self._http: ManagementServer | None = None
        self._standard = StandardServices([SERVICE], [message_set("cluster")])

    def __enter__(self) -> ClusterScheduler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen and serve until `stop`; continues the state that an earlier process left in the state directory.

        Raises:
            OSError: an address cannot be bound.
        """
        self._restore()
        self._thread = LoopThread("fastrt-cluster")
        try:
            self._thread.run(self._listen())
            if self.options.grpc_address is not None:
                self._listen_grpc(self.options.grpc_address)
            if self.options.http_address is not None:
                manage = self.options.manage or self.ask
                self._http = ManagementServer(self.options.http_address, self._trust, manage)
                self.http_address = self._http.address
        except BaseException:
            self.stop()
            raise
        wanted = self.options.settings
        _log.info("cluster of %d workers and %d servers on %s", wanted.workers, wanted.servers, self.address)

    def stop(self) -> None:
        """Close all connections and stop serving."""
        self._standard.set_serving(False)
        if self._http is not None:
            self._http.stop()
            self._http = None
        if self._thread is not None:
            self._thread.run(self._close())
        if self._grpc is not None:
            self._grpc.stop()
            self._grpc = None
        if self._thread is not None:
            self._thread.stop(_STOP_S)
            self._thread = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def ask(self, make: Callable[[int], Event]) -> Any:
        """Put a management request to the state machine, from any other thread, and return its answer.

        Args:
            make: makes the event from the call's number.
        Raises:
            Refused: the state machine rejects the request.
            FastrtError: the scheduler has stopped, or does not answer.
        """
        answered: Future[Any] = Future()
        thread = self._thread
        if thread is None:
            raise FastrtError("The scheduler has stopped.")
        thread.loop.call_soon_threadsafe(self._call, make, answered.set_result)
        try:
            value = answered.result(timeout=2 * _ASK_S)
        except FutureTimeoutError:
            raise FastrtError("The scheduler does not answer; its log says why.") from None
        if isinstance(value, Exception):
            raise value
        return value

    def overview(self) -> ev.Overview:
        """The members and the cluster's phase; from any other thread.

        Raises:
            FastrtError: the scheduler has stopped.
        """
        found: ev.Overview = self.ask(ev.View)
        return found

    # On the event loop

    def _restore(self) -> None:
        if self._journal is None:
            return
        records = list(self._journal.records())
        about = [
            read_object(value, "the record of the cluster", own=True) for kind, _, value in records if kind == "cluster"
        ]
        ended = any(one["ended"] for one in about)
        if ended:
            _log.info("the cluster in this state directory has finished; a new one begins")
            self._journal.write({(kind, key): None for kind, key, _ in records})
            return
        self._state.restore(records, time.monotonic())
        self._take([])

    async def _listen(self) -> None:
        address, wanted, trust = self.options.address, self.options.settings, self._frame_trust
        # All members may connect at once, so there is a place for each besides those that strangers can take.
        places = VISITORS_MAX + wanted.workers + wanted.servers
        self._door = Door(self._accept, None if trust is None else trust.server, places)
        self.address = with_port(address, await self._door.open(*split_address(address, 0)))
        if trust is None:
            _log.warning("members are not authenticated: every process that reaches %s can join", self.address)
        self._settle()

    @property
    def _frame_trust(self) -> Trust | None:
        return None if self.options.allow_anonymous else self._trust

    def _listen_grpc(self, address: str) -> None:
        streams = {EXCHANGE: self._accept_stream, **self._standard.streams}
        self._grpc = open_server(self, [CHECK_PATH], streams, self.options.frame_bytes_max)
        credentials = None
        if self.options.tls is not None:
            credentials = self.options.tls.server_credentials()
        elif self._trust is not None:
            credentials = self._trust.identity.server_credentials()
        port = self._grpc.bind(address, credentials)
        self.grpc_address = with_port(address, port)
        self._grpc.start()

    def _accept(self, host: str) -> FrameConnection:
        limit = self.options.frame_bytes_max
        return TcpLink(self._on_request, self._on_lost, self._on_made, limit, host, self._frame_trust).incoming

    def _on_made(self, link: Link) -> None:
        self._links[link.number] = link
        if len(self._links) > self.options.links_max:
            asyncio.get_running_loop().call_soon(link.close, f"there are {self.options.links_max} connections already")

    def _accept_stream(self, stream: Stream) -> None:
        """Set up a new gRPC stream. Runs on gRPC's thread, which must wait until the stream has its receiver."""
        made: Future[None] = Future()

        def make() -> None:
            link = StreamLink(self._on_request, self._on_lost, stream)
            self._links[link.number] = link
            made.set_result(None)

        assert self._thread is not None
        self._thread.loop.call_soon_threadsafe(make)
        made.result(timeout=_ASK_S)

    def _on_request(self, link: Link, meta: Any, frame: Frame) -> None:
        if self._broken is not None:
            raise FramingError(str(self._broken))
        self._next_call += 1
        call = self._next_call
        request = parse_request(meta, frame.data, call, link.number)
        self._callers[call] = lambda value: self._respond(link, meta.cmd, frame, request.event, value)
        if isinstance(request.event, ev.Register):
            link.wants_changes = request.wants_changes
        address = self._address_of(link, request.event)
        try:
            self._refuse_without_room(request.event)
            if address is not None:
                link.goes_to(*address)
        except Refused as refused:
            self._callers.pop(call)(refused)
            return
        self._feed(request.event)
        if link.number in self._state.members.by_link:
            link.settle()

    def _address_of(self, link: Link, event: Event) -> tuple[str, int] | None:
        """The address of the member that takes over this connection with this request, if it does."""
        match event:
            case ev.Register():
                return event.host, event.port
            case ev.Heartbeat() | ev.Finish():
                return self._state.address_over(link.number, event.member_id)
        return None

    def _refuse_without_room(self, event: Event) -> None:
        """Refuse a request that makes the cluster larger while the disk is full; other requests use a reserve.

        Raises:
            Refused: the disk is full.
        """
        if isinstance(event, ev.Register):
            grows = event.member_id not in self._state.members.by_id
        else:
            grows = isinstance(event, ev.ScaleOut | ev.ScaleIn)
        if grows and self._journal is not None and not self._journal.has_room(_REQUEST_BYTES):
            raise Refused(
                f"The disk of the scheduler's state directory {self.options.state_dir} is full. Free some space."
            )

    def _respond(self, link: Link, command: int, frame: Frame, event: Event, value: Any) -> None:
        if isinstance(value, FastrtError):
            _log.warning("%s of connection %d was refused: %s", Command.name(command), link.number, value)
            if isinstance(event, ev.Register):
                link.reply(frame, self._encoder.refused(event.member_id, str(value)))
            link.close(str(value))
        elif isinstance(event, ev.Register):
            link.reply(frame, self._encoder.registered(event.member_id))
        elif isinstance(event, ev.Heartbeat):
            link.reply(frame, self._encoder.heartbeat(value))
        elif isinstance(event, ev.Fetch):
            link.reply(frame, self._encoder.fetched(value))
        else:
            link.reply(frame, frame.data)

    def _on_lost(self, link: Link, reason: str) -> None:
        del self._links[link.number]
        if self._stopping:
            return  # this process ends the connections: a scheduler that restarts from the records finds members alive
        _log.info("connection %d ended: %s", link.number, reason)
        self._feed(ev.LinkLost(link.number))

    def _call(self, make: Callable[[int], Event], answer: Callable[[Any], None]) -> None:
        if self._broken is not None:
            answer(self._broken)
            return
        self._next_call += 1
        event = make(self._next_call)
        try:
            self._refuse_without_room(event)
        except Refused as refused:
            answer(refused)
            return
        self._callers[self._next_call] = answer
        self._feed(event)

    def _feed(self, event: Event) -> None:
        if self._broken is None:
            self._take(self._state.handle(event, time.monotonic()))

    def _take(self, effects: list[Effect]) -> None:
        self._effects += effects
        if not self._settle_soon and self._thread is not None:
            self._settle_soon = True
            self._thread.loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Write the records of all effects, then carry the effects out."""
        self._settle_soon = False
        effects, self._effects = self._effects, []
        records = {(e.kind, e.key): e.value for e in effects if isinstance(e, Persist)}
        if records and self._journal is not None:
            try:
                self._journal.write(records)
            except DiskFullError as error:
                # Answers wait until the disk has room: an effect that a crash would undo must not become visible.
                _log.critical("the cluster's scheduler waits for disk space: %s", error)
                self._effects = effects
                self._settle_soon = True
                asyncio.get_running_loop().call_later(_FULL_RETRY_S, self._settle)
                return
            except StateDirectoryError as error:
                # Memory is now ahead of the disk, so none of these effects may become visible.
                self._break(error)
                return
        changed = False
        for effect in effects:
            changed = changed or isinstance(effect, ev.Changed)
            self._carry_out(effect)
        if changed:
            self._send_changes()
        if self._state.phase is Phase.EXIT:
            self.finished.set()
        self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer(call, value):
                self._callers.pop(call)(value)
            case ev.Send(links, order):
                command, data_of = self._encoder.order(order)
                for i, number in enumerate(links):
                    link = self._links.get(number)
                    if link is not None:
                        link.notify(command, data_of(i))
            case ev.Drop(number, reason):
                link = self._links.get(number)
                if link is not None:
                    link.abort(reason)
            case ev.Ask():
                effect = effect._replace(servers=[pair for pair in effect.servers if pair[0] in self._links])
                task = asyncio.get_running_loop().create_task(self._ask_servers(effect))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _send_changes(self) -> None:
        data = self._encoder.changed(self._state.overview())
        for link in [link for link in self._links.values() if link.wants_changes]:
            link.notify(Command.HEARTBEAT, data)

    async def _ask_servers(self, effect: ev.Ask) -> None:
        asked = {rank: self._links[link].ask(int(effect.instruction), effect.body) for link, rank in effect.servers}
        if asked:
            await asyncio.wait(asked.values(), timeout=_ASK_S)
        result: Any = {}
        for rank, future in sorted(asked.items()):
            if not future.done() or future.cancelled():
                future.cancel()
                result = FastrtError(f"Server {rank} does not answer; it may or may not have executed the request.")
                break
            result[rank] = future.result().decode("utf-8", "replace")
        self._feed(ev.Instructed(effect.call, result))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._state.next_deadline()
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._feed, ev.Tick())

    def _break(self, error: StateDirectoryError) -> None:
        _log.critical("the cluster's scheduler cannot continue: %s", error)
        self._broken = error
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller(error)
        for link in list(self._links.values()):
            link.close(str(error))

    async def _close(self) -> None:
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._door is not None:
            await self._door.close()
        for task in self._tasks:
            task.cancel()
        for link in list(self._links.values()):
            link.close("the scheduler stops")
        await end_connections("the scheduler stops")
        if self._timer is not None:
            self._timer.cancel()

    # On gRPC's thread: the health check is the only unary call

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Answer a health check."""
        assert self._grpc is not None
        self._grpc.finish(call, *self._standard.check(body))

    def on_cancel(self, call: int) -> None:
        """Do nothing: a health check is answered at once."""

    def on_idle(self) -> float | None:
        """Do nothing: no work waits for an idle moment."""
        return None

    def on_stop(self) -> None:
        """Do nothing: `stop` ends the server."""
