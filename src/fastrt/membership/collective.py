"""Collective operations of a cluster's members over the cluster's protocol, also with members that are not fastrt's.

all_reduce uses the original's algorithm. With at least as many elements as members it is a ring: in n - 1 steps each
member adds its elements to a received chunk, and in n - 1 more steps the finished chunks go round. With fewer elements
all members send to the first one, which sends the result back. Chunks are as equal as possible, the first ones longer.
So members of the original can take part. Between fastrt's members every message names its operation, and a late one
does not disturb another operation.

For arrays on one machine `fastrt.collective` is far faster; use this for members that speak only the cluster's
protocol.

Source: `fl/server/collective_ops_impl.cc` of MindSpore 1.5.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np

from fastrt._core.collective.reduce import DTYPES, REDUCTIONS, reduce_buffers
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, FastrtError, PeerDied
from fastrt.membership.mailbox import Tag
from fastrt.membership.messages import MemberLostError, Messages
from fastrt.membership.options import ClusterTimeoutError
from fastrt.membership.peers import MemberUnreachableError

Bytes = np.ndarray[Any, Any]
_NAME_BYTES_MAX = 200


class MemberGroup:
    """Members of one role that compute together. All of them call the same operations in the same order.

    Args:
        member: this process's member; it must be ready, see `ClusterMember.wait_ready`.
        name: the same on all members; a member may be in several groups of different names.
        ranks: the members by their ranks in the cluster; default: all of the member's role.
        timeout_s: default time limit of an operation; default: the member's `call_timeout_s`.

    Raises:
        FastrtError: the cluster has not been ready yet.
        ValueError: this member is not in `ranks`, a rank is in it twice, or the name is too long or empty.
    """

    def __init__(
        self, member: Any, name: str = "default", ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> None:
        own: int | None = member.rank
        if own is None:
            raise FastrtError("The member has no rank: wait_ready first.")
        all_ranks = sorted(view.rank for view in member.members if view.role is member.role)
        self.ranks = all_ranks if ranks is None else list(ranks)
        if own not in self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(
                f"{member.role.name.lower()} {own} cannot make a group of {self.ranks}: the ranks must be "
                f"different and contain {own}"
            )
        if not 1 <= len(name.encode()) <= _NAME_BYTES_MAX:
            raise ValueError(
                f"the name of a group must have 1 to {_NAME_BYTES_MAX} bytes; {name[:50]!r} has {len(name.encode())}"
            )
        self.name = name
        self.rank = self.ranks.index(own)
        self.timeout_s: float = member.options.call_timeout_s if timeout_s is None else timeout_s
        self._member: Messages = member
        self._members = self._member.ends_of(self.ranks)
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    def __enter__(self) -> MemberGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Number of members of the group."""
        return len(self.ranks)

    def all_reduce(self, array: Bytes, op: str = "sum", timeout_s: float | None = None) -> Bytes:
        """Combine the arrays of all members, in place.

        Args:
            array: C-contiguous and writable, of the same type and size on all members.
            op: sum, prod, min, max, avg, band, bor. Members of the original only sum.
            timeout_s: for the whole operation.
        Returns:
            `array`, with the same bits on all members.
        Raises:
            CollectiveTimeout: a member did not come in time, or gave the operation up.
            CollectiveMismatch: a member runs another operation.
            PeerDied: a member is lost; the exception's rank is its rank in the group.
            ValueError, TypeError: the array or the operation cannot be used.
        """
        data, dtype = _bytes_of(array)
        if dtype not in DTYPES or (op not in REDUCTIONS and op != "avg"):
            raise ValueError(
                f"cannot use {op!r} on {dtype}: the operations are {', '.join(REDUCTIONS)} and avg, on "
                f"{', '.join(DTYPES)}"
            )
        inner = "sum" if op == "avg" else op
        with _Operation(self, f"all_reduce of {array.size} {dtype}, {op}", timeout_s) as run:
            if array.size >= self.world_size:
                self._ring(run, data, dtype, inner, array.size)
            else:
                self._through_first(run, data, dtype, inner)
        if op == "avg":
            reduce_buffers("sum", dtype, data, [data], self.world_size)
        return array

    def broadcast(self, array: Bytes, src: int = 0, timeout_s: float | None = None) -> Bytes:
        """Copy one member's array to all members: `array` is read on `src` and written on the others.

        Raises:
            CollectiveTimeout, CollectiveMismatch, PeerDied: see `all_reduce`.
            ValueError: there is no such rank, or the array cannot be used.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(f"there is no rank {src} in a group of {self.world_size}")
        data, dtype = _bytes_of(array)
        with _Operation(self, f"broadcast of {array.size} {dtype}, root {src}", timeout_s) as run:
            if self.rank == src:
                for rank in range(self.world_size):
                    run.send(rank, data, 0)
            else:
                data[:] = run.receive(src, data.size, 0)
        return array

    def all_gather(self, array: Bytes, timeout_s: float | None = None) -> Bytes:
        """Collect the arrays of all members on every member.

        Returns:
            A new array of shape `(world_size, *array.shape)`.
        Raises:
            CollectiveTimeout, CollectiveMismatch, PeerDied: see `all_reduce`.
            ValueError: the array cannot be used.
        """
        own = np.ascontiguousarray(array)
        out = np.empty((self.world_size, *own.shape), own.dtype)
        out[self.rank] = own
        parts, _ = _bytes_of(out)
        parts = parts.reshape(self.world_size, own.nbytes)
        with _Operation(self, f"all_gather of {own.size} {own.dtype.name}", timeout_s) as run:
            for step in range(self.world_size - 1):
                run.send(self.rank + 1, parts[(self.rank - step) % self.world_size], step)
                parts[(self.rank - step - 1) % self.world_size] = run.receive(self.rank - 1, own.nbytes, step)
        return out

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all members: an all_reduce of one number.

        Raises:
            CollectiveTimeout, CollectiveMismatch, PeerDied: see `all_reduce`.
        """
        self.all_reduce(np.zeros(1, np.float32), timeout_s=timeout_s)

    def close(self) -> None:
        """End the group on this member; messages that others still send to it are dropped."""
        self._closed = True
        self._member.forget_group(self.name)

    def _ring(self, run: _Operation, data: Bytes, dtype: str, op: str, count: int) -> None:
        size, item = self.world_size, data.size // count
        base, longer = divmod(count, size)
        cuts = [(base * k + min(k, longer)) * item for k in range(size + 1)]
        chunks = [data[cuts[k] : cuts[k + 1]] for k in range(size)]
        for step in range(size - 1):
            mine = chunks[(self.rank - step - 1) % size]
            run.send(self.rank + 1, chunks[(self.rank - step) % size], step)
            reduce_buffers(op, dtype, mine, [run.receive(self.rank - 1, mine.size, step), mine])
        for step in range(size - 1):
            run.send(self.rank + 1, chunks[(self.rank - step + 1) % size], size - 1 + step)
            mine = chunks[(self.rank - step) % size]
            mine[:] = run.receive(self.rank - 1, mine.size, size - 1 + step)

    def _through_first(self, run: _Operation, data: Bytes, dtype: str, op: str) -> None:
        if self.rank != 0:
            run.send(0, data, 0)
            data[:] = run.receive(0, data.size, 1)
            return
        for rank in range(1, self.world_size):
            reduce_buffers(op, dtype, data, [data, run.receive(rank, data.size, 0)])
        for rank in range(1, self.world_size):
            run.send(rank, data, 1)


class _Operation:
    """One operation of a group: its number, its deadline, and the sends that it has begun."""

    def __init__(self, group: MemberGroup, what: str, timeout_s: float | None) -> None:
        self._group = group
        self._what = f"{what}, among {group.world_size}"
        self._deadline = time.monotonic() + (group.timeout_s if timeout_s is None else timeout_s)
        self._sent: list[tuple[int, Future[None]]] = []

    def __enter__(self) -> _Operation:
        group = self._group
        if group._closed:
            raise FastrtError(f"group {group.name!r} is closed.")
        if not group._lock.acquire(blocking=False):
            raise FastrtError(f"group {group.name!r} is in an operation of another thread; use one group per thread.")
        group._count += 1
        self._number = group._count
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # on an error the sends continue: they let the other members notice the mismatch
                for rank, sent in self._sent:
                    self._finish(rank, sent)
        finally:
            self._group._lock.release()

    def send(self, rank: int, data: Bytes, step: int) -> None:
        """Begin to send a copy of the data, because the array may change before the bytes are written."""
        rank %= self._group.world_size
        if rank == self._group.rank:
            return
        tag = Tag(self._group.name, self._number, step, self._what)
        member = self._group._member
        self._sent.append((rank, member.start_step(member.role, self._group.ranks[rank], data.tobytes(), tag)))

    def receive(self, rank: int, size: int, step: int) -> Bytes:
        """Receive the bytes of a step, which must have this size."""
        group = self._group
        rank %= group.world_size
        tag = Tag(group.name, self._number, step, self._what)
        left = max(self._deadline - time.monotonic(), 0.0)
        try:
            came = group._member.take_step(group.ranks[rank], tag, left, group._members)
        except ClusterTimeoutError as error:
            raise CollectiveTimeout(f"{self._where(rank)} did not come in time: {error}") from None
        except MemberLostError as error:
            lost = group.ranks.index(error.rank)
            raise PeerDied(f"{self._where(lost)} has left the cluster", lost) from None
        if len(came) != size:
            raise CollectiveMismatch(f"{self._where(rank)} sent {len(came)} bytes, {size} were expected")
        return np.frombuffer(came, np.uint8)

    def _finish(self, rank: int, sent: Future[None]) -> None:
        try:
            sent.result(max(self._deadline - time.monotonic(), 0.0))
        except FutureTimeoutError:
            raise CollectiveTimeout(f"{self._where(rank)} has not received its part in time") from None
        except MemberUnreachableError as error:
            raise PeerDied(f"{self._where(rank)} is gone: {error}", rank) from None

    def _where(self, rank: int) -> str:
        return f"group {self._group.name!r}, operation {self._number} ({self._what}): rank {rank}"


def _bytes_of(array: Bytes) -> tuple[Bytes, str]:
    """Return an array's memory as bytes, without a copy, and the name of its type.

    Raises:
        TypeError: not an array, or an array of Python objects.
        ValueError: not contiguous, or read-only.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise TypeError(f"the operation needs an array of numbers, not {type(array).__name__}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("the array is not C-contiguous, or it is read-only")
    return array.reshape(-1).view(np.uint8), array.dtype.name
