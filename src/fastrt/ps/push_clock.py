"""Records of received pushes per part of a table, and the rule for when a step is due. No clock and no values.

Each part is counted by itself, since parts move between servers one by one. A push is identified by its client and the
client's number, which grows. So each part recognises a push that it has received before, even across a restart or a
move, and nothing is applied twice. In synchronous mode a push waits here until every worker has pushed to the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Pending:
    """A push that waits for the pushes of other workers.

    Attributes:
        lr: its learning rate; None: the optimizer's.
        body: its gradient; None when it was dropped.
        mask: the parts for which it has not been used yet.
    """

    lr: float | None
    body: Any
    mask: Array


class Pace:
    """The records of one table at one server.

    Args:
        mode: "sync", "async" or "ssp".
        workers: number of workers.
        parts: number of parts of the whole table.
        owned: parts that this server has.

    Attributes:
        steps: number of steps of each part.
        ages: number of steps of each part that changed it (a step without any gradient does not).
        pending: waiting pushes by rank.
    """

    def __init__(self, mode: str, workers: int, parts: int, owned: Sequence[int]) -> None:
        self.mode = mode
        self.workers = workers
        self.owned = np.zeros(parts, bool)
        self.owned[list(owned)] = True
        self.steps = np.zeros(parts, np.int64)
        self.ages = np.zeros(parts, np.int64)
        self.pending: dict[int, Pending] = {}
        self._applied: dict[int, Array] = {}
        self._clocks: dict[int, Array] = {}

    def fresh(self, client: int, number: int) -> Array:
        """Mask of the parts of this server that have not received a push yet."""
        applied = self._applied.get(client)
        return self.owned.copy() if applied is None else self.owned & (applied < number)

    def is_blocked(self, rank: int, fresh: Array) -> bool:
        """Whether the worker's previous push still waits for other workers."""
        return rank in self.pending and bool((self.pending[rank].mask & fresh).any())

    def note(self, client: int, rank: int, number: int, fresh: Array) -> None:
        """Record a push as received."""
        zeros = np.zeros(len(self.owned), np.int64)
        self._applied.setdefault(client, zeros.copy())[fresh] = number
        self._clocks.setdefault(rank, zeros.copy())[fresh] += 1

    def wait(self, rank: int, pending: Pending) -> None:
        """Let a push wait for other workers' pushes. It is joined with one of its worker that waits in other parts."""
        before = self.pending.get(rank)
        if before is not None:
            if before.body is not None and pending.body is not None:
                pending.body = pending.body.joined(before.body, pending.mask)
            pending.mask = pending.mask | before.mask
        self.pending[rank] = pending

    def ready(self) -> Array:
        """Mask of the parts to which every worker has pushed."""
        ready: Array = self.owned.copy()
        for rank in range(self.workers):
            ready &= self.pending[rank].mask if rank in self.pending else False
        return ready

    def stepped(self, parts: Array, changed: bool) -> None:
        """Record a step of these parts, and drop the pushes that were waiting for it."""
        self.steps[parts] += 1
        self.ages[parts] += changed
        for rank, pending in list(self.pending.items()):
            pending.mask = pending.mask & ~parts
            if not pending.mask.any():
                del self.pending[rank]

    def forget(self, client: int) -> None:
        """Drop the records of a client that will push no more."""
        self._applied.pop(client, None)

    def latest(self) -> dict[str, int]:
        """Number of the last push of each client that any part of this server received."""
        return {str(client): int(applied[self.owned].max(initial=0)) for client, applied in self._applied.items()}

    def reset_clients(self) -> None:
        """Forget all clients and waiting pushes, and set every worker's count to the number of steps."""
        self._applied.clear()
        self.pending.clear()
        self._clocks = {rank: self.steps.copy() for rank in range(self.workers)} if self.mode == "sync" else {}

    def floor(self) -> int:
        """Number of steps that all parts of this server have done."""
        return int(np.min(self.steps[self.owned])) if self.owned.any() else 1 << 62

    def clock(self, rank: int) -> int:
        """Number of pushes of a worker that every part of this server received."""
        if not self.owned.any():
            return 1 << 62
        clock = self._clocks.get(rank)
        return 0 if clock is None else int(clock[self.owned].min())

    def slowest(self) -> int:
        """Number of pushes of the slowest worker."""
        return min(self.clock(rank) for rank in range(self.workers))

    def missing(self) -> list[int]:
        """The workers with fewer pushes than the fastest, for which the others wait."""
        clocks = {rank: self.clock(rank) for rank in range(self.workers)}
        return [rank for rank, clock in clocks.items() if clock < max(clocks.values())]

    def dump(self, parts: Sequence[int]) -> dict[str, Array]:
        """The records of some parts as arrays, without waiting pushes."""
        chosen = list(parts)
        found = {"steps": self.steps[chosen], "ages": self.ages[chosen]}
        found |= {f"applied/{client}": applied[chosen] for client, applied in self._applied.items()}
        found |= {f"clock/{rank}": clock[chosen] for rank, clock in self._clocks.items()}
        return found

    def load(self, parts: Sequence[int], found: dict[str, Array]) -> None:
        """Take over the records that `dump` returned for the same parts.

        Raises:
            ValueError: the sizes do not fit.
        """
        chosen = list(parts)
        for name, values in found.items():
            kind, _, number = name.partition("/")
            if kind in ("steps", "ages"):
                (self.steps if kind == "steps" else self.ages)[chosen] = values
            elif kind in ("applied", "clock"):
                known = self._applied if kind == "applied" else self._clocks
                known.setdefault(int(number), np.zeros(len(self.owned), np.int64))[chosen] = values
