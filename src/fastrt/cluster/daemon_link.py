"""The uplink's connection to its daemon: orders to forward held tasks, free resources, and the members.

The daemon decides which node gets a task (`placing`), and the uplink executes the order. An order that is lost because
one of the two processes died is sent again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt._core.objects.handles import Ref
from fastrt._core.tasks import actors, admission
from fastrt.cluster.views import Change
from fastrt.errors import FastrtError
from fastrt.node.amounts import free_of
from fastrt.node.keys import ActorKey, TaskKey, pair_of
from fastrt.store.join import Lasting
from fastrt.store.messages import (
    BYTES_MAX,
    OBJECTS_MAX,
    ClusterNodes,
    Forward,
    HeldObject,
    Holds,
    KeepObjects,
    KeptObject,
    KeptObjects,
    KnownHeads,
    Message,
    NodeRow,
    ReleaseObjects,
    Resources,
    TaskRecord,
)
from fastrt.store.ref import ObjectRef

_About = KeepObjects | ReleaseObjects | Holds
_LOOKING_S = 2.0  # after something was placed on another node: the next one probably follows
_A_CHARACTER, _A_NUMBER, _A_ROW = 6, 24, 100  # bytes of JSON, at most


class Holders:
    """Which nodes have the values of large objects of this node, by the streams to them: a node can have several."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, dict[object, int]]] = {}  # by node, object and stream: its bytes

    def add(self, stream: object, node: str, objref: int, nbytes: int) -> bool:
        """Record that a node has a value, by one of its streams; return whether the node did not have it before."""
        streams = self._held.setdefault(node, {}).setdefault(objref, {})
        is_first = not streams
        streams[stream] = nbytes
        return is_first

    def remove(self, stream: object, node: str, objref: int) -> bool:
        """Record the end of one stream's hold; return whether the node had the value by this stream alone."""
        there = self._held.get(node, {})
        streams = there.get(objref, {})
        if streams.pop(stream, None) is None or streams:
            return False
        del there[objref]
        if not there:
            del self._held[node]
        return True

    def end(self, stream: object, node: str) -> list[int]:
        """Record the end of a stream; return the objects whose values its node does not have any more."""
        return [objref for objref in list(self._held.get(node, ())) if self.remove(stream, node, objref)]

    def rows(self) -> Iterator[tuple[str, HeldObject]]:
        """Yield all that is held, and by which node."""
        for node, there in self._held.items():
            for objref, streams in there.items():
                yield node, HeldObject(objref, max(streams.values()))


class Orders:
    """The connection to the daemon, which a separate thread reads.

    News of single objects goes in batches: at the loop's next turn, or at `flush`.

    Args:
        name: this node's, for people.
        client: the uplink's attachment.
        daemon: the connection; other parts of the uplink also send on it.
        news: called on the loop's thread when there are orders, or when the free resources have changed.
        others: handlers of the daemon's other messages by type; also called on the loop's thread.

    Attributes:
        ready: set once the daemon has reported this node's resources.
        total, free: parts of this node's resources by name, as the daemon reports them.
        heads: what this uplink, or the one before it, knows of the heads; None: no news since the node's start.
        ahead: tasks whose arguments should be fetched while they wait for resources.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        daemon: Lasting,
        news: Callable[[], None],
        others: Mapping[type[Message], Callable[[Any], None]],
    ) -> None:
        self._name = name
        self._client = client
        self._daemon = daemon
        self._news = news
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._rows: dict[str, NodeRow] = {}
        self._is_waiting = False
        self._placed_at = -_LOOKING_S
        self._pending: dict[str, list[TaskKey | ActorKey]] = {}
        self._admitted = 0
        self._kept: dict[tuple[str, int], int] = {}  # what the daemon holds for other nodes: (node, objref) -> entry
        self._holders = Holders()
        self._changes: deque[tuple[type[_About], str, Any]] = deque()  # about objects: not sent yet
        self.heads: KnownHeads | None = None
        self.ready = asyncio.Event()
        self.total: dict[str, int] = {}
        self.free: dict[str, int] = {}
        self.ahead: list[TaskRecord] = []
        daemon.send(ClusterNodes(name, [], [], False, False))
        threading.Thread(target=self._listen, name="fastrt-orders", daemon=True).start()

    def report_members(self, change: Change) -> None:
        """Send the changed members of the cluster to the daemon, and those that have left."""
        changed = [
            NodeRow(one.node, one.name, dict(one.total), dict(one.free), dict(one.labels)) for one in change.changed
        ]
        changed = [row for row in changed if self._rows.get(row.node) != row]
        is_change = bool(self._rows)  # the first report names all: some may have left since that of the last uplink
        left = [node for node in change.left if self._rows.pop(node, None) is not None]
        self._rows.update((row.node, row) for row in changed)
        for k, rows in enumerate(_batches(changed) if changed or left else ()):
            self._daemon.send(ClusterNodes(self._name, rows, left if k == 0 else [], is_change or k > 0, False))

    @property
    def is_looking(self) -> bool:
        """Whether something waits here that other nodes may have resources for, or was placed there just now."""
        return self._is_waiting or time.monotonic() < self._placed_at + _LOOKING_S

    def wanted(self) -> list[str]:
        """Nodes for which there are orders."""
        return list(self._pending)

    def take(self, node: str) -> list[TaskKey | ActorKey]:
        """Claim the tasks and actors that one node should run; return those that were still available."""
        return [key for key in self._pending.pop(node, []) if self._claim(key)]

    def _claim(self, key: TaskKey | ActorKey) -> bool:
        take = admission.claim if isinstance(key, TaskKey) else actors.carry
        return bool(take(self._client, *pair_of(key)))

    def hold(self, stream: object, node: str, objref: int, nbytes: int) -> None:
        """Report to the daemon that a node also has the value of a large object; 0 bytes: it no longer has it.

        Args:
            stream: by which the node has it.
            node: the node.
            objref: the object's number.
            nbytes: the size of the value.
        """
        holders = self._holders
        if holders.add(stream, node, objref, nbytes) if nbytes else holders.remove(stream, node, objref):
            self._add(Holds, node, HeldObject(objref, nbytes))

    def lost(self, stream: object, node: str) -> None:
        """Report the objects that a node no longer has because a stream to it has ended."""
        for objref in self._holders.end(stream, node):
            self._add(Holds, node, HeldObject(objref, 0))

    def keep(self, node: str, ref: Ref) -> None:
        """Have the daemon hold an object that another node holds."""
        if (node, ref.objref) not in self._kept:
            self._kept[node, ref.objref] = ref.index
            self._add(KeepObjects, node, KeptObject(ref.objref, ref.index))

    def keep_now(self, node: str, ref: Ref) -> None:
        """Have the daemon hold an object before anything else that this process does can be seen."""
        self.keep(node, ref)
        self.flush()

    def release(self, node: str, objref: int) -> None:
        """Have the daemon drop an object that another node does not hold any more."""
        if self._kept.pop((node, objref), None) is not None:
            self._add(ReleaseObjects, node, objref)

    def _add(self, about: type[_About], node: str, row: Any) -> None:
        self._changes.append((about, node, row))
        if len(self._changes) == 1:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the news of objects: a node that gets a message may rely on them."""
        message: Any = None
        while self._changes:
            about, node, row = self._changes.popleft()
            if message is None or (type(message), message.node) != (about, node) or len(message.objects) == OBJECTS_MAX:
                if message is not None:
                    self._daemon.send(message)
                message = about(node, [])
            message.objects.append(row)
        if message is not None:
            self._daemon.send(message)

    def keep_heads(self, heads: KnownHeads) -> None:
        """Have the daemon hold what the next uplink needs to know of the heads."""
        self.heads = heads
        self._daemon.send(heads)

    def adopt(self, kept: KeptObjects) -> list[ObjectRef]:
        """Take over what the daemon holds for a node since an earlier uplink; return these objects."""
        refs = []
        for row in kept.objects:
            try:
                refs.append(handles.acquire(self._client, row.objref, row.entry))
                self._kept[kept.node, row.objref] = row.entry
            except FastrtError:
                self._add(ReleaseObjects, kept.node, row.objref)
        return refs

    def drop(self, node: str) -> None:
        """Drop the orders for a node that has left: the daemon chooses other nodes for them."""
        self._pending.pop(node, None)

    def free_now(self) -> dict[str, int]:
        """Return this node's free resources, less the CPUs that tasks without demands use."""
        return free_of(self._client, self.total, self.free, self._admitted)

    def _listen(self) -> None:
        while True:
            message = self._daemon.receive()  # an EOFError ends this process: no daemon comes back
            try:
                self._loop.call_soon_threadsafe(self._on_message, message)
            except RuntimeError:
                return  # the loop has ended

    def _on_message(self, message: Message | None) -> None:
        if message is None:  # a new daemon has started: send it everything
            rows = list(self._rows.values())
            for k, batch in enumerate(_batches(rows)):
                self._daemon.send(ClusterNodes(self._name, batch, [], k > 0, k == 0))
            for node, held in self._holders.rows():
                self._add(Holds, node, held)
            for (node, objref), entry in self._kept.items():
                self._add(KeepObjects, node, KeptObject(objref, entry))
            self.flush()
            if self.heads is not None:
                self._daemon.send(self.heads)
        elif isinstance(message, Forward):
            self._placed_at = time.monotonic()
            for task in message.tasks:
                self._pending.setdefault(task.node, []).append(TaskKey(task.record, task.id))
            for actor in message.actors:
                self._pending.setdefault(actor.node, []).append(ActorKey(actor.record, actor.id))
        elif isinstance(message, Resources):
            self.total, self.free, self._admitted = message.total, message.free, message.admitted
            self._is_waiting, self.ahead = message.is_looking, message.ahead
            self.ready.set()
        elif isinstance(message, KnownHeads):
            self.heads = self.heads or message  # of the uplink before this one: a new daemon's may be older
        elif type(message) in self._others:
            self._others[type(message)](message)
            return
        self._news()


def _batches(rows: Sequence[NodeRow]) -> Iterator[list[NodeRow]]:
    """Divide rows into messages that are not too long; one without rows if there are none."""
    batch: list[NodeRow] = []
    left = BYTES_MAX
    for row in rows:
        texts = [row.node, row.name, *row.total, *row.free, *row.labels, *row.labels.values()]
        nbytes = _A_ROW + sum(_A_NUMBER + _A_CHARACTER * len(text) for text in texts)
        if batch and nbytes > left:
            yield batch
            batch, left = [], BYTES_MAX
        batch.append(row)
        left -= nbytes
    yield batch
