"""Who is in the cluster: the head's service that nodes report to, and that tells all of them who is there.

A node is a member as long as its stream lasts. Nothing else is kept, so a head that is killed and started again
knows everything as soon as the nodes have connected again; meanwhile they go on working for each other.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastrt.rpc.descriptors import message_set

JOIN = "/fastrt.node.Head/Join"
# Reports of many nodes that come together are told once.
_GATHER_S = 0.02
_View = message_set("node").message("fastrt.node.View")


class Membership:
    """The members, and the streams to them.

    Attributes:
        cluster: this head's own name.
    """

    def __init__(self) -> None:
        self.cluster = uuid.uuid4().hex
        self._members: dict[str, Any] = {}  # node -> its last report
        self._changed = asyncio.Condition()
        self._version = 0

    def view(self) -> Any:
        """The View message as of now."""
        return _View(cluster=self.cluster, node=self._members.values())

    async def join(self, reports: AsyncIterator[Any], context: Any) -> None:
        """Serve `Head.Join`."""
        telling = asyncio.create_task(self._tell(context))
        node, mine = "", None
        try:
            async for report in reports:
                node, mine = node or report.node, report
                self._members[node] = report
                await self._change()
        finally:
            telling.cancel()
            if self._members.get(node) is mine:  # not one that has come back meanwhile
                self._members.pop(node, None)
                await self._change()

    async def _change(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _tell(self, context: Any) -> None:
        told = -1
        while True:
            async with self._changed:
                while told == self._version:
                    await self._changed.wait()
                told = self._version
            await context.write(self.view())
            await asyncio.sleep(_GATHER_S)
