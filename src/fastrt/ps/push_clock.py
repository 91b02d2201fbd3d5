"""Who has pushed what to which part of a table, and when a step may be made: bookkeeping without a clock or values.

Each part counts for itself, since parts move between servers one by one. A push is known by its client and its number,
which grow: what has come already is recognised in each part, also after a restart or a move, so nothing is applied
twice. In synchronous mode a push waits here until every worker has pushed to the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Pending:
    """A push that waits for those of other workers.

    Attributes:
        lr: its learning rate, None for the optimizer's.
        body: its gradient, None when it was dropped.
        mask: of which parts it has not been used yet.
    """

    lr: float | None
    body: Any
    mask: Array


class Pace:
    """The bookkeeping of one table at one server.

    Args:
        mode: "sync", "async" or "ssp".
        workers: how many there are.
        parts: how many parts the whole table has.
        owned: those that are here.

    Attributes:
        steps: of each part: how many steps are done.
        ages: of each part: how many of them changed it (a step without any gradient does not).
        pending: by rank.
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
        """Of which parts here a push has not come yet."""
        applied = self._applied.get(client)
        return self.owned.copy() if applied is None else self.owned & (applied < number)

    def is_blocked(self, rank: int, fresh: Array) -> bool:
        """Whether a worker's push before this one still waits for others."""
        return rank in self.pending and bool((self.pending[rank].mask & fresh).any())

    def note(self, client: int, rank: int, number: int, fresh: Array) -> None:
        """A push has come."""
        zeros = np.zeros(len(self.owned), np.int64)
        self._applied.setdefault(client, zeros.copy())[fresh] = number
        self._clocks.setdefault(rank, zeros.copy())[fresh] += 1

    def wait(self, rank: int, pending: Pending) -> None:
        """A push waits for those of others. One that waits already, of other parts, is joined by it."""
        before = self.pending.get(rank)
        if before is not None:
            if before.body is not None and pending.body is not None:
                pending.body = pending.body.joined(before.body, pending.mask)
            pending.mask = pending.mask | before.mask
        self.pending[rank] = pending

    def ready(self) -> Array:
        """The parts to which every worker has pushed."""
        ready: Array = self.owned.copy()
        for rank in range(self.workers):
            ready &= self.pending[rank].mask if rank in self.pending else False
        return ready

    def stepped(self, parts: Array, changed: bool) -> None:
        """A step of these parts is done; what waited for it does not any more."""
        self.steps[parts] += 1
        self.ages[parts] += changed
        for rank, pending in list(self.pending.items()):
            pending.mask = pending.mask & ~parts
            if not pending.mask.any():
                del self.pending[rank]

    def forget(self, client: int) -> None:
        """A client has said that it will push no more."""
        self._applied.pop(client, None)

    def latest(self) -> dict[str, int]:
        """The last push of each client that has come to any part here."""
        return {str(client): int(applied[self.owned].max(initial=0)) for client, applied in self._applied.items()}

    def begin_anew(self) -> None:
        """The clients are others from now on, and all workers are as far as the steps."""
        self._applied.clear()
        self.pending.clear()
        self._clocks = {rank: self.steps.copy() for rank in range(self.workers)} if self.mode == "sync" else {}

    def floor(self) -> int:
        """How many steps all parts here have done."""
        return int(self.steps[self.owned].min()) if self.owned.any() else 1 << 62

    def clock(self, rank: int) -> int:
        """How often a worker has pushed to every part here."""
        if not self.owned.any():
            return 1 << 62
        clock = self._clocks.get(rank)
        return 0 if clock is None else int(clock[self.owned].min())

    def slowest(self) -> int:
        """How often the slowest worker has pushed."""
        return min(self.clock(rank) for rank in range(self.workers))

    def missing(self) -> list[int]:
        """The workers that have pushed least, for whom others wait."""
        clocks = {rank: self.clock(rank) for rank in range(self.workers)}
        return [rank for rank, clock in clocks.items() if clock < max(clocks.values())]

    def dump(self, parts: Sequence[int]) -> dict[str, Array]:
        """What is known of some parts, but for what waits."""
        chosen = list(parts)
        found = {"steps": self.steps[chosen], "ages": self.ages[chosen]}
        found |= {f"applied/{client}": applied[chosen] for client, applied in self._applied.items()}
        found |= {f"clock/{rank}": clock[chosen] for rank, clock in self._clocks.items()}
        return found

    def load(self, parts: Sequence[int], found: dict[str, Array]) -> None:
        """Know what `dump` gave of the same parts, wherever they were.

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
