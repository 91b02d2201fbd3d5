"""The uplink's connection to its daemon: which held tasks to forward to which node, free resources, the members.

The daemon decides (`placing`) and the uplink executes. An order that is lost with one of the two is sent again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import actors, admission
from fastrt.node.admission import free_of
from fastrt.store.join import Lasting

Task = tuple[int, int]


class Orders:
    """The connection to the daemon, which a separate thread reads.

    Args:
        client: the uplink's attachment.
        daemon: the connection; other parts of the uplink send on it, too.
        news: called on the loop's thread when there are orders, or when the free resources have changed.
        others: called there with each other message of the daemon, by its operation.

    Attributes:
        ready: set once the daemon has reported this node's resources.
        total, free: parts of this node's resources by name, as the daemon reports them.
    """

    def __init__(
        self,
        client: Client,
        daemon: Lasting,
        news: Callable[[], None],
        others: Mapping[str, Callable[[dict[str, Any]], None]],
    ) -> None:
        self._client = client
        self._daemon = daemon
        self._news = news
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._rows: list[Any] = []
        self._pending: dict[str, list[Task]] = {}
        self._admitted = 0
        self._held: dict[str, dict[int, int]] = {}  # by node: bytes of large objects that it has, too
        self.ready = asyncio.Event()
        self.total: dict[str, int] = {}
        self.free: dict[str, int] = {}
        daemon.send(op="cluster", nodes=[])
        threading.Thread(target=self._listen, name="fastrt-orders", daemon=True).start()

    def tell(self, reports: Iterable[Any]) -> None:
        """Send the members of the cluster to the daemon, if they have changed."""
        rows = [[report.node, report.name, dict(report.total), dict(report.free)] for report in reports]
        rows.sort(key=lambda row: str(row[0]))
        if rows != self._rows:
            self._rows = rows
            self._daemon.send(op="cluster", nodes=rows)

    def wanted(self) -> list[str]:
        """Nodes for which there are orders."""
        return list(self._pending)

    def take(self, node: str) -> list[int]:
        """Claim the tasks, and as -1 - index the actors, that one node should run and that are still available."""
        return [task for task, id_ in self._pending.pop(node, []) if self._claim(task, id_)]

    def _claim(self, task: int, id_: int) -> bool:
        if task < 0:
            return actors.carry(self._client, -1 - task, id_)
        return admission.claim(self._client, task, id_)

    def hold(self, node: str, objref: int, nbytes: int) -> None:
        """Report to the daemon that a node has the value of a large object, too; with 0 bytes: not any more."""
        there = self._held.setdefault(node, {})
        if nbytes:
            there[objref] = nbytes
        elif there.pop(objref, None) is None:
            return
        self._daemon.send(op="holds", node=node, objects=[[objref, nbytes]])

    def lost(self, node: str) -> None:
        """The stream to a node has ended: that node releases the objects that it was sent."""
        there = self._held.pop(node, {})
        if there:
            self._daemon.send(op="holds", node=node, objects=[[objref, 0] for objref in there])

    def drop(self, node: str) -> None:
        """A node has left: the daemon finds another for its orders."""
        self._pending.pop(node, None)

    def free_now(self) -> dict[str, int]:
        """Free resources of this node, less the CPUs that tasks without demands take."""
        return free_of(self._client, self.total, self.free, self._admitted)

    def _listen(self) -> None:
        while True:
            try:
                message = self._daemon.receive()
            except EOFError:
                return  # there is no daemon any more: this process ends with the next error
            try:
                self._loop.call_soon_threadsafe(self._on_message, message)
            except RuntimeError:
                return  # the loop has ended

    def _on_message(self, message: dict[str, Any] | None) -> None:
        if message is None:  # a new daemon, which knows nothing
            self._daemon.send(op="cluster", nodes=self._rows, again=True)
            for node, there in self._held.items():
                self._daemon.send(op="holds", node=node, objects=[list(item) for item in there.items()])
        elif message.get("op") == "lend":
            for task, id_, node in message["tasks"]:
                self._pending.setdefault(node, []).append((task, id_))
        elif message.get("op") == "resources":
            self.total, self.free, self._admitted = message["total"], message["free"], message["admitted"]
            self.ready.set()
        elif message.get("op") in self._others:
            self._others[str(message["op"])](message)
            return
        self._news()
