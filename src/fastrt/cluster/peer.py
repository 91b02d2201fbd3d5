"""The peers that this node forwards tasks to: how many each may have, and which of them gets a task."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks as core
from fastrt.cluster.peer_stream import Exchange

_LENT_MAX = 4096
_OUTPUT_MAX = 256


@dataclass
class Peer:
    """Another node: where it is, the stream to it, and how many tasks it may have of ours at once.

    Attributes:
        report: what the head says of it; None: nothing.
        has_choice: this node can run its tasks itself: another one gets only what it says that it has room for.
        exchange: the stream to it; None: there is none.
        calling, call_at: whether it is called, or when it may be again.
        target: how many tasks keep it busy, as far as is known.
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
    def room(self) -> int:
        """How many more tasks should be forwarded to it now."""
        if self.exchange is None or not self.exchange.node:
            return 0
        most = int(self.target)
        return max(0, (min(most, self.exchange.room) if self.has_choice else most) - self.exchange.ledger.lent)

    def adapt(self) -> None:
        """After a frame: more, while it has nothing waiting when our results come; fewer, while much waits there."""
        assert self.exchange is not None
        workers = max(1, self.exchange.workers)
        least = 2 * workers
        if not self.exchange.queued and self.exchange.ledger.lent * 2 <= self.target:
            self.target = min(_LENT_MAX, self.target * 2)
        elif self.exchange.queued > 4 * workers + self.target / 2:
            self.target *= 0.9
        self.target = max(least, self.target)


def nearest(client: Client, helpers: list[Peer], task: int) -> Peer:
    """Of nodes with room, the one that has most of a task's arguments already; else the one with most room."""
    if len(helpers) == 1:
        return helpers[0]
    _, _, refs = core.arguments(client, task, True)
    if not refs:
        return helpers[0]
    return max(helpers, key=lambda peer: peer.exchange.holds(refs) if peer.exchange is not None else 0)
