"""The uplink's stream to the head: this node's reports go out, and the head's views come in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from fastrt.cluster.membership import JOIN
from fastrt.cluster.reasons import Reasons
from fastrt.cluster.views import Change, Members
from fastrt.errors import FastrtError
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.streams import Access

_SET = message_set("node")
_REPORT_LEAST_S = 0.02  # between two reports; the head requests a longer time
_AGAIN_S = 0.5  # before another attempt to connect
_TAKEOVER_S = 3.0  # without the first head, before a standby is tried: a head that was killed is back before that
_PROBE_S = 1.0  # between two attempts of a standby's node to reach the first head again
_READY_S = 2.0  # for such an attempt


class Heads:
    """Chooses the head to connect to: the first one, and standbys while it cannot be reached.

    Args:
        first: the address of the first head.

    Attributes:
        standbys: addresses of the standby heads, the same and in the same order on all nodes.
    """

    def __init__(self, first: str) -> None:
        self.first = first
        self.standbys: list[str] = []
        self._turn = 0
        self._lost_at: float | None = None

    def address(self) -> str:
        """Return the address to connect to now."""
        return [self.first, *self.standbys][self._turn]

    def before(self, address: str) -> list[str]:
        """Return the heads that are asked before the one at an address."""
        return [self.first, *self.standbys[: self.standbys.index(address)]]

    def joined(self) -> None:
        """Note that the present address answers. When its stream ends, the first head is tried again."""
        self._turn, self._lost_at = 0, None if self._turn == 0 else self._lost_at

    def failed(self, now: float, is_waiting: bool) -> None:
        """Note that the present address does not answer; `is_waiting`: it is a standby that is not in charge.

        A standby that is not in charge may be soon: the standbys after it must not be asked.
        """
        self._lost_at = now if self._lost_at is None else self._lost_at
        is_lost = now - self._lost_at >= _TAKEOVER_S and not is_waiting
        self._turn = (self._turn + 1) % (1 + len(self.standbys)) if is_lost else 0


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
        announce: called once with the first view; None: it was called, or this process has announced itself already.
    """

    def __init__(
        self, head: str, access: Access, report: Any, reasons: Reasons, on_change: Callable[[Change], None]
    ) -> None:
        self._heads = Heads(head)
        self._standbys: dict[str, str] = {}  # their nodes, by address
        self._access = access
        self._report = report
        self._reasons = reasons
        self._on_change = on_change
        self._report_due = asyncio.Event()
        self._starts_looking = asyncio.Event()
        self.members = Members(self._on_invalid)
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

    async def stay_joined(self) -> None:
        """Join the head, and join it again whenever the stream to it has ended."""
        if self._report.standby and self.announce is None:  # of an uplink that was restarted: the others wait for it
            self._standbys[self._report.standby] = self._report.node
            self._heads.standbys = list(self._standbys)
        while True:
            address = self._heads.address()
            channel, call = streams.open_stream(address, self._access, _SET, JOIN)
            stream = call()
            reading = asyncio.create_task(self._read(stream, address))
            until = [reading]
            if address == self._report.standby:
                until.append(asyncio.create_task(self._earlier_head_is_back()))
            reporting = asyncio.create_task(self._send_reports(stream))
            try:
                await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
            except grpc.aio.AioRpcError as exc:
                if address == self._heads.first and exc.code() is not grpc.StatusCode.UNAVAILABLE:
                    self._heads.joined()  # it answers
                else:
                    self._heads.failed(time.monotonic(), exc.code() is grpc.StatusCode.FAILED_PRECONDITION)
                if address == self._heads.first:
                    await self._on_no_head(exc)
            finally:
                for task in (*until, reporting):
                    task.cancel()
                await channel.close()
            await asyncio.sleep(_AGAIN_S)

    async def _read(self, stream: Any, address: str) -> None:
        """Apply the views of a stream until it ends."""
        is_joined = False
        async for view in stream:
            if not is_joined:
                is_joined = True
                self.joined()
                self._heads.joined()
                if address != self._heads.first:
                    self._reasons.report(address, f"the head at {self._heads.first} is lost: this node joins {address}")
            self._on_change(self.members.apply(view))
            if address == self._heads.first:
                # None is forgotten: a head that was restarted does not list a node that it cannot reach yet.
                known = {report.standby: node for node, report in self.members.reports.items() if report.standby}
                self._standbys |= known
                self._heads.standbys = sorted(self._standbys, key=self._standbys.__getitem__)

    async def _earlier_head_is_back(self) -> None:
        """Wait until the first head or an earlier standby can be reached; this node then ends its standby's turn."""
        for turn in itertools.count():
            earlier = self._heads.before(self._report.standby)
            await asyncio.sleep(_PROBE_S)
            channel, _ = streams.open_stream(earlier[turn % len(earlier)], self._access, _SET, JOIN)
            try:
                await asyncio.wait_for(channel.channel_ready(), _READY_S)
                return
            except asyncio.TimeoutError:
                continue
            finally:
                await channel.close()

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
        why = await self._reasons.find(head) if exc.code() is grpc.StatusCode.UNAVAILABLE else exc.details()
        if self.announce is None:
            self._reasons.report(head, f"the head cannot be reached: {why}" if why else "")
        elif exc.code() is grpc.StatusCode.UNAVAILABLE and why:
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
