"""The uplink's stream to the head: this node's reports go out, and the head's views come in."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import grpc
import grpc.aio

from fastrt.cluster.membership import JOIN
from fastrt.cluster.reasons import Reasons
from fastrt.cluster.views import Change, Members
from fastrt.errors import FastrtError
from fastrt.net.address import is_address
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.streams import Access
from fastrt.store.messages import KnownHeads, StandbyHead

_SET = message_set("node")
_REPORT_LEAST_S = 0.02  # between two reports; the head requests a longer time
_AGAIN_S = 0.5  # before another attempt to connect; longer after each round in which no head answered
_AGAIN_MOST_S = 4.0
_GROWTH, _JITTER = 1.6, 0.2  # as gRPC's between two connections
_TAKEOVER_S = 3.0  # without the first head, before a standby is tried: a head that was killed is back before that
_ANSWER_S = 3.0  # for a head to answer the node of a standby that is in charge; a connection may take 2 s
_FORGET_S = 60.0  # a standby whose node is not a member
_KEPT_MAX = 1000  # standbys of which the next uplink learns: one message


class Heads:
    """Chooses the head to connect to: the first one, and standbys while it cannot be reached.

    All nodes ask the standbys in the order of their nodes' ids. A standby is in charge, and takes nodes, once its own
    node has joined it. So that all choose the same one, a node asks its own standby last, and not while an earlier one
    answers: that one may be in charge soon.

    Args:
        first: the address of the first head.
        node: the id of this node.
        own: the address of the standby head on this node; empty: there is none.

    Attributes:
        nodes: the node of each standby head, by the head's address.
    """

    def __init__(self, first: str, node: str = "", own: str = "") -> None:
        self.first = first
        self.nodes = {own: node} if own else {}
        self._own = own
        self._absent_at: dict[str, float] = {}  # since when the first head does not list their nodes
        self._turn = self._rounds = 0
        self._is_earlier_there = False
        self._lost_at: float | None = None

    @property
    def standbys(self) -> list[str]:
        """The addresses of the standby heads, in the same order on all nodes."""
        return sorted(self.nodes, key=self.nodes.__getitem__)

    @property
    def known(self) -> KnownHeads:
        """The heads, for the next uplink of this node."""
        rows = [StandbyHead(self.nodes[address], address) for address in self.standbys[:_KEPT_MAX]]
        return KnownHeads(self.first, rows, self._lost_at is not None)

    def take(self, known: KnownHeads) -> None:
        """Take over what an earlier uplink of this node knew."""
        self.first = known.first
        self.nodes |= {row.address: row.node for row in known.standbys}
        if known.is_lost:  # it was lost for so long already
            self._lost_at = -math.inf

    def see(self, now: float, members: Iterable[Any], is_first: bool) -> None:
        """Take the standby heads from the reports of the members of a head.

        A standby is forgotten when the first head has not listed its node for some time. It is not forgotten at once: a
        head that was restarted does not list a node that has not joined it again yet.

        Args:
            now: seconds of any clock that does not go back.
            members: all members of the head.
            is_first: whether it is the first head.
        """
        there = {report.standby: report.node for report in members if report.standby}
        self.nodes |= there
        if is_first:
            gone = [one for one in self.nodes if one not in there and one != self._own]
            self._absent_at = {one: self._absent_at.get(one, now) for one in gone}
            for one in gone:
                if now - self._absent_at[one] > _FORGET_S:
                    del self.nodes[one], self._absent_at[one]

    def _order(self) -> list[str]:
        """Return all heads, in the same order on all nodes."""
        return [self.first, *(one for one in self.standbys if one != self.first)]

    def _turns(self) -> list[str]:
        """Return the heads in the order in which this node asks them: its own standby is the last one."""
        return [self.first, *sorted(self._order()[1:], key=self._own.__eq__)]

    def address(self) -> str:
        """Return the address to connect to now."""
        return self._turns()[self._turn]

    def others(self) -> list[str]:
        """Return all heads but the one on this node."""
        return [one for one in self._order() if one != self._own]

    def is_earlier(self, address: str) -> bool:
        """Return whether a head comes before the standby on this node, if there is one."""
        return address in takewhile(self._own.__ne__, self._order())

    def joined(self) -> None:
        """Note that the present address answers. When its stream ends, the first head is tried again."""
        self._lost_at = None if self._turn == 0 else self._lost_at
        self.begin_round()
        self._rounds = 0

    def failed(self, now: float, is_waiting: bool) -> None:
        """Note that the present address does not answer; `is_waiting`: it is a standby that is not in charge."""
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at < _TAKEOVER_S:
            self.begin_round()
            return
        self._is_earlier_there |= is_waiting and self.is_earlier(self.address())
        self._turn += 1
        turns = self._turns()[self._turn :]
        if not turns or (turns == [self._own] and self._is_earlier_there):
            self.begin_round()
            self._rounds += 1

    def begin_round(self) -> None:
        """Ask the first head next."""
        self._turn, self._is_earlier_there = 0, False

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt: longer after each time that no head answered."""
        return 0.0 if self._turn else backoff_s(self._rounds)


def backoff_s(attempts: int) -> float:
    """Return the pause after so many attempts in vain: it grows as gRPC's between connections."""
    return min(_AGAIN_S * _GROWTH ** min(attempts, 64), _AGAIN_MOST_S)


class HeadLink:
    """Keeps this node a member of its cluster.

    Args:
        head: the head's address.
        access: the cluster's identity.
        report: this node's report; the caller changes it, and then calls `changed`.
        reasons: prints why the head cannot be reached.
        on_change: called with the changes of each view.

    Attributes:
        members: the members as of the last view.
        on_heads: called with what the next uplink of this node needs to know of the heads, when that has changed.
        announce: called once with the first view; None: it was called, or this process has announced itself already.
    """

    def __init__(
        self, head: str, access: Access, report: Any, reasons: Reasons, on_change: Callable[[Change], None]
    ) -> None:
        self._heads = Heads(head)
        self._access = access
        self._report = report
        self._reasons = reasons
        self._on_change = on_change
        self._known = self._heads.known
        self._random = random.Random(report.node)  # each node has its own pauses
        self._report_due = asyncio.Event()
        self._starts_looking = asyncio.Event()
        self.members = Members(self._on_invalid)
        self.on_heads: Callable[[KnownHeads], None] = lambda known: None
        self.announce: Callable[[], None] | None = None

    def changed(self) -> None:
        """Send the report, as soon as the head takes another one."""
        self._report_due.set()

    def look(self, looking: bool) -> None:
        """Set whether the head should send this node the load of the others more often."""
        if looking != self._report.looking:
            self._report.looking = looking
            self._report_due.set()
            if looking:
                self._starts_looking.set()

    async def stay_joined(self, known: KnownHeads | None) -> None:
        """Join the head, and join it again whenever the stream to it has ended.

        Args:
            known: what an earlier uplink of this node knew of the heads.
        """
        self._heads = Heads(self._heads.first, self._report.node, self._report.standby)
        if known is not None:
            self._heads.take(known)
        self._known = self._heads.known
        while True:
            address = self._heads.address()
            error = await self._join(address)
            if error is not None:
                await self._failed(address, error)
            else:
                self._heads.begin_round()
            await self._pause(self._heads.pause_s)

    async def _join(self, address: str) -> grpc.aio.AioRpcError | None:
        """Be a member of a head until the stream ends; return how it failed.

        Nothing refers to the stream afterwards, not even the traceback of its error: a closed channel connects again,
        once a second, until its last call is freed.
        """
        channel, call = streams.open_stream(address, self._access, _SET, JOIN)
        stream = call()
        reading = asyncio.create_task(self._read(stream, address))
        until: list[asyncio.Task[Any]] = [reading]
        if address == self._report.standby:
            until.append(asyncio.create_task(self._other_head_is_in_charge()))
        reporting = asyncio.create_task(self._send_reports(stream))
        try:
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            for task in (*until, reporting):
                task.cancel()
            await channel.close()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _failed(self, address: str, exc: grpc.aio.AioRpcError) -> None:
        """Choose the next head after the end of a stream."""
        is_first = address == self._heads.first
        is_waiting = exc.code() is grpc.StatusCode.FAILED_PRECONDITION  # a standby that is not in charge
        if is_first and not _is_lost(exc) and not is_waiting:
            self._heads.joined()  # it answers
        else:
            self._heads.failed(time.monotonic(), is_waiting)
        if is_first:
            await self._on_no_head(exc)

    async def _read(self, stream: Any, address: str) -> grpc.aio.AioRpcError | None:
        """Apply the views of a stream until it ends; return how it failed."""
        try:
            await self._apply(stream, address)
        except grpc.aio.AioRpcError as exc:
            return exc.with_traceback(None)
        return None

    async def _apply(self, stream: Any, address: str) -> None:
        is_joined = False
        async for view in stream:
            if not is_joined:
                is_joined = True
                self.joined()
                self._heads.joined()
                if address == self._heads.first and is_address(view.first):
                    self._heads.first = view.first  # this node was given the address of a standby
                elif address != self._heads.first:
                    self._reasons.report(address, f"the head at {self._heads.first} is lost: this node joins {address}")
            self._on_change(self.members.apply(view))
            if view.node or view.left:  # not only their load has changed
                self._see(self.members, address)

    def _see(self, members: Members, address: str) -> None:
        """Take the standby heads from the members of a head."""
        self._heads.see(time.monotonic(), members.reports.values(), address == self._heads.first)
        known = self._heads.known
        if known != self._known:
            self._known = known
            self.on_heads(known)

    async def _other_head_is_in_charge(self) -> None:
        """Wait until an earlier head is in charge; this node then ends the turn of its standby.

        Two standbys can be in charge at once, after the network was cut or a node has started without the first head.
        By the question the other side learns of this standby, so that a later one ends its turn, too.
        """
        attempts = 0
        while True:
            await self._pause(backoff_s(attempts))
            attempts += 1
            for address in self._heads.others():
                if await self._is_in_charge(address) and self._heads.is_earlier(address):
                    return

    async def _is_in_charge(self, address: str) -> bool:
        """Join a head for a moment, and take the standby heads that it knows; return whether it takes nodes."""
        channel, call = streams.open_stream(address, self._access, _SET, JOIN)
        try:
            return await asyncio.wait_for(self._takes_nodes(call(), address), _ANSWER_S)
        except asyncio.TimeoutError:
            return False
        finally:
            await channel.close()

    async def _takes_nodes(self, stream: Any, address: str) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(self._report)
            async for view in stream:
                members = Members(self._on_invalid)
                members.apply(view)
                self._see(members, address)
                return True
        return False

    def joined(self) -> None:
        """Announce this process, unless it has done so."""
        announce, self.announce = self.announce, None
        if announce is not None:
            announce()

    async def _on_no_head(self, exc: grpc.aio.AioRpcError) -> None:
        """Report why the stream to the head has ended, once for each reason.

        Raises:
            FastrtError: another program is at the head's address while this node starts, or the head refuses a report.
        """
        head = self._heads.first
        if exc.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise FastrtError(f"the head at {head}: {exc.details()}")
        why = await self._reasons.find(head) if _is_lost(exc) else exc.details()
        if self.announce is None:
            self._reasons.report(head, f"the head cannot be reached: {why}" if why else "")
        elif _is_lost(exc) and why:
            raise FastrtError(f"this node cannot join {head}: {why}")
        else:
            why = why or exc.details()
            self._reasons.report(head, f"the head at {head} does not answer: {why}. This node waits for it")

    async def _send_reports(self, stream: Any) -> None:
        while True:
            self._report_due.clear()
            await stream.write(self._report)
            await asyncio.sleep(_REPORT_LEAST_S)
            if not self._starts_looking.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._starts_looking.wait(), self.members.report_s - _REPORT_LEAST_S)
            self._starts_looking.clear()
            await self._report_due.wait()

    def _on_invalid(self, why: str) -> None:
        self._reasons.report("view", f"an invalid report from the head is ignored: {why}")


def _is_lost(exc: grpc.aio.AioRpcError) -> bool:
    """Whether a stream has ended without an answer of the head; a head answers with neither of these codes."""
    return exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
