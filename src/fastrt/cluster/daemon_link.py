"""The uplink's connection to its daemon: orders to forward held tasks, free resources, and the members.

The daemon decides which node gets a task (`placing`), and the uplink executes the order. An order that is lost because
one of the two processes died is sent again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Ref
from fastrt._core.tasks import actors, admission
from fastrt.node.admission import free_of
from fastrt.node.keys import ActorKey, TaskKey, pair_of
from fastrt.store.join import Lasting
from fastrt.store.messages import (
    ClusterNodes,
    Forward,
    HeldObject,
    Holds,
    KeepObject,
    KeptObject,
    Message,
    NodeRow,
    ReleaseObject,
    Resources,
)


class Orders:
    """The connection to the daemon, which a separate thread reads.

    Args:
        client: the uplink's attachment.
        daemon: the connection; other parts of the uplink also send on it.
        news: called on the loop's thread when there are orders, or when the free resources have changed.
        others: handlers of the daemon's other messages by type; also called on the loop's thread.

    Attributes:
        ready: set once the daemon has reported this node's resources.
        total, free: parts of this node's resources by name, as the daemon reports them.
    """

    def __init__(
        self,
        client: Client,
        daemon: Lasting,
        news: Callable[[], None],
        others: Mapping[type[Message], Callable[[Any], None]],
    ) -> None:
        self._client = client
        self._daemon = daemon
        self._news = news
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._rows: list[NodeRow] = []
        self._pending: dict[str, list[TaskKey | ActorKey]] = {}
        self._admitted = 0
        self._kept: dict[tuple[str, int], int] = {}  # what the daemon holds for other nodes: (node, objref) -> entry
        self._held: dict[str, dict[int, int]] = {}  # by node: bytes of the large objects whose values it also has
        self.ready = asyncio.Event()
        self.total: dict[str, int] = {}
        self.free: dict[str, int] = {}
        daemon.send(ClusterNodes([], False))
        threading.Thread(target=self._listen, name="fastrt-orders", daemon=True).start()

    def report_members(self, reports: Iterable[Any]) -> None:
        """Send the members of the cluster to the daemon, if they have changed."""
        rows = [NodeRow(report.node, report.name, dict(report.total), dict(report.free)) for report in reports]
        rows.sort(key=lambda row: row.node)
        if rows != self._rows:
            self._rows = rows
            self._daemon.send(ClusterNodes(rows, False))

    def wanted(self) -> list[str]:
        """Nodes for which there are orders."""
        return list(self._pending)

    def take(self, node: str) -> list[TaskKey | ActorKey]:
        """Claim the tasks and actors that one node should run; return those that were still available."""
        return [key for key in self._pending.pop(node, []) if self._claim(key)]

    def _claim(self, key: TaskKey | ActorKey) -> bool:
        take = admission.claim if isinstance(key, TaskKey) else actors.carry
        return bool(take(self._client, *pair_of(key)))

    def hold(self, node: str, objref: int, nbytes: int) -> None:
        """Report to the daemon that a node also has the value of a large object; 0 bytes: it no longer has it."""
        there = self._held.setdefault(node, {})
        if nbytes:
            there[objref] = nbytes
        elif there.pop(objref, None) is None:
            return
        self._daemon.send(Holds(node, [HeldObject(objref, nbytes)]))

    def lost(self, node: str) -> None:
        """Report that a node whose stream has ended no longer holds the objects that it was sent."""
        there = self._held.pop(node, {})
        if there:
            self._daemon.send(Holds(node, [HeldObject(objref, 0) for objref in there]))

    def keep(self, node: str, ref: Ref) -> None:
        """Have the daemon hold an object that another node holds."""
        if (node, ref.objref) not in self._kept:
            self._kept[node, ref.objref] = ref.index
            self._daemon.send(KeepObject(node, ref.objref, ref.index))

    def release(self, node: str, objref: int) -> None:
        """Have the daemon drop an object that another node does not hold any more."""
        if self._kept.pop((node, objref), None) is not None:
            self._daemon.send(ReleaseObject(node, objref))

    def adopt(self, rows: Iterable[KeptObject]) -> None:
        """Take over what the daemon holds for other nodes since an earlier uplink."""
        self._kept.update({(row.node, row.objref): row.entry for row in rows})

    def drop(self, node: str) -> None:
        """Drop the orders for a node that has left: the daemon chooses other nodes for them."""
        self._pending.pop(node, None)

    def free_now(self) -> dict[str, int]:
        """Return this node's free resources, less the CPUs that tasks without demands use."""
        return free_of(self._client, self.total, self.free, self._admitted)

    def _listen(self) -> None:
        while True:
            try:
                message = self._daemon.receive()
            except EOFError:
                return  # the daemon is gone for good: this process ends with the next error
            try:
                self._loop.call_soon_threadsafe(self._on_message, message)
            except RuntimeError:
                return  # the loop has ended

    def _on_message(self, message: Message | None) -> None:
        if message is None:  # a new daemon has started: send it everything
            self._daemon.send(ClusterNodes(self._rows, True))
            for node, there in self._held.items():
                self._daemon.send(Holds(node, [HeldObject(*item) for item in there.items()]))
            for (node, objref), entry in self._kept.items():
                self._daemon.send(KeepObject(node, objref, entry))
        elif isinstance(message, Forward):
            for task in message.tasks:
                self._pending.setdefault(task.node, []).append(TaskKey(task.record, task.id))
            for actor in message.actors:
                self._pending.setdefault(actor.node, []).append(ActorKey(actor.record, actor.id))
        elif isinstance(message, Resources):
            self.total, self.free, self._admitted = message.total, message.free, message.admitted
            self.ready.set()
        elif type(message) in self._others:
            self._others[type(message)](message)
            return
        self._news()
