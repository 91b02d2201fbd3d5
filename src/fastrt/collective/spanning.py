"""A group over several nodes: shared memory within each node, and a ring of the nodes' leaders.

Every operation has three parts: the ranks of a node combine their data (`SharedGroup`), the leaders exchange the
results (`Ring`), and each leader distributes the outcome to its node, first of all whether there is one. So all ranks
learn of any failure. all_reduce, broadcast and all_gather work this way; the other operations are made from these.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastrt._core.collective.collective import OPS
from fastrt._core.collective.reduce import reduce_buffers
from fastrt._core.memory.segment import start_time
from fastrt.collective import typed
from fastrt.collective.access import Access
from fastrt.collective.buffers import Bits, new_like, raw_bytes, shape_of
from fastrt.collective.frames import has_ended
from fastrt.collective.group import Group, plain_wish
from fastrt.collective.handles import Handle
from fastrt.collective.peers import Peers
from fastrt.collective.ring import Ring, pack_error, unpack_error
from fastrt.collective.shared import SharedGroup
from fastrt.collective.tcp_rendezvous import Assembled, Place, Watch, assemble
from fastrt.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    FastrtError,
    PeerDied,
    StaleReferenceError,
)
from fastrt.net.background import Line

_FAILURES = (CollectiveTimeout, CollectiveMismatch, PeerDied)
_GRACE_S = 5.0  # added to the wait for the leader, whose own timeout comes first


class SpanningGroup(Group):
    """A group over several nodes. Made by `init_group(address=...)`; ranks that share memory are one node.

    Args:
        address: the coordinator's address.
        name: the group's name for users.
        rank: this process's number.
        timeout: default time limit of operations in seconds.
        node: the node that this process names as its own.
        assembled: addresses of all ranks, and the group's secret.
    """

    def __init__(self, address: str, name: str, rank: int, timeout: float, node: str, assembled: Assembled) -> None:
        self.name = name
        self.timeout = timeout
        self.queued = 0
        self._address = address
        self._node = node
        self._rank = rank
        self._places = assembled.places
        self._access = assembled.access
        self._id = assembled.group_id
        self._seq = 0
        self._splits = 0
        self._closed = False
        self._line = Line(f"fastrt-{name}", Handle, self._set_queued)
        nodes: dict[str, list[int]] = {}
        for place in assembled.places:
            nodes.setdefault(place.node, []).append(place.rank)
        self._nodes = list(nodes.values())
        self._index = list(nodes).index(node)
        mine = self._nodes[self._index]
        deadline = time.monotonic() + timeout
        here = mine.index(rank), len(mine)
        watch = partial(_refuse_ended, [assembled.places[q] for q in mine])
        self._ring: Ring | None = None
        with contextlib.ExitStack() as made:  # undone if a rank does not come
            self._peers = Peers(assembled, rank, [q for q in range(len(assembled.places)) if q not in mine], name)
            made.callback(self._peers.close)
            self._local = SharedGroup.join(f"{assembled.group_id}/{node}", *here, timeout, name, watch=watch)
            made.callback(self._local.destroy)
            self._local.labels = mine
            if self._local.rank == 0 and len(self._nodes) > 1:
                self._ring = self._make_ring(deadline)
            made.pop_all()

    @classmethod
    def join(
        cls,
        address: str,
        name: str,
        rank: int,
        world_size: int,
        timeout: float,
        node: str,
        access: Access,
        shown: str,
        wish: str = "",
        watch: Watch | None = None,
    ) -> SpanningGroup:
        """Meet the other ranks at a coordinator, and make the group.

        Args:
            address: the coordinator's address.
            name: the name to meet under.
            rank, world_size: this process's number, and the number of ranks.
            timeout: for the meeting, and the default of later operations; seconds.
            node: processes with the same value share memory.
            access: the group's secret.
            shown: the group's name for users.
            wish: must be the same on all ranks.
            watch: see `assemble`.
        Returns:
            The group.
        """
        assembled = assemble(address, name, rank, world_size, timeout, node, access, wish, watch)
        return cls(address, shown, rank, timeout, node, assembled)

    def _make_ring(self, deadline: float) -> Ring:
        count = len(self._nodes)
        leaders = [ranks[0] for ranks in self._nodes]
        behind = self._peers.connect(leaders[(self._index + 1) % count], "ring", deadline)
        try:
            before = self._peers.accept(leaders[(self._index - 1) % count], "ring", deadline)
        except BaseException:
            behind.close()
            raise
        return Ring(self._index, count, before, behind, leaders)

    def __repr__(self) -> str:
        return f"<group {self.name!r}: rank {self.rank} of {self.world_size} on {len(self._nodes)} nodes>"

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._places)

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node; the first of each is its leader."""
        return [list(ranks) for ranks in self._nodes]

    def _set_queued(self, count: int) -> None:
        self.queued = count

    # ---- operations ----

    @typed.waits
    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until all ranks have called this; see `Group`."""
        return self._do("barrier", None, None, 0, "sum", timeout, async_op)

    @typed.combines
    def all_reduce(
        self, array: Any, op: str = "sum", out: Any = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine the arrays of all ranks: first within each node in the order of ranks, then the nodes' in ring order.

        The result has the same bits on all ranks, and in all runs with the same placement. See `SharedGroup`.
        """
        return self._do("all_reduce", array, array if out is None else out, 0, op, timeout, async_op)

    @typed.combines_shared
    def all_reduce_shared(
        self, array: Any, op: str = "sum", *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine like `all_reduce` into a new read-only array; each rank gets its own copy."""
        if async_op or self.queued:
            return self.later(async_op, self._all_reduce_shared, array, op, timeout)
        return self._all_reduce_shared(array, op, timeout)

    def _all_reduce_shared(self, array: Any, op: str, timeout: float | None) -> Any:
        out = new_like(array, shape_of(array))
        self.perform("all_reduce", array, out, 0, op, timeout)
        (out.array if isinstance(out, Bits) else out).flags.writeable = False
        return out

    def empty(self, shape: int | Iterable[int], dtype: npt.DTypeLike = np.float32) -> np.ndarray[Any, Any]:
        """An uninitialised array in the shared memory of this node's ranks; see `SharedGroup.empty`."""
        return self._local.empty(shape, dtype)

    def later(self, async_op: bool, function: Any, *args: Any) -> Any:
        """Queue an operation for the background thread."""
        handle = self._line.submit(function, *args)
        return handle if async_op else handle.wait()

    def perform(self, kind: str, source: Any, target: Any, root: int, op: str, timeout: float | None) -> Any:
        """Run one operation now.

        Raises:
            ValueError: the root or the operation does not exist, or sizes do not match.
            StaleReferenceError: the group is destroyed.
        """
        if op not in OPS:
            raise ValueError(f"op is {op!r}; it must be one of {', '.join(OPS)}")
        if not 0 <= root < self.world_size:
            raise ValueError(f"there is no rank {root} in a group of {self.world_size}")
        if self._closed:
            raise StaleReferenceError("the group is destroyed")
        self._seq += 1
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        what = "perform_" + kind
        getattr(self, what)(source, target, root, op, deadline)
        return target

    def perform_barrier(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """Barrier within the node, then between the nodes."""
        self._inside("barrier", None, None, 0, op, deadline)
        self._across("barrier", deadline, None)

    def perform_all_reduce(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """Reduce within the node, all-reduce in the ring, broadcast to the node."""
        data, dtype = raw_bytes(target, True)
        inner = "sum" if op == "avg" else op
        self._inside("reduce", source, target if self._local.rank == 0 else None, 0, inner, deadline)

        def exchange(ring: Ring) -> None:
            ring.all_reduce(self._seq, data, dtype, inner, deadline)

        self._across(f"all_reduce of {data.size} bytes of {dtype}, {op}", deadline, exchange)
        if op == "avg" and self._local.rank == 0:
            reduce_buffers("sum", dtype, data, [data], self.world_size)
        self._from_leader(data, deadline)

    def perform_broadcast(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """Broadcast within the root's node, in the ring, and within the other nodes."""
        data, dtype = raw_bytes(source if target is None else target, target is not None)
        node = next(k for k, ranks in enumerate(self._nodes) if root in ranks)
        if node == self._index:
            inner = self._nodes[node].index(root)
            gives = self._rank == root
            self._inside("broadcast", data if gives else None, None if gives else data, inner, op, deadline)
        else:
            self._inside("barrier", None, None, 0, op, deadline)

        def exchange(ring: Ring) -> None:
            ring.broadcast(self._seq, data, node, deadline)

        self._across(f"broadcast of {data.size} bytes of {dtype}, root {root}", deadline, exchange)
        if node != self._index:
            self._from_leader(data, deadline)

    def perform_all_gather(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """Gather at the leader, all-gather in the ring, broadcast to the node.

        Raises:
            ValueError: the output has another size.
        """
        data, dtype = raw_bytes(source, False)
        out, _ = raw_bytes(target, True)
        if out.size != data.size * self.world_size:
            raise ValueError(f"the output has {out.size} bytes; there must be {data.size * self.world_size}")
        parts = [np.empty(len(ranks) * data.size, np.uint8) for ranks in self._nodes] if self._local.rank == 0 else []
        self._inside("gather", data, parts[self._index] if parts else None, 0, op, deadline)

        def exchange(ring: Ring) -> None:
            ring.all_gather(self._seq, parts, deadline)

        self._across(f"all_gather of {data.size} bytes of {dtype}", deadline, exchange)
        rows = out.reshape(self.world_size, data.size)
        for ranks, part in zip(self._nodes, parts, strict=False):
            rows[ranks] = part.reshape(len(ranks), data.size)
        self._from_leader(out, deadline)

    def perform_reduce(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """all_reduce; only the root keeps the result."""
        whole = new_like(source, shape_of(source)) if target is None else target
        self.perform_all_reduce(source, whole, root, op, deadline)

    def perform_reduce_scatter(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """all_reduce; each rank keeps its part."""
        whole = new_like(source, shape_of(source))
        self.perform_all_reduce(source, whole, root, op, deadline)
        self._keep(whole, target)

    def perform_gather(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """all_gather; only the root keeps the result."""
        data, _ = raw_bytes(source, False)
        out = np.empty(data.size * self.world_size, np.uint8) if target is None else target
        self.perform_all_gather(source, out, root, op, deadline)

    def perform_scatter(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """broadcast; each rank keeps its part."""
        part, _ = raw_bytes(target, True)
        gives = self._rank == root
        whole = raw_bytes(source, False)[0] if gives else np.empty(part.size * self.world_size, np.uint8)
        self.perform_broadcast(whole if gives else None, None if gives else whole, root, op, deadline)
        self._keep(whole, target)

    def perform_all_to_all(self, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """all_gather; each rank keeps its column."""
        data, _ = raw_bytes(source, False)
        every = np.empty((self.world_size, self.world_size, data.size // self.world_size), np.uint8)
        self.perform_all_gather(source, every, root, op, deadline)
        out, _ = raw_bytes(target, True)
        out.reshape(self.world_size, -1)[:] = every[:, self._rank]

    def _keep(self, whole: Any, target: Any) -> None:
        part, _ = raw_bytes(target, True)
        data, _ = raw_bytes(whole, False)
        if data.size != part.size * self.world_size:
            raise ValueError(f"the output has {part.size} bytes; there must be {data.size // self.world_size}")
        part[:] = data.reshape(self.world_size, -1)[self._rank]

    # ---- the parts of an operation ----

    def _inside(self, kind: str, source: Any, target: Any, root: int, op: str, deadline: float) -> None:
        """Run one operation of this node's ranks; if it fails, send the reason to the other nodes."""
        try:
            self._local.perform(kind, source, target, root, op, max(deadline - time.monotonic(), 0.01))
        except _FAILURES as failure:
            error = self._in_our_words(failure)
            if self._ring is not None:
                try:
                    self._ring.agree(self._seq, kind, error, time.monotonic() + 1.0)
                except FastrtError:
                    pass  # this node's error takes precedence
            raise error from None

    def _across(self, what: str, deadline: float, exchange: Callable[[Ring], None] | None) -> None:
        """Run the leaders' part; every rank of the node learns whether it succeeded."""
        error: FastrtError | None = None
        if self._ring is not None:
            try:
                self._ring.agree(self._seq, what, None, deadline)
                if exchange is not None:
                    error = self._exchange(self._ring, exchange)
            except _FAILURES as failure:
                error = failure
        word = np.array([error is not None], np.uint8)
        self._from_leader(word, deadline)
        if word[0]:
            try:
                shared = unpack_error(self._local.broadcast_plain(pack_error(error), 0, _GRACE_S))
            except _FAILURES as failure:
                shared = self._in_our_words(failure)
            raise shared

    def _exchange(self, ring: Ring, exchange: Callable[[Ring], None]) -> FastrtError | None:
        try:
            exchange(ring)
        except _FAILURES as failure:
            if not isinstance(failure, CollectiveTimeout) or not ring.settle():
                ring.fail(failure)
            return failure
        return None

    def _from_leader(self, data: Any, deadline: float) -> None:
        gives = self._local.rank == 0
        left = max(deadline - time.monotonic(), 0.0) + _GRACE_S
        try:
            self._local.perform("broadcast", data if gives else None, None if gives else data, 0, "sum", left)
        except _FAILURES as failure:
            error = self._in_our_words(failure)
            if self._ring is not None and isinstance(error, PeerDied):
                self._ring.fail(error)
            raise error from None

    def _in_our_words(self, error: FastrtError) -> FastrtError:
        """Convert an error of the node's group: its rank becomes the rank in this group."""
        if isinstance(error, PeerDied):
            return PeerDied(str(error), self._nodes[self._index][error.rank])
        return error

    # ---- between two ranks, derived groups, and the end ----

    @typed.sends
    def send(self, array: Any, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send an array's bytes to one rank; see `SharedGroup.send`."""
        mine = self._nodes[self._index]
        if dst in mine:
            return self._local.send(array, mine.index(dst), tag, timeout=timeout, async_op=async_op)
        patience = self.timeout if timeout is None else timeout
        return self._peers.run(async_op, "send", raw_bytes(array, False)[0], dst, tag, patience, None)

    @typed.receives
    def recv(self, array: Any, src: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Receive the next message of a tag from one rank; see `SharedGroup.recv`."""
        mine = self._nodes[self._index]
        if src in mine:
            return self._local.recv(array, mine.index(src), tag, timeout=timeout, async_op=async_op)
        patience = self.timeout if timeout is None else timeout
        return self._peers.run(async_op, "recv", raw_bytes(array, True)[0], src, tag, patience, array)

    def split(self, color: int | str | None, key: int = 0, *, timeout: float | None = None) -> SpanningGroup | None:
        """Make smaller groups; see `SharedGroup.split`."""
        patience = self.timeout if timeout is None else timeout
        self._splits += 1
        wishes = self.gather_plain(plain_wish(color, key), patience)
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(wishes) if c == color)
        name = f"{self._id}/split/{self._splits}/{color}"
        place = members.index((key, self.rank)), len(members)
        watch = partial(self._refuse_gone, [rank for _, rank in members])
        shown = f"{self.name}/{color}"
        return SpanningGroup.join(self._address, name, *place, patience, self._node, self._access, shown, watch=watch)

    def _refuse_gone(self, members: list[int], missing: Collection[int]) -> None:
        """Raise if a missing member of a derived group cannot come. `members`: their ranks here; see `assemble`."""
        mine = self._nodes[self._index]
        for rank in [members[k] for k in missing]:
            if rank in mine:
                try:
                    self._local.refuse_gone([mine.index(rank)])
                except PeerDied as error:
                    raise self._in_our_words(error) from None
            elif has_ended((self._places[rank].host, self._places[rank].port)):
                raise PeerDied(f"rank {rank} ended while a group was made of this one", rank)

    def rebuild(self, alive: Iterable[int], *, timeout: float | None = None) -> SpanningGroup:
        """Make a group of the remaining ranks, in the same order; see `SharedGroup.rebuild`.

        Args:
            alive: their ranks in this group. Must be the same on all of them.
            timeout: seconds to wait for them; also the default of the new group's operations.
        Returns:
            The new group.
        Raises:
            ValueError: this rank is not among them.
        """
        ranks = sorted(alive)
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among the remaining ranks {ranks}")
        patience = self.timeout if timeout is None else timeout
        self.destroy()
        place = ranks.index(self.rank), len(ranks)
        return SpanningGroup.join(
            self._address, f"{self._id}/rebuild", *place, patience, self._node, self._access, self.name, str(ranks)
        )

    def destroy(self) -> None:
        """Leave the group; see `Group.destroy`."""
        if not self._closed:
            self._closed = True
            self._line.close()
            if self._ring is not None:
                self._ring.close()
            self._peers.close()
            self._local.destroy()


def _refuse_ended(places: Sequence[Place]) -> None:
    """Raise if the process of a rank of this machine has ended; see `meet`."""
    for place in places:
        if not start_time(place.pid):
            raise PeerDied(f"rank {place.rank} (process {place.pid}) ended while the group was made", place.rank)
