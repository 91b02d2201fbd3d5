"""The interface of all groups, and the operations that are made from a few others.

A subclass implements `perform` (one operation, now), `later` (one in the background), and the members named below.
"""

from __future__ import annotations

import json
import operator
import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastrt.collective import typed
from fastrt.collective.buffers import new_like, shape_of
from fastrt.collective.handles import Handle
from fastrt.foreign_text import read_json

if TYPE_CHECKING:
    from fastrt.collective.typed import Array

_A = TypeVar("_A", bound="Array")
_G = TypeVar("_G", bound="Group")
_V = TypeVar("_V")
_SIZE = np.dtype(np.int64)
_PLAIN_BYTES_MAX = 1 << 20  # for fastrt's internal data


class Group:
    """Processes that work on arrays together, each with a rank. Made by `init_group`.

    All ranks call the same operations in the same order. Each takes `timeout` (seconds; default: the group's) and
    `async_op=True`, which returns a `Handle` at once, and raises:

    - `CollectiveTimeout` when other ranks do not come in time,
    - `CollectiveMismatch` when they call another operation, which the message describes,
    - `PeerDied` when a rank's process has ended; see `rebuild`.

    Arrays are NumPy arrays, or any contiguous CPU buffer that offers the buffer protocol or DLPack.
    """

    name: str
    queued: int

    @property
    def rank(self) -> int:
        """This process's number, from 0.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of ranks.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def perform(self, kind: str, source: Any, target: Any, root: int, op: str, timeout: float | None) -> Any:
        """Run one operation now; see `fastrt._core.collective.collective`.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def later(self, async_op: bool, function: Any, *args: Any) -> Any:
        """Run one operation after those in the background: return its handle if `async_op`, else its result.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def destroy(self) -> None:
        """Leave the group. Ranks that wait for this one raise `PeerDied`. Arrays of `empty` stay valid in this process.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def __enter__(self: _G) -> _G:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def _do(
        self, kind: str, source: Any, target: Any, root: int, op: str, timeout: float | None, async_op: bool
    ) -> Any:
        if async_op or self.queued:
            return self.later(async_op, self.perform, kind, source, target, root, op, timeout)
        return self.perform(kind, source, target, root, op, timeout)

    def _shared_out(self, array: Any) -> tuple[int, ...]:
        """The shape of one rank's part of an array."""
        shape = shape_of(array)
        if not shape or shape[0] % self.world_size:
            raise ValueError(f"an array of shape {shape} cannot be divided equally among {self.world_size} ranks")
        return shape[0] // self.world_size, *shape[1:]

    # ---- operations on arrays ----

    @typed.waits
    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until all ranks have called this.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    @typed.combines
    def all_reduce(
        self, array: Any, op: str = "sum", out: Any = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine the arrays of all ranks; every rank gets the result.

        Args:
            array: of the same type and size on all ranks; holds the result, unless `out` is given.
            op: sum, prod, min, max, avg, band, bor.
            out: an array for the result; default: `array`.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            The array with the result.
        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    @typed.combines_shared
    def all_reduce_shared(
        self, array: Any, op: str = "sum", *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine like `all_reduce` into a new read-only array.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def empty(self, shape: int | Iterable[int], dtype: npt.DTypeLike = np.float32) -> np.ndarray[Any, Any]:
        """An uninitialised array in the shared memory of this machine's ranks.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    @typed.combines_on_one
    def reduce(
        self,
        array: Any,
        dst: int = 0,
        op: str = "sum",
        out: Any = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the arrays of all ranks as `all_reduce` does; only rank `dst` gets the result.

        Args:
            array: of the same type and size on all ranks; holds the result on `dst`, unless `out` is given.
            dst: the rank that gets the result.
            op: sum, prod, min, max, avg, band, bor.
            out: on `dst`: an array for the result; default: `array`.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            The array with the result on `dst`, None elsewhere.
        """
        target = None if self.rank != dst else array if out is None else out
        return self._do("reduce", array, target, dst, op, timeout, async_op)

    @typed.divides
    def reduce_scatter(
        self, array: Any, op: str = "sum", out: Any = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine the arrays of all ranks; each rank gets its part of the result.

        Args:
            array: shape (n * world_size, ...), the same on all ranks. Part r goes to rank r.
            op: sum, prod, min, max, avg, band, bor.
            out: an array for this rank's part; default: a new one of shape (n, ...).
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            This rank's part.
        Raises:
            ValueError: the array cannot be divided equally.
        """
        out = new_like(array, self._shared_out(array)) if out is None else out
        return self._do("reduce_scatter", array, out, 0, op, timeout, async_op)

    @typed.collects
    def all_gather(self, array: Any, out: Any = None, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Collect the arrays of all ranks on every rank.

        Args:
            array: of the same type and size on all ranks.
            out: an array for the result; default: a new one of shape `(world_size, *array.shape)`.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            All arrays, in the order of ranks.
        """
        out = new_like(array, (self.world_size, *shape_of(array))) if out is None else out
        return self._do("all_gather", array, out, 0, "sum", timeout, async_op)

    @typed.collects_on_one
    def gather(
        self, array: Any, dst: int = 0, out: Any = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Collect the arrays of all ranks on one rank.

        Returns:
            All arrays on `dst`, None elsewhere.
        """
        if self.rank == dst and out is None:
            out = new_like(array, (self.world_size, *shape_of(array)))
        return self._do("gather", array, out if self.rank == dst else None, dst, "sum", timeout, async_op)

    @typed.copies
    def broadcast(self, array: Any, src: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Copy the array of rank `src` to all ranks.

        Args:
            array: of the same type and size on all ranks; read on `src`, overwritten elsewhere.
            src: the rank whose array is copied.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            `array`.
        """
        if async_op or self.queued:
            return self.later(async_op, self._broadcast, array, src, timeout)
        return self._broadcast(array, src, timeout)

    def _broadcast(self, array: Any, src: int, timeout: float | None) -> Any:
        gives = self.rank == src
        self.perform("broadcast", array if gives else None, None if gives else array, src, "sum", timeout)
        return array

    @typed.scatters
    def scatter(
        self,
        array: Any = None,
        src: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Divide the array of rank `src` among all ranks.

        Args:
            array: on `src`: shape (n * world_size, ...); ignored on other ranks.
            src: the rank whose array is divided.
            out: an array for this rank's part. Required on all ranks except `src`, where the default is a new one.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            This rank's part.
        Raises:
            ValueError: the array cannot be divided equally, or `out` is missing.
        """
        if out is None:
            if self.rank != src:
                raise ValueError("scatter needs out= on every rank except src, because only src knows the shape")
            out = new_like(array, self._shared_out(array))
        return self._do("scatter", array if self.rank == src else None, out, src, "sum", timeout, async_op)

    @typed.collects
    def all_to_all(self, array: Any, out: Any = None, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Exchange parts: each rank gets its part of every rank's array.

        Args:
            array: shape (n * world_size, ...), the same on all ranks. Part r goes to rank r.
            out: an array for the result; default: a new one of the array's shape.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            The parts for this rank, in the order of the ranks that sent them.
        Raises:
            ValueError: the array cannot be divided equally.
        """
        self._shared_out(array)
        out = new_like(array, shape_of(array)) if out is None else out
        return self._do("all_to_all", array, out, 0, "sum", timeout, async_op)

    # ---- derived groups ----

    def split(self, color: int | str | None, key: int = 0, *, timeout: float | None = None) -> Group | None:
        """Make smaller groups of the ranks with the same color.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def rebuild(self, alive: Iterable[int], *, timeout: float | None = None) -> Group:
        """Make a group of the remaining ranks, in the same order.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    # ---- between two ranks ----

    @typed.sends
    def send(self, array: Any, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send an array's bytes to one rank.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    @typed.receives
    def recv(self, array: Any, src: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Receive the next message with a tag from one rank.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def isend(self, array: Array, dst: int, tag: int = 0, *, timeout: float | None = None) -> Handle[None]:
        """Send in the background; the array must not change until the handle is done."""
        return self.send(array, dst, tag, timeout=timeout, async_op=True)

    def irecv(self, array: _A, src: int, tag: int = 0, *, timeout: float | None = None) -> Handle[_A]:
        """Receive in the background; the handle's result is `array`."""
        return self.recv(array, src, tag, timeout=timeout, async_op=True)

    # ---- operations on objects ----

    def gather_plain(self, value: Any, timeout: float | None) -> list[Any]:
        """Collect the values of all ranks on every rank: internal data, sent as JSON."""
        bodies = self._gather_bytes(json.dumps(value).encode(), timeout)
        return [read_json(body, f"rank {rank}'s part", bytes_max=_PLAIN_BYTES_MAX) for rank, body in enumerate(bodies)]

    def broadcast_plain(self, value: Any, src: int, timeout: float | None) -> Any:
        """Copy the value of one rank to all ranks: internal data, sent as JSON."""
        body = self._broadcast_bytes(json.dumps(value).encode() if self.rank == src else b"", src, timeout)
        return value if self.rank == src else read_json(body, f"rank {src}'s value", bytes_max=_PLAIN_BYTES_MAX)

    def _gather_bytes(self, mine: bytes, timeout: float | None) -> list[bytes]:
        body = np.frombuffer(mine, np.uint8)
        sizes = self.all_gather(np.array([body.size], _SIZE), timeout=timeout)[:, 0]
        padded = np.zeros(int(np.max(sizes)), np.uint8)
        padded[: body.size] = body
        bodies = self.all_gather(padded, timeout=timeout)
        return [one[:size].tobytes() for one, size in zip(bodies, sizes, strict=True)]

    def _broadcast_bytes(self, mine: bytes, src: int, timeout: float | None) -> bytes:
        body = np.frombuffer(mine, np.uint8)
        size = self.broadcast(np.array([body.size], _SIZE), src, timeout=timeout)
        if self.rank != src:
            body = np.empty(int(size[0]), np.uint8)
        self.broadcast(body, src, timeout=timeout)
        return mine if self.rank == src else body.tobytes()

    def all_gather_object(self, value: _V, *, timeout: float | None = None) -> list[_V]:
        """Collect the values of all ranks on every rank; they are pickled.

        Returns:
            The values in the order of ranks; this rank's value is a copy too.
        """
        # Pickles of other ranks are trusted: each rank has proved its user or the secret, see `init_group`.
        return [pickle.loads(body) for body in self._gather_bytes(pickle.dumps(value, 5), timeout)]

    def broadcast_object(self, value: Any = None, src: int = 0, *, timeout: float | None = None) -> Any:
        """Copy the value of rank `src` to all ranks; it is pickled.

        Returns:
            A copy of the value; on `src` the value itself.
        """
        body = self._broadcast_bytes(pickle.dumps(value, 5) if self.rank == src else b"", src, timeout)
        return value if self.rank == src else pickle.loads(body)


def plain_wish(color: Any, key: Any) -> list[Any]:
    """Check a rank's arguments of `split`, which are sent to the other ranks as JSON.

    Raises:
        TypeError: the colour is not an integer, a string or None, or the key is not an integer.
    """
    if color is not None and not isinstance(color, str):
        try:
            color = operator.index(color)
        except TypeError:
            raise TypeError(f"color must be an int, a string or None, not {type(color).__name__}") from None
    return [color, operator.index(key)]
