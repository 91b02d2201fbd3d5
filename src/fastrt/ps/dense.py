"""A server's parts of a dense table, in shared memory of several versions that local processes map.

The parts lie one behind the other, each at the start of a page, in the slots of `_core.tables.versions` and in the
arrays of the optimizer's state; the padding of a part's last page stays zero. A step reads the current version, writes
the next one beside it and then makes that one current, so a reader always sees a complete version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastrt._core.collective.reduce import reduce_buffers
from fastrt._core.tables.versions import READERS, Versions
from fastrt.ps.placement import PAGE_ELEMENTS
from fastrt.ps.push_clock import Array, Pace, Pending
from fastrt.ps.spec import Spec

SUMS_MAX = 64  # most sources of one call of the kernel


def layout(cuts: Sequence[int], parts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """List (part, first element in the table, elements, first element here) for each part that a server has."""
    places, at = [], 0
    for part in sorted(parts):
        count = cuts[part + 1] - cuts[part]
        places.append((part, cuts[part], count, at))
        at += -(-count // PAGE_ELEMENTS) * PAGE_ELEMENTS
    return places


def padded(cuts: Sequence[int], parts: Sequence[int]) -> int:
    """Number of elements that these parts take, padding of pages included; never 0."""
    return sum(-(-(cuts[part + 1] - cuts[part]) // PAGE_ELEMENTS) * PAGE_ELEMENTS for part in parts) or PAGE_ELEMENTS


class Gradient:
    """A pushed gradient of all parts of this server, with padding, that waits for those of other workers."""

    def __init__(self, values: Array, places: Sequence[tuple[int, int, int, int]]) -> None:
        self.values = values
        self._places = places

    def joined(self, older: Gradient, mask: Array) -> Gradient:
        """Return this gradient with the older one's values where the mask is not set."""
        for part, _, count, at in self._places:
            if not mask[part]:
                self.values[at : at + count] = older.values[at : at + count]
        return self


class DenseShard:
    """One server's parts of one table. Not thread-safe; readers need no lock.

    Args:
        spec: definition of the table.
        parts: parts that this server has.

    Attributes:
        memory: the shared versions.
        pace: which pushes have been received.
    """

    def __init__(self, spec: Spec, parts: Sequence[int]) -> None:
        self.spec = spec
        self.parts = sorted(parts)
        self.places = layout(spec.cuts, self.parts)
        self.size = padded(spec.cuts, self.parts)
        self.pace = Pace(spec.mode, spec.workers, spec.parts, self.parts)
        self.memory = Versions.create(4 * self.size)
        self.states = [np.full(self.size, first, np.float32) for first in spec.optimizer.states]
        self._readers: set[int] = set()
        if spec.init is not None:
            for _, begin, count, at in self.places:
                keys = np.arange(begin, begin + count, dtype=np.uint64)
                self.current[at : at + count] = spec.init.rows(keys, 1)[:, 0]

    def fill(self, values: Array) -> None:
        """Set the first values, of these parts one behind the other; only before the table is announced."""
        _paste(values, self.current, [slice(at, at + count) for _, _, count, at in self.places])

    @property
    def current(self) -> Array:
        """The current version, writable; only before the table is announced."""
        return np.frombuffer(memoryview(self.memory.slot(self.memory.current[0])), np.float32)

    @property
    def state_bytes(self) -> int:
        """Size of a snapshot in bytes."""
        return 4 * self.size * (1 + len(self.states))

    def body(self, meta: Any, data: Any) -> Array:
        """Return the gradient in a message's bytes.

        Raises:
            ValueError: it has another size than the parts here.
        """
        if memoryview(data).nbytes != 4 * self.size:
            raise ValueError(
                f"{memoryview(data).nbytes} bytes of a gradient; the parts of this server have {4 * self.size}"
            )
        return np.frombuffer(data, np.float32)

    def prepare(self, rank: int, fresh: Array, body: Any) -> Array | None:
        """Do nothing: a dense push needs no extra data in its log record."""
        return None

    def has_room(self) -> bool:
        """Whether a slot is free for the next version; a reader that copies keeps one occupied meanwhile."""
        return self.memory.begin() >= 0

    def push(self, rank: int, fresh: Array, lr: float | None, body: Array | None) -> None:
        """Apply a gradient, or keep it until the gradients of all workers have come.

        Args:
            rank: the worker.
            fresh: mask of the parts it applies to; it has been applied to the others before.
            lr: its learning rate.
            body: the gradient, see `body`; None when it was dropped. It is copied if it must wait.
        """
        if self.pace.mode != "sync":
            self._step(fresh, lr, body)
            return
        alone = self.pace.workers == 1 and not self.pace.pending
        kept = body if body is None or alone else body.copy()
        self.pace.wait(rank, Pending(lr, None if kept is None else Gradient(kept, self.places), fresh.copy()))
        ready = self.pace.ready()
        if ready.any():
            waiting = [self.pace.pending[r] for r in range(self.pace.workers)]
            rates = [one.lr for one in waiting if one.lr is not None]
            self._step(ready, rates[0] if rates else None, self._mean(waiting))

    def _mean(self, waiting: list[Pending]) -> Array | None:
        """The mean of the gradients that were not dropped, summed in the order of ranks."""
        bodies = [one.body.values for one in waiting if one.body is not None]
        if len(bodies) < 2:
            return bodies[0] if bodies else None
        total = np.empty(self.size, np.float32)
        while len(bodies) > SUMS_MAX:
            reduce_buffers("sum", "float32", total, bodies[:SUMS_MAX])
            bodies = [total.copy(), *bodies[SUMS_MAX:]]
        reduce_buffers("sum", "float32", total, bodies)
        total /= np.float32(sum(one.body is not None for one in waiting))
        return total

    def _step(self, parts: Array, lr: float | None, grad: Array | None) -> None:
        """Make one step of some parts, into the next version."""
        if grad is not None:
            slot = self.memory.begin()
            old, new = self.current, np.frombuffer(memoryview(self.memory.slot(slot)), np.float32)
            rate = self.spec.optimizer.lr if lr is None else lr
            ages = self.pace.ages[self.parts]
            if len(ages) and parts[self.parts].all() and (ages == ages[0]).all():
                self.spec.optimizer.update(old, grad, self.states, int(ages[0]) + 1, rate, out=new)
            else:
                self._step_each(parts, rate, grad, old, new)
            self.memory.publish(slot)
        self.pace.stepped(parts, grad is not None)

    def _step_each(self, parts: Array, rate: float, grad: Array, old: Array, new: Array) -> None:
        for part, _, count, at in self.places:
            here = slice(at, at + count)
            if not parts[part]:
                new[here] = old[here]
                continue
            states = [state[here] for state in self.states]
            step = int(self.pace.ages[part]) + 1
            self.spec.optimizer.update(old[here], grad[here], states, step, rate, out=new[here])

    # ---- readers ----

    def admit(self) -> int:
        """Reserve a reader's number for a process that maps the versions; -1 when there are too many."""
        free = next((k for k in range(READERS) if k not in self._readers), -1)
        if free >= 0:
            self._readers.add(free)
        return free

    def dismiss(self, reader: int) -> None:
        """Release the number of a reader that is gone."""
        self.memory.clear(reader)
        self._readers.discard(reader)

    # ---- migration, snapshots and checkpoints ----

    def dump(self, parts: Sequence[int]) -> dict[str, Array]:
        """The whole state of some parts, as arrays."""
        chosen = set(parts)
        where = _runs([(at, count) for part, _, count, at in self.places if part in chosen])
        arrays = {"param": self.current, **{f"state{k}": state for k, state in enumerate(self.states)}}
        found = {name: _cut(array, where) for name, array in arrays.items()}
        found |= self.pace.dump(sorted(parts))
        for rank, pending in self.pace.pending.items():
            found[f"mask/{rank}"] = pending.mask[sorted(parts)]
            found[f"rate/{rank}"] = np.array([] if pending.lr is None else [pending.lr])
            if pending.body is not None:
                found[f"grad/{rank}"] = _cut(pending.body.values, where)
        return found

    def load(self, parts: Sequence[int], found: dict[str, Array]) -> None:
        """Take over the state that `dump` returned for the same parts.

        Raises:
            ValueError: the sizes do not fit.
        """
        chosen = set(parts)
        where = [slice(at, at + count) for part, _, count, at in self.places if part in chosen]
        _paste(found["param"], self.current, where)
        for k, state in enumerate(self.states):
            _paste(found[f"state{k}"], state, where)
        self.pace.load(sorted(parts), found)
        for name in [name for name in found if name.startswith("mask/")]:
            rank = int(name.partition("/")[2])
            mask = np.zeros(self.spec.parts, bool)
            mask[sorted(parts)] = found[name].astype(bool)
            if not mask.any():
                continue
            rate, grad = found[f"rate/{rank}"], found.get(f"grad/{rank}")
            body = None
            if grad is not None:
                body = Gradient(np.zeros(self.size, np.float32), self.places)
                _paste(grad, body.values, where)
            self.pace.wait(rank, Pending(float(rate[0]) if len(rate) else None, body, mask))


def _runs(places: list[tuple[int, int]]) -> list[slice]:
    """Merge adjacent places into slices: a cut of one slice needs no copy."""
    runs: list[slice] = []
    for at, count in places:
        if runs and runs[-1].stop == at:
            runs[-1] = slice(runs[-1].start, at + count)
        else:
            runs.append(slice(at, at + count))
    return runs


def _cut(array: Array, where: list[slice]) -> Array:
    if len(where) == 1:
        return array[where[0]]
    return np.concatenate([array[one] for one in where]) if where else np.empty(0, np.float32)


def _paste(values: Array, into: Array, where: list[slice]) -> None:
    if len(values) != sum(one.stop - one.start for one in where):
        raise ValueError(f"{len(values)} values came for parts of {sum(one.stop - one.start for one in where)} values")
    at = 0
    for one in where:
        into[one] = values[at : at + one.stop - one.start]
        at += one.stop - one.start
