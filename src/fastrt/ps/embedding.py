"""A worker's view of an embedding: rows under 64-bit keys, pulled and pushed in batches.

On the servers' machine a pull is a lookup in shared memory by the worker's process. Only keys without a row are
requested from the servers, which create the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from fastrt._core.tables.embedding import EmbeddingMemory, lookup
from fastrt.ps.client import Directory, Opened, Request
from fastrt.ps.handles import Handle, refuse_not_finite
from fastrt.ps.rows import part_numbers, summed
from fastrt.ps.table import Array, Floats, Paced

# Keys of any shape; negative ones are the unsigned numbers with the same bits.
Ids = int | Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.integer[Any]]


class Embedding(Paced):
    """An embedding table; made by `Cluster.embedding`.

    Attributes:
        spec: its definition.
    """

    @property
    def dim(self) -> int:
        """Number of values in a row."""
        return self.spec.dim

    @overload
    def pull(
        self, ids: Ids, *, out: Floats | None = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Floats: ...
    @overload
    def pull(
        self, ids: Ids, *, out: Floats | None = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Floats]: ...
    @overload
    def pull(
        self, ids: Ids, *, out: Floats | None = ..., timeout: float | None = ..., async_op: bool
    ) -> Floats | Handle[Floats]: ...
    def pull(
        self, ids: Ids, *, out: Floats | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Floats | Handle[Floats]:
        """Return the rows of keys, in their order. Missing rows are created; their values depend on the key alone.

        Each row is of one version; see `Table.pull` for the conditions that a pull waits for.

        Args:
            ids: integers of any shape; a negative one means the unsigned number with the same 64 bits.
            out: array to copy into: float32 of the shape `(*ids.shape, dim)`, C-contiguous.
            timeout: seconds; by default the cluster's.
            async_op: return a handle at once.
        Returns:
            `out`, or a new array of that shape.
        Raises:
            TypeError: ids are not integers, or `out` is not float32.
            ValueError: `out` has another shape, or is not contiguous.
            IndexError: the embedding has `rows`, and a key is not from 0 to rows - 1; no row was created.
            TableTimeoutError: other workers or a server did not come in time.
        """
        keys, shape = self._keys(ids), np.shape(ids)
        if out is None:
            out = np.empty((*shape, self.dim), np.float32)
        elif not isinstance(out, np.ndarray) or out.dtype != np.float32:
            raise TypeError(f"embedding {self.name!r}: the array for the result must be a float32 array of NumPy")
        elif out.shape != (*shape, self.dim) or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(
                f"embedding {self.name!r}: the array for the result has shape {out.shape}; it must be "
                f"{(*shape, self.dim)}, C-contiguous and writable"
            )
        done: Floats | Handle[Floats] = self._background.run(async_op, self._pull, keys, out, self._limit(timeout))
        return done

    @overload
    def push(
        self, ids: Ids, grads: Floats, *, lr: float | None = ..., timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...  # fmt: skip
    @overload
    def push(
        self, ids: Ids, grads: Floats, *, lr: float | None = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[None]: ...
    @overload
    def push(
        self, ids: Ids, grads: Floats, *, lr: float | None = ..., timeout: float | None = ..., async_op: bool
    ) -> Handle[None] | None: ...
    def push(
        self, ids: Ids, grads: Floats, *, lr: float | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Handle[None] | None:
        """Send gradients of rows to the servers. Gradients of equal keys are summed first; missing rows are created.

        In synchronous mode the optimizer gets the mean over the workers; a worker that did not push a key counts as
        zero. So every worker must push in each step, with no keys if it has none.

        Args:
            ids: integers of any shape.
            grads: float32 of the shape `(*ids.shape, dim)`.
            lr: learning rate of this push; by default the optimizer's.
            timeout: seconds; by default the cluster's.
            async_op: return a handle at once; do not change the arrays before it is done.
        Returns:
            With `async_op` a `Handle`.
        Raises:
            TypeError: ids are not integers, or the gradients are not float32.
            ValueError: the shapes do not fit.
            IndexError: a key is out of range; nothing was pushed.
            NotFiniteError: there is NaN, and the policy is "raise"; "drop" leaves out the rows that contain NaN.
            ObjectStoreFullError: there are more keys than `capacity`.
            TableTimeoutError: other workers or a server did not come in time; see `Table.push`.
        """
        keys = self._keys(ids)
        if not isinstance(grads, np.ndarray) or grads.dtype != np.float32:
            raise TypeError(f"embedding {self.name!r}: gradients must be a float32 array of NumPy")
        if grads.shape != (*np.shape(ids), self.dim):
            raise ValueError(
                f"embedding {self.name!r}: gradients of shape {grads.shape} for ids of shape {np.shape(ids)}; they "
                f"must have {(*np.shape(ids), self.dim)}"
            )
        rate, flat = self._rate(lr), np.ascontiguousarray(grads).reshape(len(keys), self.dim)
        limit = self._limit(timeout)
        done: Handle[None] | None = self._background.run(async_op, self._push, keys, flat, rate, limit)
        return done

    def _keys(self, ids: Ids) -> Array:
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"embedding {self.name!r}: ids must be integers, not {array.dtype}")
        if self.spec.rows is not None and array.size and not 0 <= int(array.min()) <= int(array.max()) < self.spec.rows:
            raise IndexError(
                f"embedding {self.name!r} has keys from 0 to {self.spec.rows - 1}, not {array.min()} to {array.max()}"
            )
        wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64, copy=False)
        return np.ascontiguousarray(wide).reshape(-1).view(np.uint64)

    def _pull(self, keys: Array, out: Array, timeout: float) -> Array:
        session = self._session
        with session.lock:
            opened = self._may_see(self._open(timeout), timeout)
            missing = np.empty(len(keys), np.int64)
            count = lookup(_memories(opened), bytes(session.directory.tables[self.name][1]), keys, out, missing)
            if count:
                self._ask_for(keys, missing[:count], out.reshape(len(keys), self.dim), timeout)
        return out

    def _ask_for(self, keys: Array, missing: Array, out: Array, timeout: float) -> None:
        """Request the rows that are not in shared memory from their servers, which create missing ones."""
        wanted = keys[missing]
        which: dict[int, Array] = {}

        def plan(directory: Directory) -> dict[int, Request]:
            servers = np.array(directory.tables[self.name][1])[part_numbers(wanted)]
            which.clear()
            which.update({int(index): np.flatnonzero(servers == index) for index in np.unique(servers)})
            return {
                index: Request(
                    {"op": "rows", "table": self.name, "epoch": directory.epoch, "n": len(chosen)}, [wanted[chosen]]
                )
                for index, chosen in which.items()
            }

        for index, (_, data, _) in self._session.exchange(plan, timeout).items():
            out[missing[which[index]]] = np.frombuffer(data, np.float32).reshape(-1, self.dim)

    def _push(self, keys: Array, grads: Array, lr: float | None, timeout: float) -> None:
        session = self._session
        if self.spec.nan == "raise":
            refuse_not_finite(self.name, grads)
        elif self.spec.nan == "drop":
            good = np.isfinite(grads).all(axis=1)
            if not good.all():
                keys, grads = keys[good], grads[good]
        keys, grads = summed(keys, grads)
        with session.lock:
            self._open(timeout)
            rank = session.rank

            def plan(directory: Directory, number: int, empty: bool) -> dict[int, Request]:
                owners = directory.tables[self.name][1]
                servers = np.array(owners)[part_numbers(keys)]
                requests = {}
                for index in sorted(set(owners)):
                    chosen = np.zeros(len(keys), bool) if empty else servers == index
                    pieces = [keys[chosen], grads[chosen]] if not chosen.all() else [keys, grads]
                    meta = {"op": "push", "table": self.name, "epoch": directory.epoch, "rank": rank, "seq": number}
                    meta |= {"lr": lr, "timeout": timeout, "dropped": empty, "n": len(pieces[0])}
                    requests[index] = Request(meta, pieces)
                return requests

            self._give([keys, grads], lambda number, empty: lambda where: plan(where, number, empty), timeout)


def _memories(opened: dict[int, Opened]) -> list[EmbeddingMemory | None]:
    found: list[EmbeddingMemory | None] = [None] * (max(opened) + 1)
    for index, one in opened.items():
        if isinstance(one.memory, EmbeddingMemory):
            found[index] = one.memory
    return found
