"""A member of a parameter-server cluster, server or worker: blocking calls, with a thread behind them.

The thread registers with the scheduler, keeps the heartbeat, takes what the scheduler and other members send, and
comes back by itself when the scheduler has been away. The user's functions run on threads of their own, one event at
a time, so that a slow one never costs a heartbeat.

It speaks the protocol of releases 1.5 and 2.7 alike: metadata may come before the response to the registration, and
with or without a request number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from fastrt.errors import FastrtError
from fastrt.membership import wire
from fastrt.membership.door import Door
from fastrt.membership.events import MemberView, Phase, Role
from fastrt.membership.framing import Frame, FramingError, Kind
from fastrt.membership.links import FrameConnection
from fastrt.membership.mailbox import Mailbox
from fastrt.membership.messages import Messages
from fastrt.membership.options import ClusterTimeoutError, MemberEvent, MemberOptions, RegistrationRefusedError
from fastrt.membership.peers import Caller, Incoming, MemberUnreachableError
from fastrt.membership.wire import NO_RANK, Command, parse
from fastrt.net.grpc.trust import trust_of

_log = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0
_DATA_THREADS = 4
_JOIN_S = 5.0


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
        self._condition = threading.Condition()  # guards what follows, up to the blank line
        self._rank: int | None = None
        self._phase = Phase.STARTING
        self._ready = False
        self._ended = False
        self._failure: FastrtError | None = None
        self._members: tuple[MemberView, ...] = ()
        self._counts = (0, 0)

        self._mailbox = Mailbox()
        self._port = 0
        self._door: Door | None = None
        self._request_ids = itertools.count(1)
        self._scheduler: Caller | None = None
        self._peers: dict[tuple[Role, int], Caller] = {}
        self._opening: dict[tuple[Role, int], asyncio.Lock] = {}
        self._incoming: set[Incoming] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._round: Phase | None = None
        self._impaired = False
        self._heard = 0.0
        self._closing = False
        self._reconnecting = False
        self._finished = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._events = ThreadPoolExecutor(1, "fastrt-member-events")
        self._scaler = ThreadPoolExecutor(1, "fastrt-member-scaling")
        self._workers = ThreadPoolExecutor(_DATA_THREADS, "fastrt-member-data")

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
            OSError: the own address cannot be bound.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastrt-member", daemon=True)
        self._thread.start()
        try:
            self._wait(self._join(), self.options.call_timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all connections. A member that has not finished is then missed by the cluster."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(ClusterTimeoutError):
            self._wait(self._leave(), _JOIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_S)
        loop.close()
        self._loop = self._thread = None
        for pool in (self._events, self._scaler, self._workers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._fail(FastrtError("The member has been closed."))

    @property
    def rank(self) -> int | None:
        """Its number among those of its role; None before all were there, and after it was scaled in."""
        return self._rank

    @property
    def phase(self) -> Phase:
        """What the cluster is doing, as far as this member was told."""
        return self._phase

    @property
    def counts(self) -> tuple[int, int]:
        """How many workers and servers the cluster has."""
        return self._counts

    @property
    def members(self) -> tuple[MemberView, ...]:
        """All members, as of the last metadata."""
        return self._members

    def wait_ready(self, timeout_s: float = 300.0) -> int | None:
        """Wait until all members are there; returns the rank.

        Raises:
            ClusterTimeoutError: they are not in this time.
            FastrtError: this member was refused, or has lost the scheduler.
        """
        self.wait_for(lambda: self._ready, timeout_s, "all members")
        return self._rank

    def wait_ended(self, timeout_s: float = 30.0) -> None:
        """Wait until all members have finished.

        Raises:
            ClusterTimeoutError: they have not in this time.
        """
        self.wait_for(lambda: self._ended, timeout_s, "all members to finish")

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until a condition on this member's attributes holds; it is looked at after each change.

        Raises:
            ClusterTimeoutError: it does not hold in this time.
            FastrtError: this member was refused, closed, or has lost the scheduler.
        """
        with self._condition:
            done = self._condition.wait_for(lambda: condition() or self._failure is not None, timeout_s)
            if not done:
                raise ClusterTimeoutError(f"waited {timeout_s:g} s for {what}; the cluster is {self._phase.name}.")
            if not condition():
                assert self._failure is not None
                raise self._failure

    def fetch(self, timeout_s: float | None = None) -> tuple[MemberView, ...]:
        """Ask the scheduler who is there. Ranks are those of now; alive says who is there.

        Raises:
            MemberUnreachableError: the scheduler does not answer.
        """
        data = wire.FetchServers(node_id=self.member_id).SerializeToString()
        answer = self._wait(self._ask(Command.FETCH_METADATA, data), timeout_s)
        return wire.views(parse(wire.FetchResp, answer).servers_meta)

    def publish(self, number: int, timeout_s: float | None = None) -> None:
        """Tell all members a number, this one too; see `on_message`.

        Raises:
            MemberUnreachableError: the scheduler does not answer.
        """
        data = wire.EventMessage(event=number, node_id=self.member_id).SerializeToString()
        self._wait(self._ask(Command.SEND_EVENT, data), timeout_s)

    def send(
        self, rank: int, data: bytes, command: int = 0, role: Role = Role.SERVER, timeout_s: float | None = None
    ) -> bytes:
        """Send bytes to a member, by default a server; returns what its `on_data` answers.

        Raises:
            MemberUnreachableError: it cannot be reached, or ended before it answered.
            ClusterTimeoutError: it has not answered in time; it may do what it was told nevertheless.
        """
        return self._wait(self._send(Command.SEND_DATA, role, rank, data, command), timeout_s)

    def broadcast(self, data: bytes, command: int = 0, timeout_s: float | None = None) -> dict[int, bytes]:
        """Send bytes to all servers; returns their answers by rank.

        Raises:
            MemberUnreachableError: one cannot be reached; others may have taken it.
            ClusterTimeoutError: one has not answered in time.
        """

        async def send_all() -> dict[int, bytes]:
            ranks = [view.rank for view in self._members if view.role is Role.SERVER]
            sends = [self._send(Command.SEND_DATA, Role.SERVER, rank, data, command) for rank in ranks]
            return dict(zip(ranks, await asyncio.gather(*sends), strict=True))

        return self._wait(send_all(), timeout_s)

    def finish(self, timeout_s: float = 30.0) -> None:
        """Say that this member is done, and wait until all are.

        Raises:
            MemberUnreachableError: the scheduler does not answer.
            ClusterTimeoutError: the others have not finished in this time; this one has.
        """
        self._finished = True
        self._wait(self._ask(Command.FINISH, self.member_id.encode(), Kind.RAW), timeout_s)
        self.wait_ended(timeout_s)

    # On the event loop: coming and going

    async def _join(self) -> None:
        self._door = Door(self._accept, None if self._trust is None else self._trust.server)
        self._port = await self._door.open(self.options.host, self.options.port)
        self.address = f"{self.options.host}:{self._port}"
        await self._connect()
        self._spawn(self._beat())

    async def _leave(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        if self._scheduler is not None:
            self._scheduler.close()
        for peer in self._peers.values():
            peer.close()
        if self._door is not None:
            await self._door.close()
        until = time.monotonic() + 1.0
        while (self._incoming or not all(c.ended for c in self._callers())) and time.monotonic() < until:
            for incoming in list(self._incoming):
                incoming.close("the member closes")
            await asyncio.sleep(0.001)

    def _callers(self) -> list[Caller]:
        return [*self._peers.values(), *([self._scheduler] if self._scheduler is not None else [])]

    async def _connect(self) -> None:
        """Open the connection to the scheduler, and register on it."""
        if self._preparing is not None:
            await self._preparing  # to register says that one is prepared, and the connection is closed without it
        host, _, port = self.options.scheduler.rpartition(":")
        limit = self.options.frame_bytes_max
        caller = await Caller.open(
            "the scheduler", host.strip("[]"), int(port), limit, self._trust, self._request_ids, self._scheduler_ended
        )
        self._scheduler = caller
        await self._register()
        if self._finished:  # to register says that one works again
            await caller.call(Command.FINISH, self.member_id.encode(), self.role, self._rank, Kind.RAW)

    async def _register(self) -> None:
        assert self._scheduler is not None
        host = self.options.host
        message = wire.RegisterMessage(
            ip=host, port=self._port, node_id=self.member_id, role=int(self.role), told_changes=True
        )
        _, data = await self._scheduler.call(Command.REGISTER, message.SerializeToString(), self.role, self._rank)
        answer = parse(wire.RegisterResp, data)
        if answer.rank_id == NO_RANK:
            why = answer.reason or "the cluster is full, or has a member of this id already"
            raise RegistrationRefusedError(f"{self.member_id!r} is not taken as {self.role.name.lower()}: {why}")
        self._heard = time.monotonic()

    def _scheduler_ended(self, reason: str) -> None:
        joined = self._heard > 0
        if joined and not (self._closing or self._ended or self._reconnecting or self._failure is not None):
            _log.info("the connection to the scheduler ended: %s", reason)
            self._reconnecting = True
            self._spawn(self._reconnect())

    async def _reconnect(self) -> None:
        try:
            await self._reconnect_until_taken()
        finally:
            self._reconnecting = False

    async def _reconnect_until_taken(self) -> None:
        pause = _RETRY_FIRST_S
        while not self._closing and not self._ended:
            try:
                await self._connect()
                if self._scheduler is not None and not self._scheduler.ended:
                    return
            except RegistrationRefusedError as error:
                self._fail(error)
                return
            except (MemberUnreachableError, FramingError):
                if time.monotonic() - self._heard > self.options.scheduler_timeout_s:
                    self._fail(MemberUnreachableError(f"The scheduler at {self.options.scheduler} is gone."))
                    self._tell(MemberEvent.SCHEDULER_TIMEOUT)
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST_S)

    async def _beat(self) -> None:
        message = wire.HeartbeatMessage(node_id=self.member_id).SerializeToString()
        while self._failure is None:
            await asyncio.sleep(self.options.heartbeat_s)
            scheduler = self._scheduler
            if scheduler is None or scheduler.ended:
                continue
            try:
                call = scheduler.call(Command.HEARTBEAT, message, self.role, self._rank)
                _, data = await asyncio.wait_for(call, self.options.scheduler_timeout_s)
            except MemberUnreachableError:
                continue
            except asyncio.TimeoutError:
                scheduler.close()  # and on to another connection
                continue
            self._heard = time.monotonic()
            self._take_state(parse(wire.HeartbeatResp, data))

    # On the event loop: what the scheduler and others say

    def _accept(self, host: str) -> FrameConnection:
        limit = self.options.frame_bytes_max
        return Incoming(self._on_request, self._incoming.add, self._incoming.discard, limit).protocol

    def _on_request(self, incoming: Incoming, meta: Any, frame: Frame) -> None:
        command = meta.cmd
        if meta.role not in (0, 1, 2):
            raise FramingError(f"{meta.role} is no role.")
        if command == Command.SEND_DATA:
            self._spawn(self._on_data(incoming, meta, frame))
            return
        incoming.acknowledge(frame)
        if command == Command.COLLECTIVE_SEND_DATA:
            self._mailbox.put((Role(meta.role), meta.rank_id), wire.tag_of(meta), frame.data)
        elif command == Command.SEND_METADATA:
            self._on_metadata(parse(wire.SendMetadata, frame.data))
        elif command == Command.SCALE_OUT:
            parse(wire.ScaleOutMessage, frame.data)
            self._on_prepare(Phase.SCALE_OUT, False)
        elif command == Command.SCALE_IN:
            self._on_prepare(Phase.SCALE_IN, parse(wire.ScaleInMessage, frame.data).is_node_scale_in)
        elif command in (Command.SCALE_OUT_DONE, Command.SCALE_IN_DONE):
            self._round = None
            self._change(phase=Phase.READY, ready=True)
        elif command == Command.SEND_EVENT:
            number = parse(wire.EventResp, frame.data).event
            if self.options.on_message is not None:
                self._events.submit(self._guarded, self.options.on_message, number)
        elif command == Command.HEARTBEAT:
            self._take_state(parse(wire.HeartbeatResp, frame.data))
        elif command == Command.FINISH:
            self._change(ended=True, phase=Phase.EXIT)
        else:
            raise FramingError(f"a member does not take the command {Command.name(command)}.")

    async def _on_data(self, incoming: Incoming, meta: Any, frame: Frame) -> None:
        handler = self.options.on_data
        # An instruction of the scheduler's: without its connection this member would be lost to the whole cluster.
        is_told = meta.role == Role.SCHEDULER
        if handler is None:
            self._refuse_data(incoming, meta, is_told, "this member takes no data")
            return
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(
                self._workers, handler, meta.user_cmd, Role(meta.role), meta.rank_id, frame.data
            )
        except Exception as error:  # whatever the user's function raises: its caller learns by the closed connection
            _log.exception("the handler of data failed")
            self._refuse_data(incoming, meta, is_told, f"the handler failed: {error}")
            return
        incoming.answer(meta, self.role, self._rank or 0, answer)

    def _refuse_data(self, incoming: Incoming, meta: Any, is_told: bool, why: str) -> None:
        """An answer has no place for an error: another member learns by the closed connection."""
        if is_told:
            incoming.answer(meta, self.role, self._rank or 0, json.dumps({"error_message": why}).encode())
        else:
            incoming.close(why)

    def _on_metadata(self, told: Any) -> None:
        members = wire.views(told.servers_meta)
        places = {(view.role, view.rank): (view.host, view.port) for view in members}
        self._note_members(members)
        for key, peer in list(self._peers.items()):
            if places.get(key) != peer.place:  # what is on its way to others goes on
                peer.close()
                del self._peers[key]
        if told.rank_id == NO_RANK:
            taken_back = self._round is None and told.cluster_state != Phase.SCALE_IN
            self._change(rank=None, ready=False, members=members)
            self._tell(MemberEvent.SCALE_TAKEN_BACK if taken_back else MemberEvent.SCALE_IN_DONE)
            return
        phase = Phase(told.cluster_state) if told.cluster_state in set(Phase) else Phase.READY
        was_scaling, self._round = self._round, phase if phase in (Phase.SCALE_OUT, Phase.SCALE_IN) else None
        if phase is Phase.STARTING:
            phase = Phase.READY  # release 2.7 sends the metadata before it changes its own state
        self._change(
            rank=told.rank_id, phase=phase, members=members, counts=(told.worker_num, told.server_num), ready=True
        )
        self._impaired = self._impaired and phase is Phase.NODE_TIMEOUT
        if self._round is not None:
            out = phase is Phase.SCALE_OUT
            self._tell(MemberEvent.SCALE_OUT_DONE if out else MemberEvent.SCALE_IN_DONE)
            self._spawn(self._go_on(phase))
        elif was_scaling is not None:
            self._tell(MemberEvent.SCALE_TAKEN_BACK)

    def _on_prepare(self, phase: Phase, leaving: bool) -> None:
        self._round = phase
        self._change(phase=phase, ready=False)
        out = phase is Phase.SCALE_OUT
        self._tell(MemberEvent.READY_FOR_SCALE_OUT if out else MemberEvent.READY_FOR_SCALE_IN)
        self._preparing = self._spawn(self._prepare(phase))
        if not leaving:
            self._spawn(self._register_again(self._preparing))

    async def _prepare(self, phase: Phase) -> None:
        if self.options.before_scale is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._scaler, self._guarded, self.options.before_scale, phase)

    async def _register_again(self, preparing: asyncio.Task[None]) -> None:
        await preparing
        if self._preparing is preparing:
            self._preparing = None
        # An ended connection: the next one registers anyway.
        with contextlib.suppress(MemberUnreachableError):
            try:
                await self._register()
            except RegistrationRefusedError as error:
                self._fail(error)

    async def _go_on(self, phase: Phase) -> None:
        if self.options.after_scale is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._scaler, self._guarded, self.options.after_scale, phase)
        if self._round is not phase:
            return  # taken back meanwhile
        out = phase is Phase.SCALE_OUT
        message = wire.ScaleOutDone if out else wire.ScaleInDone
        command = Command.SCALE_OUT_DONE if out else Command.SCALE_IN_DONE
        # An ended connection: the next one brings the metadata again, and so this.
        with contextlib.suppress(MemberUnreachableError):
            await self._ask(command, message(node_id=self.member_id).SerializeToString())

    def _note_members(self, views: Sequence[MemberView]) -> None:
        ids = {(view.role, view.rank): view.member_id for view in views}
        self._mailbox.set_members(ids, frozenset((view.role, view.rank) for view in views if not view.alive))

    def _take_state(self, state: Any) -> None:
        """What a heartbeat was answered with, or what the scheduler says unasked."""
        self._note_members(wire.views(state.servers_meta))
        if state.cluster_state not in set(Phase):
            return
        phase = Phase(state.cluster_state)
        if phase is Phase.EXIT:
            self._change(ended=True, phase=phase)
        elif phase is Phase.NODE_TIMEOUT:
            self._change(phase=phase)
            if not self._impaired:
                self._impaired = True
                self._tell(MemberEvent.NODE_TIMEOUT)
        elif self._impaired and phase is Phase.READY:
            self._impaired = False
            self._change(phase=phase)
            self._tell(MemberEvent.RECOVERED)

    # On the event loop: to others

    async def _ask(self, command: int, data: bytes, kind: int = Kind.PROTOBUF) -> bytes:
        """Ask the scheduler; once more on the next connection when this one ends meanwhile."""
        until = time.monotonic() + self.options.scheduler_timeout_s
        while True:
            try:
                if self._scheduler is None:
                    raise MemberUnreachableError("The scheduler is not connected.")
                return (await self._scheduler.call(command, data, self.role, self._rank, kind))[1]
            except MemberUnreachableError:
                if self._failure is not None:
                    raise self._failure from None
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(_RETRY_FIRST_S)

    async def _send(self, command: int, role: Role, rank: int, data: bytes, user: int) -> bytes:
        caller = await self._peer(role, rank)
        return (await caller.call(command, data, self.role, self._rank, Kind.RAW, user))[1]

    async def _peer(self, role: Role, rank: int) -> Caller:
        """The connection to a member, opened at the first need."""
        key = (role, rank)
        async with self._opening.setdefault(key, asyncio.Lock()):
            found = self._peers.get(key)
            if found is None or found.ended:
                view = next((view for view in self._members if (view.role, view.rank) == key), None)
                if view is None:
                    raise MemberUnreachableError(f"The cluster has no {role.name.lower()} {rank}.")
                name = f"{role.name.lower()} {rank}"
                found = self._peers[key] = await Caller.open(
                    name, view.host, view.port, self.options.frame_bytes_max, self._trust, self._request_ids
                )
            return found

    # What all share

    def _change(self, **changes: Any) -> None:
        with self._condition:
            for name, value in changes.items():
                setattr(self, "_" + name, value)
            self._condition.notify_all()

    def _fail(self, error: FastrtError) -> None:
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def _tell(self, event: MemberEvent) -> None:
        if self.options.on_event is not None:
            self._events.submit(self._guarded, self.options.on_event, event)

    def _guarded(self, function: Callable[[Any], None], argument: Any) -> None:
        """Run a function of the user's, on a thread for these; its failure is its own."""
        try:
            function(argument)
        except Exception:
            _log.exception("a function of the user's failed")

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        limit = self.options.call_timeout_s if timeout_s is None else timeout_s
        if self._loop is None:
            work.close()
            raise FastrtError("The member is not started, or closed.")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit)
        except FutureTimeoutError:
            future.cancel()
            raise ClusterTimeoutError(f"no answer within {limit:g} s.") from None
