"""A server's part of an embedding: rows under keys, created at the first use, evicted when there are too many.

The values are in the shared memory of `_core.tables.embedding`, where other processes look them up. The optimizer's
state is in this process's memory, under the same row numbers. Which rows are evicted depends on lookups, which are not
in the log. So the chosen keys are written to the log before the change that needs their room.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastrt._core.tables.embedding import PARTS, ROWS_MAX, EmbeddingMemory, parts_of, sum_rows
from fastrt.errors import ObjectStoreFullError
from fastrt.ps.push_clock import Array, Pace, Pending
from fastrt.ps.spec import Spec

_NORESERVE = 0x4000  # MAP_NORESERVE, which the mmap module defines from Python 3.11 on
_HUGE_FROM = 32 << 20
_VALUES_MAX = 1 << 34
_ROWS_DEFAULT_MAX = 1 << 27
_NOTE = np.dtype([("key", "<u8"), ("seq", "<u4"), ("used", "<u4")])
# Large tables evict slightly more rows than needed at once: finding the least recently used ones reads all notes.
_AHEAD_FROM, _AHEAD_SHARE = 4096, 64


class RowsGradient:
    """A pushed gradient of some rows that waits for those of other workers."""

    def __init__(self, keys: Array, grads: Array) -> None:
        self.keys = keys
        self.grads = grads

    def joined(self, older: RowsGradient, mask: Array) -> RowsGradient:
        """Combine this one's rows of the parts in the mask with the older one's rows of the other parts."""
        mine, theirs = self.of(mask), older.of(~mask)
        return RowsGradient(np.concatenate([mine.keys, theirs.keys]), np.concatenate([mine.grads, theirs.grads]))

    def of(self, parts: Array) -> RowsGradient:
        """The rows of the parts in a mask."""
        chosen = parts[part_numbers(self.keys)]
        return self if chosen.all() else RowsGradient(self.keys[chosen], self.grads[chosen])


def part_numbers(keys: Array) -> Array:
    """The part that each key (uint64) belongs to."""
    parts = np.empty(len(keys), np.uint8)
    parts_of(keys, parts)
    return parts


def summed(keys: Array, grads: Array) -> tuple[Array, Array]:
    """Add up rows with the same key, in order."""
    out_keys, out_grads = np.empty_like(keys), np.empty_like(grads)
    count = sum_rows(keys, grads, out_keys, out_grads)
    return out_keys[:count], out_grads[:count]


class EmbeddingShard:
    """One server's part of one embedding. Not thread-safe; readers need no lock.

    Args:
        spec: definition of the embedding.
        parts: parts that this server has.

    Attributes:
        memory: the rows in shared memory.
        pace: which pushes have been received.
        changed: mask of the rows that are not in the last checkpoint.
        removed: keys that were evicted since the last checkpoint.
    """

    def __init__(self, spec: Spec, parts: Sequence[int]) -> None:
        self.spec = spec
        self.parts = sorted(parts)
        self.pace = Pace(spec.mode, spec.workers, spec.parts, self.parts)
        self.memory = EmbeddingMemory.create(spec.dim, _rows_max(spec), spec.capacity is not None)
        self.values = np.frombuffer(memoryview(self.memory), np.float32).reshape(-1, spec.dim)
        self.states = [_reserve(self.memory.rows_max, spec.dim) for _ in spec.optimizer.states]
        self._live = np.zeros(self.memory.rows_max, bool)
        self.changed = np.zeros(self.memory.rows_max, bool)
        self.removed: set[int] = set()

    @property
    def state_bytes(self) -> int:
        """Size of a snapshot in bytes."""
        return self.memory.count * (8 + 4 * self.spec.dim * (1 + len(self.states)))

    @property
    def capacity(self) -> int:
        """Most rows that this server may have."""
        if self.spec.capacity is None:
            return int(self.memory.rows_max)
        return -(-self.spec.capacity * len(self.parts) // self.spec.parts)

    def body(self, meta: Any, data: Any) -> RowsGradient:
        """Return the gradient in a message's bytes.

        Raises:
            ValueError: its size does not fit its number of keys.
            IndexError: a key is out of range.
        """
        count, nbytes = meta.get("n"), memoryview(data).nbytes
        if not isinstance(count, int) or count < 0 or nbytes != count * (8 + 4 * self.spec.dim):
            raise ValueError(f"{nbytes} bytes do not fit {count!r} keys with rows of {self.spec.dim}")
        keys = np.frombuffer(data, np.uint64, count)
        self.check_keys(keys)
        return RowsGradient(keys, np.frombuffer(data, np.float32, offset=8 * count).reshape(count, self.spec.dim))

    def check_keys(self, keys: Array) -> None:
        """Check that keys are in range.

        Raises:
            IndexError: a key is out of range.
        """
        if self.spec.rows is not None and len(keys) and int(keys.max()) >= self.spec.rows:
            raise IndexError(f"embedding {self.spec.name!r} has keys from 0 to {self.spec.rows - 1}, not {keys.max()}")

    def prepare(self, rank: int, fresh: Array, body: RowsGradient | None) -> Array | None:
        """Choose the keys to evict before a push; they must be in the log before it."""
        if self.spec.capacity is None:
            return None
        combined = self._combined(rank, fresh, body)
        return None if combined is None else self.victims(combined[0])

    def has_room(self) -> bool:
        """Whether a push can be applied: always."""
        return True

    def push(self, rank: int, fresh: Array, lr: float | None, body: RowsGradient | None) -> None:
        """Apply a gradient, or keep it until the gradients of all workers have come; see `DenseShard.push`."""
        if self.pace.mode != "sync":
            if body is not None:
                self._update(*summed(*_pair(body.of(fresh))), lr)
            self.pace.stepped(fresh, body is not None)
            return
        kept = None if body is None else RowsGradient(body.keys.copy(), body.grads.copy())
        self.pace.wait(rank, Pending(lr, kept, fresh.copy()))
        ready = self.pace.ready()
        if ready.any():
            waiting = [self.pace.pending[r] for r in range(self.pace.workers)]
            rates = [one.lr for one in waiting if one.lr is not None]
            bodies = [one.body for one in waiting if one.body is not None]
            if bodies:
                keys, grads = _mean(bodies, ready)
                self._update(keys, grads, rates[0] if rates else None)
            self.pace.stepped(ready, bool(bodies))

    def _combined(self, rank: int, fresh: Array, body: RowsGradient | None) -> tuple[Array, Array] | None:
        """Keys and gradients that a push would update; None if it makes no step."""
        if self.pace.mode != "sync":
            return None if body is None else _pair(body.of(fresh))
        others = [self.pace.pending.get(r) for r in range(self.pace.workers) if r != rank]
        if any(one is None for one in others):
            return None
        bodies = [one.body for one in others if one is not None and one.body is not None]
        bodies += [body] if body is not None else []
        return _mean(bodies, self.pace.owned) if bodies else None

    def _update(self, keys: Array, grads: Array, lr: float | None) -> None:
        rows = self.find_or_make(keys)
        rate = self.spec.optimizer.lr if lr is None else lr
        ages = self.pace.ages[part_numbers(keys)]
        states = [state.reshape(-1) for state in self.states]
        self.memory.begin(rows)
        try:
            for age in np.unique(ages):
                chosen = slice(None) if (ages == age).all() else ages == age
                these = np.ascontiguousarray(grads[chosen])
                self.spec.optimizer.update(self.memory, these, states, int(age) + 1, rate, rows=rows[chosen])
        finally:
            self.memory.end(rows)
        self.changed[rows] = True

    def find_or_make(self, keys: Array) -> Array:
        """Return the rows of distinct keys; missing rows are created.

        Raises:
            ObjectStoreFullError: there is no room for new rows.
        """
        rows = np.empty(len(keys), np.int64)
        if self.memory.find(keys, rows):
            missing = np.flatnonzero(rows < 0)
            assert self.spec.init is not None
            made = np.empty(len(missing), np.int64)
            before = self.memory.rows_used
            self.memory.insert(keys[missing], self.spec.init.rows(keys[missing], self.spec.dim), made)
            self._made(made, before)
            rows[missing] = made
        return rows

    def _made(self, rows: Array, used_before: int) -> None:
        """Initialise new rows. Rows from `used_before` on were never used before, so their state is zero already."""
        self._live[rows] = self.changed[rows] = True
        used = rows[rows < used_before]
        for state, first in zip(self.states, self.spec.optimizer.states, strict=True):
            state[rows if first else used] = first

    def victims(self, keys: Array) -> Array | None:
        """Choose keys to evict so that rows for these keys fit; None if there is room.

        Raises:
            ObjectStoreFullError: these keys alone exceed the capacity.
        """
        distinct = np.unique(keys)
        rows = np.empty(len(distinct), np.int64)
        missing = self.memory.find(distinct, rows)
        over = self.memory.count + missing - self.capacity
        if over <= 0 or not missing:
            return None
        if len(distinct) > self.capacity:
            raise ObjectStoreFullError(
                f"{len(distinct)} keys of embedding {self.spec.name!r} in one call, but this server has room for "
                f"{self.capacity} rows: push fewer at once, or create the embedding with a larger capacity"
            )
        notes = self._notes()
        candidates = np.flatnonzero(self._live[: len(notes)])
        candidates = np.setdiff1d(candidates, rows[rows >= 0], assume_unique=True)
        wanted = over + (self.capacity // _AHEAD_SHARE if self.capacity >= _AHEAD_FROM else 0)
        used = notes["used"][candidates]
        if wanted < len(candidates):
            candidates = candidates[np.argpartition(used, wanted)[:wanted]]
        chosen: Array = notes["key"][candidates].copy()
        return chosen

    def evict(self, keys: Array) -> None:
        """Remove rows; keys without a row are skipped."""
        rows: Array = np.empty(len(keys), np.int64)
        self.memory.find(keys, rows)
        rows = rows[rows >= 0]
        self.removed.update(self._keys_of(rows).tolist())
        self.memory.remove(rows)
        self._live[rows] = self.changed[rows] = False

    def _keys_of(self, rows: Array) -> Array:
        keys = np.empty(len(rows), np.uint64)
        self.memory.keys_of(rows, keys)
        return keys

    def _notes(self) -> Array:
        return np.frombuffer(self.memory.notes_bytes(), _NOTE)

    # ---- migration, snapshots and checkpoints ----

    def dump(self, parts: Sequence[int], changed_only: bool = False) -> dict[str, Array]:
        """The state of some parts as arrays, or only rows changed and keys evicted since the last checkpoint."""
        wanted = np.zeros(self.spec.parts, bool)
        wanted[list(parts)] = True
        rows = np.flatnonzero((self.changed if changed_only else self._live)[: self.memory.rows_used])
        keys = self._keys_of(rows)
        chosen = wanted[part_numbers(keys)]
        rows, keys = rows[chosen], keys[chosen]
        found = {"keys": keys, "param": self.values[rows]}
        found |= {f"state{k}": state[rows] for k, state in enumerate(self.states)}
        if changed_only:
            gone = np.array(sorted(self.removed), np.uint64)
            found["removed"] = gone[wanted[part_numbers(gone)]]
        found |= self.pace.dump(sorted(parts))
        for rank, pending in self.pace.pending.items():
            found[f"mask/{rank}"] = pending.mask[sorted(parts)]
            found[f"rate/{rank}"] = np.array([] if pending.lr is None else [pending.lr])
            if pending.body is not None:
                body = pending.body.of(wanted)
                found[f"keys/{rank}"], found[f"grads/{rank}"] = body.keys, body.grads
        return found

    def load(self, parts: Sequence[int], found: dict[str, Array]) -> None:
        """Take over what `dump` returned for the same parts, or for some rows of them.

        Raises:
            ValueError: the sizes do not fit.
        """
        if "removed" in found:
            self.evict(found["removed"].astype(np.uint64))
        keys, dim = found["keys"], self.spec.dim
        values = found["param"].reshape(len(keys), dim)
        rows = np.empty(len(keys), np.int64)
        self.memory.find(keys, rows)
        missing = np.flatnonzero(rows < 0)
        made = np.empty(len(missing), np.int64)
        self.memory.insert(keys[missing], values[missing], made)
        rows[missing] = made
        self._live[rows] = self.changed[rows] = True
        self.values[rows] = values
        for k, state in enumerate(self.states):
            state[rows] = found[f"state{k}"].reshape(len(keys), dim)
        self.pace.load(sorted(parts), found)
        for name in [name for name in found if name.startswith("mask/")]:
            rank = int(name.partition("/")[2])
            mask = np.zeros(self.spec.parts, bool)
            mask[sorted(parts)] = found[name].astype(bool)
            if not mask.any():
                continue
            rate = found[f"rate/{rank}"]
            body = None
            if f"keys/{rank}" in found:
                waiting = found[f"keys/{rank}"]
                body = RowsGradient(waiting, found[f"grads/{rank}"].reshape(len(waiting), dim))
            self.pace.wait(rank, Pending(float(rate[0]) if len(rate) else None, body, mask))

    def checkpointed(self) -> None:
        """Note that the last checkpoint holds all rows."""
        self.changed[: self.memory.rows_used] = False
        self.removed.clear()

    def admit(self) -> int:
        """Return 0: processes that map the rows need no reader's number."""
        return 0

    def dismiss(self, reader: int) -> None:
        """Do nothing: readers reserve no memory."""


def restricted(found: dict[str, Array], dumped: Sequence[int], wanted: Sequence[int]) -> dict[str, Array]:
    """Reduce a result of `dump` to fewer parts."""
    place = {part: k for k, part in enumerate(sorted(dumped))}
    which = [place[part] for part in sorted(wanted)]
    parts = np.zeros(PARTS, bool)
    parts[list(wanted)] = True
    rows = parts[part_numbers(found["keys"])]
    result = {}
    for name, array in found.items():
        kind, _, rank = name.partition("/")
        if kind in ("steps", "ages", "applied", "clock", "mask"):
            result[name] = array[which]
        elif kind in ("keys", "grads") and rank:
            result[name] = array[parts[part_numbers(found[f"keys/{rank}"])]]
        elif kind == "removed":
            result[name] = array[parts[part_numbers(array)]]
        else:
            result[name] = array if kind == "rate" else array[rows]
    return result


def _pair(body: RowsGradient) -> tuple[Array, Array]:
    return body.keys, body.grads


def _mean(bodies: list[RowsGradient], parts: Array) -> tuple[Array, Array]:
    """The mean of gradients, summed in the order of ranks. A row that a gradient lacks counts as zero."""
    chosen = [body.of(parts) for body in bodies]
    keys = np.concatenate([body.keys for body in chosen])
    keys, grads = summed(keys, np.concatenate([body.grads for body in chosen]))
    return keys, grads / np.float32(len(bodies)) if len(bodies) > 1 else grads


def _rows_max(spec: Spec) -> int:
    limits = [limit for limit in (spec.rows, spec.capacity) if limit is not None]
    most = min(limits) if limits else min(_ROWS_DEFAULT_MAX, _VALUES_MAX // spec.dim)
    return min(most, ROWS_MAX - 1)


def _reserve(rows: int, dim: int) -> Array:
    """Zeros that use memory only where they are touched.

    Rows are used in order, so all of a huge page behind the first rows gets used. With huge pages the kernel handles
    one fault for 2 MiB instead of one for each page.
    """
    memory = mmap.mmap(-1, 4 * rows * dim, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if len(memory) > _HUGE_FROM:
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_FROM)
    return np.frombuffer(memory, np.float32).reshape(rows, dim)
