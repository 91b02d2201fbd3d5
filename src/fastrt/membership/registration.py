"""A member's registration: at the start, on each new connection, and in the scaling rounds of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from fastrt.membership import wire
from fastrt.membership.connection import SchedulerConnection
from fastrt.membership.event_runner import EventRunner
from fastrt.membership.events import MemberView, Phase, Role
from fastrt.membership.framing import Kind
from fastrt.membership.member_loop import MemberLoop
from fastrt.membership.options import MemberEvent, MemberOptions, RegistrationRefusedError
from fastrt.membership.peers import MemberUnreachableError
from fastrt.membership.view import ClusterView
from fastrt.membership.wire import NO_RANK, Command, parse


class Registration:
    """Registers one member, and keeps its view of the cluster. All methods run on the member's event loop.

    Args:
        role, member_id, options: of the member.
        connection: to the scheduler.
        view: what the scheduler reports is written to it.
        events: runs the user's functions.
        loop: runs what must not hold up the connection.
        on_members: called with all members whenever the scheduler reports them.

    Attributes:
        port: where the member takes what others send.
        finished: the member has finished its work; reported to the scheduler again on each new connection.
    """

    def __init__(
        self,
        role: Role,
        member_id: str,
        options: MemberOptions,
        connection: SchedulerConnection,
        view: ClusterView,
        events: EventRunner,
        loop: MemberLoop,
        on_members: Callable[[Sequence[MemberView]], None],
    ) -> None:
        self.port = 0
        self.finished = False
        self._role, self._member_id, self._options = role, member_id, options
        self._connection, self._view, self._events, self._loop = connection, view, events, loop
        self._on_members = on_members
        self._preparing: asyncio.Task[None] | None = None
        self._round: Phase | None = None
        self._impaired = False

    async def prepared(self) -> None:
        """Wait for the user's preparation of a scaling round.

        A registration states that the member is prepared, and the scheduler closes a connection without one.
        """
        if self._preparing is not None:
            await self._preparing

    async def enter(self) -> None:
        """Register on a new connection.

        Raises:
            RegistrationRefusedError: the scheduler does not take this member.
            MemberUnreachableError: the connection ended.
        """
        await self._register()
        if self.finished:  # a registration states that the member works
            await self._connection.call(Command.FINISH, self._member_id.encode(), Kind.RAW)

    def take_metadata(self, metadata: Any) -> None:
        """Take ranks, members and phase from the scheduler: all members have joined, or a scaling round moves on."""
        members = wire.views(metadata.servers_meta)
        self._on_members(members)
        if metadata.rank_id == NO_RANK:
            taken_back = self._round is None and metadata.cluster_state != Phase.SCALE_IN
            self._view.change(rank=None, ready=False, members=members)
            self._events.notify(MemberEvent.SCALE_TAKEN_BACK if taken_back else MemberEvent.SCALE_IN_DONE)
            return
        phase = Phase(metadata.cluster_state) if metadata.cluster_state in set(Phase) else Phase.READY
        was_scaling, self._round = self._round, phase if phase in (Phase.SCALE_OUT, Phase.SCALE_IN) else None
        if phase is Phase.STARTING:
            phase = Phase.READY  # release 2.7 sends the metadata before it changes its own state
        counts = (metadata.worker_num, metadata.server_num)
        self._view.change(rank=metadata.rank_id, phase=phase, members=members, counts=counts, ready=True)
        self._impaired = self._impaired and phase is Phase.NODE_TIMEOUT
        if self._round is not None:
            out = phase is Phase.SCALE_OUT
            self._events.notify(MemberEvent.SCALE_OUT_DONE if out else MemberEvent.SCALE_IN_DONE)
            self._loop.spawn(self._end_round(phase))
        elif was_scaling is not None:
            self._events.notify(MemberEvent.SCALE_TAKEN_BACK)

    def take_state(self, state: Any) -> None:
        """Take the cluster's state, from a heartbeat's response or from a request of the scheduler."""
        self._on_members(wire.views(state.servers_meta))
        if state.cluster_state not in set(Phase):
            return
        phase = Phase(state.cluster_state)
        if phase is Phase.EXIT:
            self._view.change(ended=True, phase=phase)
        elif phase is Phase.NODE_TIMEOUT:
            self._view.change(phase=phase)
            if not self._impaired:
                self._impaired = True
                self._events.notify(MemberEvent.NODE_TIMEOUT)
        elif self._impaired and phase is Phase.READY:
            self._impaired = False
            self._view.change(phase=phase)
            self._events.notify(MemberEvent.RECOVERED)

    def begin_round(self, phase: Phase, leaving: bool) -> None:
        """Prepare for a scaling round, and register again unless this member leaves in it."""
        self._round = phase
        self._view.change(phase=phase, ready=False)
        out = phase is Phase.SCALE_OUT
        self._events.notify(MemberEvent.READY_FOR_SCALE_OUT if out else MemberEvent.READY_FOR_SCALE_IN)
        self._preparing = self._loop.spawn(self._events.before_scale(phase))
        if not leaving:
            self._loop.spawn(self._register_again(self._preparing))

    def round_ended(self) -> None:
        """Take the scheduler's report that all members have ended the round."""
        self._round = None
        self._view.change(phase=Phase.READY, ready=True)

    async def _register(self) -> None:
        host = self._options.host
        message = wire.RegisterMessage(
            ip=host, port=self.port, node_id=self._member_id, role=int(self._role), told_changes=True
        )
        data = await self._connection.call(Command.REGISTER, message.SerializeToString())
        answer = parse(wire.RegisterResp, data)
        if answer.rank_id == NO_RANK:
            why = answer.reason or "the cluster is full, or has a member of this id already"
            raise RegistrationRefusedError(f"{self._member_id!r} is not taken as {self._role.name.lower()}: {why}")
        self._connection.note_answer()

    async def _register_again(self, preparing: asyncio.Task[None]) -> None:
        await preparing
        if self._preparing is preparing:
            self._preparing = None
        # If the connection has ended, the next one registers anyway.
        with contextlib.suppress(MemberUnreachableError):
            try:
                await self._register()
            except RegistrationRefusedError as error:
                self._view.fail(error)

    async def _end_round(self, phase: Phase) -> None:
        await self._events.after_scale(phase)
        if self._round is not phase:
            return  # the scheduler took the round back meanwhile
        out = phase is Phase.SCALE_OUT
        message = wire.ScaleOutDone if out else wire.ScaleInDone
        command = Command.SCALE_OUT_DONE if out else Command.SCALE_IN_DONE
        # If the connection has ended, the next one brings the metadata again, and with it this round.
        with contextlib.suppress(MemberUnreachableError):
            await self._connection.ask(command, message(node_id=self._member_id).SerializeToString())
