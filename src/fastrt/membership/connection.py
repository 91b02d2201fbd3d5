"""A member's connection to its scheduler: opened, kept alive by heartbeats, and opened again when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

from fastrt.membership import wire
from fastrt.membership.event_runner import EventRunner
from fastrt.membership.events import Role
from fastrt.membership.framing import FramingError, Kind
from fastrt.membership.member_loop import MemberLoop
from fastrt.membership.options import MemberEvent, MemberOptions, RegistrationRefusedError
from fastrt.membership.peers import Caller, MemberUnreachableError
from fastrt.membership.view import ClusterView
from fastrt.membership.wire import Command, parse
from fastrt.net.address import split_address
from fastrt.net.grpc.trust import Trust

_log = logging.getLogger(__name__)
_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0


class Member(Protocol):
    """The member that a connection belongs to."""

    async def prepared(self) -> None:
        """Wait until the member may register."""

    async def enter(self) -> None:
        """Register on the connection that is open now, and call `note_answer`."""

    def take_state(self, state: Any) -> None:
        """Take a heartbeat's response."""


class SchedulerConnection:
    """Keeps one member connected to the scheduler. All of its methods run on the member's event loop.

    Args:
        role, member_id, options: of the member.
        trust: the cluster's; None without a token.
        view: gets the failure when the scheduler is gone for good or refuses the member.
        loop: runs the heartbeat and reconnects.
        events: notified when the scheduler has been away for longer than its timeout.
        request_ids: numbers for requests.
    """

    def __init__(
        self,
        role: Role,
        member_id: str,
        options: MemberOptions,
        trust: Trust | None,
        view: ClusterView,
        loop: MemberLoop,
        events: EventRunner,
        request_ids: Iterator[int],
    ) -> None:
        self._role, self._options, self._trust = role, options, trust
        self._view, self._loop, self._events = view, loop, events
        self._request_ids = request_ids
        self._member: Member
        self._heartbeat = wire.HeartbeatMessage(node_id=member_id).SerializeToString()
        self._caller: Caller | None = None
        self._heard = 0.0  # when the scheduler answered last; 0: never
        self._closing = False
        self._reconnecting = False

    @property
    def ended(self) -> bool:
        """Whether no connection is open."""
        return self._caller is None or self._caller.ended

    async def start(self, member: Member) -> None:
        """Connect, have the member register, and begin the heartbeat.

        Raises:
            MemberUnreachableError: no scheduler of this cluster serves at its address.
            RegistrationRefusedError: the scheduler does not take this member.
        """
        self._member = member
        await self._connect()
        self._loop.spawn(self._beat())

    def close(self) -> None:
        """End the connection for good."""
        self._closing = True
        if self._caller is not None:
            self._caller.close()

    def note_answer(self) -> None:
        """Note that the scheduler has answered now."""
        self._heard = time.monotonic()

    async def call(self, command: int, data: bytes, kind: int = Kind.PROTOBUF) -> bytes:
        """Send one request on the connection that is open now, and return the response.

        Raises:
            MemberUnreachableError: none is open, or it ended before the response.
        """
        if self._caller is None:
            raise MemberUnreachableError("The scheduler is not connected.")
        _, answer = await self._caller.call(command, data, self._role, self._view.rank, kind)
        return answer

    async def ask(self, command: int, data: bytes, kind: int = Kind.PROTOBUF) -> bytes:
        """Send a request; again on the next connection if this one ends before the response.

        Raises:
            MemberUnreachableError: there was no connection for as long as the scheduler's timeout.
            FastrtError: the member has failed.
        """
        until = time.monotonic() + self._options.scheduler_timeout_s
        while True:
            try:
                return await self.call(command, data, kind)
            except MemberUnreachableError:
                if self._view.failure is not None:
                    raise self._view.failure from None
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(_RETRY_FIRST_S)

    async def _connect(self) -> None:
        await self._member.prepared()
        host, port = split_address(self._options.scheduler)
        limit = self._options.frame_bytes_max
        self._caller = await Caller.open(
            "the scheduler", host, port, limit, self._trust, self._request_ids, self._ended
        )
        await self._member.enter()

    def _ended(self, reason: str) -> None:
        joined = self._heard > 0
        view = self._view
        if joined and not (self._closing or view.ended or self._reconnecting or view.failure is not None):
            _log.info("the connection to the scheduler ended: %s", reason)
            self._reconnecting = True
            self._loop.spawn(self._reconnect())

    async def _reconnect(self) -> None:
        pause = _RETRY_FIRST_S
        try:
            while not (self._closing or self._view.ended):
                try:
                    await self._connect()
                    if not self.ended:
                        return
                except RegistrationRefusedError as error:
                    self._view.fail(error)
                    return
                except (MemberUnreachableError, FramingError):
                    if time.monotonic() - self._heard > self._options.scheduler_timeout_s:
                        self._view.fail(MemberUnreachableError(f"The scheduler at {self._options.scheduler} is gone."))
                        self._events.notify(MemberEvent.SCHEDULER_TIMEOUT)
                        return
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_MOST_S)
        finally:
            self._reconnecting = False

    async def _beat(self) -> None:
        while self._view.failure is None:
            await asyncio.sleep(self._options.heartbeat_s)
            caller = self._caller
            if caller is None or caller.ended:
                continue
            try:
                call = caller.call(Command.HEARTBEAT, self._heartbeat, self._role, self._view.rank)
                _, data = await asyncio.wait_for(call, self._options.scheduler_timeout_s)
            except MemberUnreachableError:
                continue
            except asyncio.TimeoutError:
                caller.close()  # the next connection may reach a scheduler that answers
                continue
            self.note_answer()
            self._member.take_state(parse(wire.HeartbeatResp, data))
