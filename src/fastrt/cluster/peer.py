"""The peers that this node forwards tasks to: how many tasks each may have, and which one gets a task."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any
from zlib import crc32

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks as core
from fastrt.cluster.peer_stream import Exchange
from fastrt.tasks.resources import CPU

_FORWARDED_MAX = 4096
_OUTPUT_MAX = 256
_FETCH_BYTES = 64 << 10  # to fetch less takes no longer than a message
_CALLS_MAX = 8  # connections that one node opens at a time, to find room for its tasks


@dataclass(eq=False)
class Peer:
    """Another node: its address, the stream to it, and how many tasks of this node it may have at once.

    Attributes:
        report: its last report, from the head; None: the head does not list it.
        has_choice: whether this node has workers of its own; if so, the peer gets only as many tasks as it reports
            room for.
        exchange: the stream to it; None: there is none.
        calling, call_at: whether this node is connecting to it, and when it may next try to.
        target: the estimated number of tasks that keeps it busy.
        output: messages with lines for its drivers that wait for the stream; beyond a limit the oldest are dropped.
    """

    report: Any
    has_choice: bool
    exchange: Exchange | None = None
    calling: bool = False
    call_at: float = 0.0
    target: float = 0.0
    output: deque[Any] = field(default_factory=lambda: deque(maxlen=_OUTPUT_MAX))

    @property
    def is_open(self) -> bool:
        """Return whether there is a stream to it that this node may use now."""
        return self.exchange is not None and bool(self.exchange.node) and self.exchange.idle.is_open

    @property
    def leaves(self) -> bool:
        """Return whether it leaves the cluster, and takes no more work."""
        return self.exchange is not None and bool(self.exchange.leaves.asked)

    @property
    def room(self) -> int:
        """Return how many more tasks should be forwarded to it now."""
        if self.exchange is None or not self.is_open or self.leaves:
            return 0
        most = int(self.target)
        return max(0, (min(most, self.exchange.room) if self.has_choice else most) - self.exchange.ledger.forwarded)

    @property
    def load(self) -> float:
        """Return how many tasks it has for each of its workers: those of this node, or its queue if that is longer."""
        exchange = self.exchange
        assert exchange is not None
        return max(exchange.ledger.forwarded, exchange.queued) / max(1, exchange.workers)

    def adapt(self) -> None:
        """Adapt the target after a frame: raise it while the peer's queue is empty, lower it while that is long."""
        assert self.exchange is not None
        workers = max(1, self.exchange.workers)
        least = 2 * workers
        if not self.exchange.queued and self.exchange.ledger.forwarded * 2 <= self.target:
            self.target = min(_FORWARDED_MAX, self.target * 2)
        elif self.exchange.queued > 4 * workers + self.target / 2:
            self.target *= 0.9
        self.target = max(least, self.target)


class Helpers:
    """Peers that have room for tasks: a heap, of which the first has the fewest tasks for each of its workers.

    A peer's entry may be outdated in one direction only: the peer has got tasks since.

    Args:
        client: the uplink's attachment.
        peers: all that there are.

    Attributes:
        room: how many tasks they had room for together.
    """

    def __init__(self, client: Client, peers: Iterable[Peer]) -> None:
        self._client = client
        able = [(peer.room, peer.exchange, peer) for peer in peers if peer.exchange is not None]
        self.room = sum(room for room, *_ in able)
        self._heap = [(peer.load, -room, exchange.node, peer) for room, exchange, peer in able if room]
        heapify(self._heap)

    def has_room(self) -> bool:
        """Return whether some peer has room, and bring the one that should get the next task to the top."""
        heap = self._heap
        while heap:
            load, _, node, peer = heap[0]
            room = peer.room
            if not room:
                heappop(heap)
            elif peer.load > load:
                heapreplace(heap, (peer.load, -room, node, peer))
            else:
                return True
        return False

    def choose(self, task: int) -> Peer:
        """Return the peer for a task: that with least to fetch once it has the task, else that with most free workers.

        So a task goes where its arguments are, and tasks whose arguments are everywhere are dealt out over the nodes.
        `has_room` comes before each call.
        """
        first = self._heap[0][-1]
        if len(self._heap) == 1:
            return first
        _, _, refs = core.arguments(self._client, task, True)
        if not refs:
            return first
        fetching = {
            peer: (peer.exchange.ledger.fetching, peer.exchange.lacks(refs))
            for *_, peer in self._heap
            if peer.exchange is not None and peer.room
        }
        return min(fetching, key=lambda peer: (*_steps(*fetching[peer]), peer.load), default=first)


def _steps(fetching: int, lacks: int) -> tuple[int, int]:
    """Return what a peer has to fetch once it has a task, and what the task adds to that; both in units."""
    return (fetching + lacks) // _FETCH_BYTES, lacks // _FETCH_BYTES


def to_call(node: str, peers: Collection[Peer]) -> list[Peer]:
    """Return the peers that a node should connect to next because it needs room for tasks: those with most CPUs free.

    In a cluster of more than a few nodes, a peer that has a queue is left out: it has no room either. Peers that are
    equally free are in an order that differs from node to node.
    """
    most = _CALLS_MAX - sum(peer.calling for peer in peers)
    known = [peer for peer in peers if peer.exchange is None and peer.report is not None and not peer.calling]
    able = [peer for peer in known if peer.report.workers and (not peer.report.queued or len(peers) <= _CALLS_MAX)]
    able.sort(key=lambda peer: (-peer.report.free.get(CPU, 0), crc32((node + peer.report.node).encode())))
    return able[: max(0, most)]
