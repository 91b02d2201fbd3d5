"""A group whose ranks are all on one machine: the core runs its operations over memory that the ranks share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastrt._core.collective.channel import Channels
from fastrt._core.collective.collective import Collective
from fastrt._core.collective.groups import GroupMemory
from fastrt.collective import typed
from fastrt.collective.buffers import Bits, as_buffer
from fastrt.collective.group import Group, plain_wish
from fastrt.collective.handles import Handle
from fastrt.collective.local_rendezvous import Met, meet
from fastrt.errors import FastrtError, PeerDied
from fastrt.net.background import Line

_groups: weakref.WeakSet[SharedGroup] = weakref.WeakSet()


class SharedGroup(Collective, Group):
    """A group in shared memory. `barrier` and `all_reduce` come from the core: small ones take a microsecond.

    Args:
        memory: attached as this rank.
        timeout: default time limit of operations in seconds.
        name: the group's name for users.
        group_id: the same on all ranks, and different from other groups'.
    """

    if TYPE_CHECKING:
        barrier: typed.Waits  # type: ignore[assignment]  # the stub of the core says less
        all_reduce: typed.Combines  # type: ignore[assignment]

    def __init__(self, memory: GroupMemory, timeout: float, name: str, group_id: str) -> None:
        self.name = name
        self.timeout = timeout
        self._memory: GroupMemory | None = memory
        self._id = group_id
        self._channels = Channels(memory)
        self._line = Line(f"fastrt-{name}", Handle, self._set_queued)
        self._lines: dict[tuple[str, int], Line] = {}
        self._splits = 0
        self.labels: list[int] | None = None  # numbers of the ranks in a larger group, for messages
        _groups.add(self)

    @classmethod
    def join(
        cls,
        name: str,
        rank: int,
        world_size: int,
        timeout: float,
        shown: str,
        wish: str = "",
        watch: Callable[[], None] | None = None,
    ) -> SharedGroup:
        """Meet the other ranks under a name, and make the group.

        Args:
            name: the name to meet under.
            rank, world_size: this process's number, and the number of ranks.
            timeout: for the meeting, and the default of later operations; seconds.
            shown: the group's name for users.
            wish: must be the same on all ranks.
            watch: see `meet`.
        Returns:
            The group.
        """
        met: Met = meet(name, rank, world_size, timeout, wish, watch)
        return cls(met.memory, timeout, shown, met.group_id)

    def __repr__(self) -> str:
        return f"<group {self.name!r}: rank {self.rank} of {self.world_size}>"

    def __del__(self) -> None:
        if not self.closed and self._memory is not None:
            self._memory.leave()

    def _set_queued(self, count: int) -> None:
        self.queued = count

    def _require(self) -> GroupMemory:
        if self.closed or self._memory is None:
            raise FastrtError("the group is destroyed, or belongs to the parent of this forked process")
        return self._memory

    # ---- callbacks of the core ----

    def as_buffer(self, array: Any, writable: bool) -> tuple[Any, str | None]:
        """Return a buffer over an array, and the name of its type."""
        return as_buffer(array, writable)

    def name_of(self, rank: int) -> str:
        """A rank's name in messages."""
        return f"rank {rank if self.labels is None else self.labels[rank]}"

    def later(self, async_op: bool, function: Any, *args: Any) -> Any:
        """Queue an operation for the background thread."""
        self._require()
        handle = self._line.submit(function, *args)
        return handle if async_op else handle.wait()

    # ---- memory ----

    def empty(self, shape: int | Iterable[int], dtype: npt.DTypeLike = np.float32) -> np.ndarray[Any, Any]:
        """An uninitialised array in the ranks' shared memory: other ranks read it in place, without a copy.

        Args:
            shape: of the array.
            dtype: type of its elements.
        Returns:
            A NumPy array that only this rank uses. Its memory is reused once the array and all its views are gone. It
            stays valid after `destroy`. In a forked child it belongs to the parent.
        Raises:
            ObjectStoreFullError: no shared memory is left.
        """
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        nbytes = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
        memory = self._require()
        if nbytes == 0:
            return np.empty(dims, kind)
        block: Any = memory.allocate(nbytes)  # NumPy's annotations know no such buffer before 2.5
        made: np.ndarray[Any, Any] = np.frombuffer(block, kind).reshape(dims)
        return made

    @typed.combines_shared
    def all_reduce_shared(
        self, array: Any, op: str = "sum", *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combine the arrays of all ranks into one result that all ranks share: saves memory and bandwidth.

        Args:
            array: a NumPy array of the same type and size on all ranks.
            op: sum, prod, min, max, avg, band, bor.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            A read-only array, valid like those of `empty`; its memory is free once all ranks have dropped theirs.
        """
        if async_op or self.queued:
            return self.later(async_op, self._all_reduce_shared, array, op, timeout)
        return self._all_reduce_shared(array, op, timeout)

    def _all_reduce_shared(self, array: Any, op: str, timeout: float | None) -> Any:
        memory = self._require()
        plain = array.array if isinstance(array, Bits) else np.asarray(array)
        block: Any = None  # NumPy's annotations know no such buffer before 2.5
        place = np.zeros(1, np.int64)
        if self.rank == 0:
            block = memory.allocate(max(plain.nbytes, 1), is_result=True)
            place[0] = block.place
        self._broadcast(place, 0, timeout)
        if block is None:
            block = memory.result(int(place[0]), max(plain.nbytes, 1))
        block.open = True
        target: Any = np.frombuffer(block, plain.dtype, plain.size)
        if isinstance(array, Bits):
            target = Bits(target, array.dtype)
        self.perform("all_reduce_shared", array if isinstance(array, Bits) else plain, target, 0, op, timeout)
        del target
        block.open = False
        result = np.frombuffer(block, plain.dtype, plain.size).reshape(plain.shape)
        return Bits(result, array.dtype) if isinstance(array, Bits) else result

    # ---- between two ranks ----

    @typed.sends
    def send(self, array: Any, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send an array's bytes to one rank; returns when they are on their way and the array may change.

        Args:
            array: contiguous.
            dst: the receiving rank.
            tag: names the message for the receiver.
            timeout: longest wait for room, in seconds.
            async_op: return a handle at once.
        """
        return self._message("send", array, dst, tag, timeout, async_op)

    @typed.receives
    def recv(self, array: Any, src: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Receive the next message with a tag from one rank. Messages of one rank and tag arrive in order.

        Args:
            array: contiguous and writable, of the size of the message.
            src: the sending rank.
            tag: the message's tag.
            timeout: seconds.
            async_op: return a handle at once.
        Returns:
            `array`.
        """
        return self._message("recv", array, src, tag, timeout, async_op)

    def _message(self, what: str, array: Any, peer: int, tag: int, timeout: float | None, async_op: bool) -> Any:
        # Each direction to each rank has its own thread, so that two ranks may send to each other, then receive.
        key = (what, peer)
        if async_op:
            self._require()
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = Line(f"fastrt-{self.name}-{what}-{peer}", Handle)
            return line.submit(self._message_now, what, array, peer, tag, timeout)
        if key in self._lines:
            return self._lines[key].submit(self._message_now, what, array, peer, tag, timeout).wait()
        return self._message_now(what, array, peer, tag, timeout)

    def _message_now(self, what: str, array: Any, peer: int, tag: int, timeout: float | None) -> Any:
        buffer = array
        if isinstance(array, (np.ndarray, Bits)) or not hasattr(array, "__buffer__"):
            try:
                memoryview(array).release()
            except (TypeError, ValueError, BufferError):
                buffer, _ = as_buffer(array, what == "recv")
        move = self._channels.send if what == "send" else self._channels.receive
        if not move(buffer, peer, tag, self.timeout if timeout is None else timeout):
            raise self.peer_died()
        return array if what == "recv" else None

    # ---- derived groups, and the end ----

    def split(self, color: int | str | None, key: int = 0, *, timeout: float | None = None) -> SharedGroup | None:
        """Make smaller groups. All ranks call this; those with the same color form a group.

        Args:
            color: names the new group of this rank; None: no group.
            key: ranks of the new group are in order of key, then of rank in this group.
            timeout: seconds; also the default of the new group's operations.
        Returns:
            The new group, or None.
        """
        patience = self.timeout if timeout is None else timeout
        self._splits += 1
        wishes = self.gather_plain(plain_wish(color, key), patience)
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(wishes) if c == color)
        name = f"{self._id}/split/{self._splits}/{color}"
        place = members.index((key, self.rank)), len(members)
        watch = partial(self.refuse_gone, [rank for _, rank in members])
        return SharedGroup.join(name, *place, patience, f"{self.name}/{color}", watch=watch)

    def rebuild(self, alive: Iterable[int] | None = None, *, timeout: float | None = None) -> SharedGroup:
        """Make a group of the remaining ranks, in the same order. All of these call it; this group ends.

        Args:
            alive: their ranks in this group; default: all whose processes live. Must be the same on all of them.
            timeout: seconds to wait for them; also the default of the new group's operations.
        Returns:
            The new group.
        Raises:
            ValueError: this rank is not among them.
            PeerDied: one of them has ended meanwhile; this group is unchanged.
        """
        memory = self._require()
        ranks = sorted(alive) if alive is not None else [q for q in range(self.world_size) if not memory.is_gone(q)]
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among the remaining ranks {ranks}")
        name = f"{self._id}/rebuild"
        patience = self.timeout if timeout is None else timeout
        place = ranks.index(self.rank), len(ranks)
        watch = partial(self.refuse_gone, ranks)
        group = SharedGroup.join(name, *place, patience, self.name, str(ranks), watch)
        self.destroy()
        return group

    def refuse_gone(self, ranks: Iterable[int]) -> None:
        """Raise if a rank that is to join a derived group cannot come; see `meet`.

        Raises:
            PeerDied: one of them has ended, or left this group.
        """
        for rank in ranks:
            if self._require().is_gone(rank):
                raise PeerDied(f"{self.name_of(rank)} ended while a group was made of this one", rank)

    def destroy(self) -> None:
        """Leave the group. Ranks that wait for this one raise `PeerDied`. Arrays of `empty` stay valid here."""
        if self.closed:
            return
        self._line.close()
        for line in self._lines.values():
            line.close()
        self.closed = self._channels.closed = True
        if self._memory is not None:
            self._memory.leave()

    def forget(self) -> None:
        """Disable the group in a forked child: the rank belongs to the parent."""
        self.closed = self._channels.closed = True


def _forget_after_fork() -> None:
    for group in _groups:
        group.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
