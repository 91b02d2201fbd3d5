"""A member of a parameter-server cluster, server or worker: blocking calls, with a thread behind them.

The thread registers with the scheduler (`Registration`), keeps the heartbeat and reconnects when the scheduler was away
(`SchedulerConnection`), and takes what the scheduler and other members send. The user's functions run on other threads
(`EventRunner`), so that a slow one never costs a heartbeat.

It speaks the protocol of releases 1.5 and 2.7 alike: metadata may come before the response to the registration, and
with or without a request number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastrt.errors import FastrtError
from fastrt.membership import wire
from fastrt.membership.connection import SchedulerConnection
from fastrt.membership.door import Door
from fastrt.membership.event_runner import EventRunner
from fastrt.membership.events import MemberView, Phase, Role
from fastrt.membership.framing import Frame, FramingError, Kind
from fastrt.membership.links import FrameConnection, end_connections
from fastrt.membership.mailbox import Mailbox
from fastrt.membership.member_loop import MemberLoop
from fastrt.membership.messages import Messages
from fastrt.membership.options import ClusterTimeoutError, MemberOptions
from fastrt.membership.peers import Caller, Incoming, MemberUnreachableError
from fastrt.membership.registration import Registration
from fastrt.membership.view import ClusterView
from fastrt.membership.wire import Command, parse
from fastrt.net.address import join_address
from fastrt.net.grpc.trust import trust_of

_log = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_S = 5.0


class ClusterMember(Messages):
    """One server or worker of a cluster. `start` it, and `close` it.

    Args:
        role: SERVER or WORKER.
        options: see `MemberOptions`.

    Attributes:
        member_id: its name in the cluster.
        role: as given.
        address: where it takes what others send, once started.
    """

    def __init__(self, role: Role, options: MemberOptions) -> None:
        self.role = role
        self.options = options
        self.member_id = options.member_id or str(uuid.uuid4())
        self.address = ""
        self._trust = None if options.token is None else trust_of(options.token)
        self._request_ids = itertools.count(1)
        self._view = ClusterView()
        self._loop = MemberLoop()
        self._events = EventRunner(options)
        self._scheduler = SchedulerConnection(
            role, self.member_id, options, self._trust, self._view, self._loop, self._events, self._request_ids
        )
        self._registration = Registration(
            role, self.member_id, options, self._scheduler, self._view, self._events, self._loop, self._note_members
        )
        self._mailbox = Mailbox()
        self._door: Door | None = None
        self._peers: dict[tuple[Role, int], Caller] = {}
        self._opening: dict[tuple[Role, int], asyncio.Lock] = {}

    def __enter__(self) -> ClusterMember:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Blocking calls, from any thread but the member's own

    def start(self) -> None:
        """Listen, connect to the scheduler and register.

        Raises:
            MemberUnreachableError: no scheduler of this cluster serves at its address.
            RegistrationRefusedError: the scheduler does not take this member.
            OSError: this member's address cannot be bound.
        """
        self._loop.start()
        try:
            self._loop.wait(self._join(), self.options.call_timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all connections. The cluster misses a member that has not finished."""
        if not self._loop.is_running:
            return
        with contextlib.suppress(ClusterTimeoutError):
            self._loop.wait(self._leave(), _CLOSE_S)
        self._loop.stop()
        self._events.close()
        self._view.fail(FastrtError("The member has been closed."))

    @property
    def rank(self) -> int | None:
        """Number among the members of this role; None before all were there, and after it was scaled in."""
        return self._view.rank

    @property
    def phase(self) -> Phase:
        """Phase of the cluster, as the scheduler reported it last."""
        return self._view.phase

    @property
    def counts(self) -> tuple[int, int]:
        """Number of workers and of servers in the cluster."""
        return self._view.counts

    @property
    def members(self) -> tuple[MemberView, ...]:
        """All members, as of the last metadata."""
        return self._view.members

    def wait_ready(self, timeout_s: float = 300.0) -> int | None:
        """Wait until all members are there; returns the rank.

        Raises:
            ClusterTimeoutError: they are not in this time.
            FastrtError: this member was refused, or has lost the scheduler.
        """
        self.wait_for(lambda: self._view.ready, timeout_s, "all members")
        return self._view.rank

    def wait_ended(self, timeout_s: float = 30.0) -> None:
        """Wait until all members have finished.

        Raises:
            ClusterTimeoutError: they have not in this time.
        """
        self.wait_for(lambda: self._view.ended, timeout_s, "all members to finish")

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until a condition on this member's attributes holds; it is checked after each change.

        Raises:
            ClusterTimeoutError: it does not hold in this time.
            FastrtError: this member was refused, closed, or has lost the scheduler.
        """
        self._view.wait_for(condition, timeout_s, what)

    def fetch(self, timeout_s: float | None = None) -> tuple[MemberView, ...]:
        """Ask the scheduler for all members: their ranks now, and whether they are alive.

        Raises:
            MemberUnreachableError: the scheduler does not answer.
        """
        data = wire.FetchServers(node_id=self.member_id).SerializeToString()
        answer = self._wait(self._scheduler.ask(Command.FETCH_METADATA, data), timeout_s)
        return wire.views(parse(wire.FetchResp, answer).servers_meta)

    def publish(self, number: int, timeout_s: float | None = None) -> None:
        """Send a number to all members, this one too; see `on_message`.

        Raises:
            MemberUnreachableError: the scheduler does not answer.
        """
        data = wire.EventMessage(event=number, node_id=self.member_id).SerializeToString()
        self._wait(self._scheduler.ask(Command.SEND_EVENT, data), timeout_s)

    def send(
        self, rank: int, data: bytes, command: int = 0, role: Role = Role.SERVER, timeout_s: float | None = None
    ) -> bytes:
        """Send bytes to a member, by default a server; returns what its `on_data` answers.

        Raises:
            MemberUnreachableError: it cannot be reached, or ended before it answered.
            ClusterTimeoutError: it has not answered in time; it may execute the request nevertheless.
        """
        return self._wait(self._send(Command.SEND_DATA, role, rank, data, command), timeout_s)

    def broadcast(self, data: bytes, command: int = 0, timeout_s: float | None = None) -> dict[int, bytes]:
        """Send bytes to all servers; returns their answers by rank.

        Raises:
            MemberUnreachableError: one cannot be reached; others may have taken it.
            ClusterTimeoutError: one has not answered in time.
        """

        async def send_all() -> dict[int, bytes]:
            ranks = [view.rank for view in self._view.members if view.role is Role.SERVER]
            sends = [self._send(Command.SEND_DATA, Role.SERVER, rank, data, command) for rank in ranks]
            return dict(zip(ranks, await asyncio.gather(*sends), strict=True))

        return self._wait(send_all(), timeout_s)

    def finish(self, timeout_s: float = 30.0) -> None:
        """Report that this member is done, and wait until all are.

        Raises:
            MemberUnreachableError: the scheduler does not answer.
            ClusterTimeoutError: the others have not finished in this time; this one has.
        """
        self._registration.finished = True
        self._wait(self._scheduler.ask(Command.FINISH, self.member_id.encode(), Kind.RAW), timeout_s)
        self.wait_ended(timeout_s)

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return self._loop.wait(work, self.options.call_timeout_s if timeout_s is None else timeout_s)

    # On the event loop: coming and going

    async def _join(self) -> None:
        self._door = Door(self._accept, None if self._trust is None else self._trust.server)
        port = self._registration.port = await self._door.open(self.options.host, self.options.port)
        self.address = join_address(self.options.host, port)
        await self._scheduler.start(self._registration)

    async def _leave(self) -> None:
        self._scheduler.close()
        self._loop.cancel_spawned()
        if self._door is not None:
            await self._door.close()
        await end_connections("the member closes")

    # On the event loop: requests of the scheduler and of other members

    def _accept(self, host: str) -> FrameConnection:
        limit = self.options.frame_bytes_max
        return Incoming(self._on_request, limit).protocol

    def _on_request(self, incoming: Incoming, meta: Any, frame: Frame) -> None:
        command = meta.cmd
        if meta.role not in (0, 1, 2):
            raise FramingError(f"{meta.role} is no role.")
        if command == Command.SEND_DATA:
            self._loop.spawn(self._on_data(incoming, meta, frame))
            return
        incoming.acknowledge(frame)
        if command == Command.COLLECTIVE_SEND_DATA:
            self._mailbox.put((Role(meta.role), meta.rank_id), wire.tag_of(meta), frame.data)
        elif command == Command.SEND_METADATA:
            self._registration.take_metadata(parse(wire.SendMetadata, frame.data))
            self._drop_moved_peers()
        elif command == Command.SCALE_OUT:
            parse(wire.ScaleOutMessage, frame.data)
            self._registration.begin_round(Phase.SCALE_OUT, False)
        elif command == Command.SCALE_IN:
            leaving = parse(wire.ScaleInMessage, frame.data).is_node_scale_in
            self._registration.begin_round(Phase.SCALE_IN, leaving)
        elif command in (Command.SCALE_OUT_DONE, Command.SCALE_IN_DONE):
            self._registration.round_ended()
        elif command == Command.SEND_EVENT:
            self._events.deliver(parse(wire.EventResp, frame.data).event)
        elif command == Command.HEARTBEAT:
            self._registration.take_state(parse(wire.HeartbeatResp, frame.data))
        elif command == Command.FINISH:
            self._view.change(ended=True, phase=Phase.EXIT)
        else:
            raise FramingError(f"a member does not take the command {Command.name(command)}.")

    async def _on_data(self, incoming: Incoming, meta: Any, frame: Frame) -> None:
        # The scheduler's instructions are answered always: without its connection the whole cluster loses this member.
        of_scheduler = meta.role == Role.SCHEDULER
        if self.options.on_data is None:
            self._refuse_data(incoming, meta, of_scheduler, "this member takes no data")
            return
        try:
            answer = await self._events.answer(meta.user_cmd, Role(meta.role), meta.rank_id, frame.data)
        except Exception as error:  # of the user's function: its caller learns by the closed connection
            _log.exception("the handler of data failed")
            self._refuse_data(incoming, meta, of_scheduler, f"the handler failed: {error}")
            return
        incoming.answer(meta, self.role, self._view.rank or 0, answer)

    def _refuse_data(self, incoming: Incoming, meta: Any, of_scheduler: bool, why: str) -> None:
        """Report an error to the sender of data.

        A response has no field for errors: the scheduler gets an answer in JSON, a member a closed connection.
        """
        if of_scheduler:
            incoming.answer(meta, self.role, self._view.rank or 0, json.dumps({"error_message": why}).encode())
        else:
            incoming.close(why)

    def _note_members(self, views: Sequence[MemberView]) -> None:
        """Take all members from the scheduler; called by the registration."""
        ids = {(view.role, view.rank): view.member_id for view in views}
        self._mailbox.set_members(ids, frozenset((view.role, view.rank) for view in views if not view.alive))

    def _drop_moved_peers(self) -> None:
        """Close connections to addresses that a member no longer has; the others stay, with requests under way."""
        places = {(view.role, view.rank): (view.host, view.port) for view in self._view.members}
        for key, peer in list(self._peers.items()):
            if places.get(key) != peer.place:
                peer.close()
                del self._peers[key]

    # On the event loop: requests to other members

    async def _send(self, command: int, role: Role, rank: int, data: bytes, user: int) -> bytes:
        caller = await self._peer(role, rank)
        return (await caller.call(command, data, self.role, self._view.rank, Kind.RAW, user))[1]

    async def _peer(self, role: Role, rank: int) -> Caller:
        """Return the connection to a member; it is opened at the first request."""
        key = (role, rank)
        async with self._opening.setdefault(key, asyncio.Lock()):
            found = self._peers.get(key)
            if found is None or found.ended:
                view = next((view for view in self._view.members if (view.role, view.rank) == key), None)
                if view is None:
                    raise MemberUnreachableError(f"The cluster has no {role.name.lower()} {rank}.")
                name = f"{role.name.lower()} {rank}"
                found = self._peers[key] = await Caller.open(
                    name, view.host, view.port, self.options.frame_bytes_max, self._trust, self._request_ids
                )
            return found
