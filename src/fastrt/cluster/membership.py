"""Membership of the cluster: the head's service that receives each node's reports and sends all reports to every node.

A node is a member as long as its stream lasts. The head keeps no other state. So a head that is killed and restarted
has the full view as soon as the nodes have reconnected; meanwhile the nodes continue to work for each other.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from fastrt.net.address import is_address
from fastrt.net.grpc.descriptors import message_set

JOIN = "/fastrt.node.Head/Join"
# Reports that arrive within this time are sent in one view.
_GATHER_S = 0.02
_END_S = 1.0  # for a refused node to read the last view before the status
_View = message_set("node").message("fastrt.node.View")
REPORT_BYTES_MAX = 8 << 20
_NODE = re.compile(r"[0-9a-f]{32}")
_NAME_MAX = 256
_WORKERS_MAX = 1 << 10
_QUEUED_MAX = 1 << 26  # tasks_max is at most this
_RESOURCES_MAX = 1 << 14  # placement groups add some for each bundle
_PARTS_MAX = 10**13  # 10^9, in parts of 1/10000


def refused_report(report: Any) -> str | None:
    """Return why a node's report is invalid; None when it is valid. The head and each reader check all reports."""
    if _NODE.fullmatch(report.node) is None:
        return f"{report.node[:40]!r} is not a node id: expected 32 hexadecimal digits"
    if not is_address(report.address):
        return f"its address {report.address[:80]!r} is not HOST:PORT"
    if report.native and not is_address(report.native):
        return f"its address {report.native[:80]!r} for large values is not HOST:PORT"
    if len(report.name) > _NAME_MAX or not report.name.isprintable():
        return f"its name has more than {_NAME_MAX} characters, or some that cannot be printed"
    if max(report.workers, report.idle) > _WORKERS_MAX or report.queued > _QUEUED_MAX:
        return f"it says {report.workers} workers, {report.idle} idle, {report.queued} tasks queued: above the limits"
    for parts_of in (report.total, report.free):
        if len(parts_of) > _RESOURCES_MAX:
            return f"it names {len(parts_of)} resources; {_RESOURCES_MAX} are allowed"
        for name, parts in parts_of.items():
            if not 0 < len(name) <= _NAME_MAX or not name.isprintable() or parts > _PARTS_MAX:
                return f"its resource {name[:80]!r} with {parts} parts has an invalid name or amount"
    return None


class Membership:
    """The members, and the streams to them.

    Attributes:
        cluster: the id of this run of the head.
    """

    def __init__(self) -> None:
        self.cluster = uuid.uuid4().hex
        self._members: dict[str, Any] = {}  # node -> its last report
        self._changed = asyncio.Condition()
        self._version = 0
        self._ending: set[asyncio.Task[None]] = set()  # the tasks that send views, of streams that are being refused

    def view(self) -> Any:
        """Return the current View message."""
        return _View(cluster=self.cluster, node=self._members.values())

    async def join(self, reports: AsyncIterator[Any], context: Any) -> None:
        """Serve `Head.Join`: one stream per node. A node that sends an invalid report loses only its own stream."""
        node, mine, sending = "", None, None
        try:
            async for report in reports:
                refusal = self._refusal(report, mine)
                if refusal is not None:
                    await self._end(sending)
                    await context.abort(refusal[0], f"the head refuses a report: {refusal[1]}")
                node, mine = report.node, report
                self._members[node] = report
                sending = sending or asyncio.create_task(self._send_views(context))
                await self._change()
        finally:
            if sending is not None:
                sending.cancel()
            if node and self._members.get(node) is mine:  # the node has not joined again meanwhile
                self._members.pop(node, None)
                await self._change()

    def _refusal(self, report: Any, before: Any) -> tuple[grpc.StatusCode, str] | None:
        """Return why a report is refused on a stream whose last report was `before`; None when it is accepted."""
        why = refused_report(report)
        if why is None and before is not None and before.node != report.node:
            why = f"this stream belongs to node {before.node}, but the report names node {report.node}"
        if why is not None:
            return grpc.StatusCode.INVALID_ARGUMENT, why
        there = self._members.get(report.node)
        # A node that lost its stream joins again with the same address.
        if there is not None and there is not before and there.address != report.address:
            return grpc.StatusCode.ALREADY_EXISTS, f"node {report.node} is a member already, at {there.address}"
        return None

    async def _end(self, sending: asyncio.Task[None] | None) -> None:
        """Wait until the view that is being written was sent: gRPC would never send a status that overtakes it."""
        if sending is not None:
            async with self._changed:
                self._ending.add(sending)
                self._changed.notify_all()
            await asyncio.wait([sending], timeout=_END_S)
            self._ending.discard(sending)

    async def _change(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _send_views(self, context: Any) -> None:
        sent = -1
        me = asyncio.current_task()
        while True:
            async with self._changed:
                while sent == self._version and me not in self._ending:
                    await self._changed.wait()
                if me in self._ending:
                    return
                sent = self._version
            await context.write(self.view())
            await asyncio.sleep(_GATHER_S)
