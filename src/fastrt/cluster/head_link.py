"""The uplink's stream to the head: this node's reports go out, and the head's views come in."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._head = head
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
        while True:
            channel, call = streams.open_stream(self._head, self._access, _SET, JOIN)
            stream = call()
            reporting = asyncio.create_task(self._send_reports(stream))
            try:
                async for view in stream:
                    self.joined()
                    self._on_change(self.members.apply(view))
            except grpc.aio.AioRpcError as exc:
                await self._on_no_head(exc)
            finally:
                reporting.cancel()
                await channel.close()
            await asyncio.sleep(_AGAIN_S)

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
        head = self._head
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
