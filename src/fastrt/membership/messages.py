"""Bytes from member to member by COLLECTIVE_SEND_DATA: what `ClusterMember` offers for it.

The receiver gives back the whole message as its acknowledgement, also one that does not know fastrt.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from fastrt.errors import FastrtError
from fastrt.membership.events import Role
from fastrt.membership.framing import Kind
from fastrt.membership.loop_thread import LoopThread
from fastrt.membership.mailbox import MESSAGE, Mailbox, Tag
from fastrt.membership.options import ClusterTimeoutError, MemberOptions
from fastrt.membership.peers import Caller, MemberUnreachableError
from fastrt.membership.view import ClusterView
from fastrt.membership.wire import Command


class MemberLostError(FastrtError):
    """A member of a group is lost.

    Attributes:
        rank: its rank in the cluster.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the cluster is lost")
        self.rank = rank


class Messages:
    """The part of a member that is about bytes between members."""

    role: Role
    options: MemberOptions
    _mailbox: Mailbox
    _view: ClusterView
    _loop: LoopThread

    async def _peer(self, role: Role, rank: int) -> Caller:
        raise NotImplementedError

    def _wait(self, work: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        raise NotImplementedError

    def collective_send(self, rank: int, data: bytes, role: Role | None = None, timeout_s: float | None = None) -> None:
        """Send bytes to a member of the same role (or another), and wait until it has them all.

        Raises:
            MemberUnreachableError: it cannot be reached.
            ClusterTimeoutError: it has not given them back in time.
        """
        self._wait(self._give(self.role if role is None else role, rank, data, MESSAGE), timeout_s)

    def collective_send_async(self, rank: int, data: bytes, role: Role | None = None) -> Future[None]:
        """Send bytes without waiting until the receiver has them: its future raises what `collective_send` raises.

        Raises:
            FastrtError: this member is not started, or closed.
        """
        return self.start_step(self.role if role is None else role, rank, data, MESSAGE)

    def collective_receive(self, rank: int, role: Role | None = None, timeout_s: float | None = None) -> bytes:
        """The next bytes that a member of the same role (or another) has sent to this one, in its order.

        Raises:
            ClusterTimeoutError: none have come in time.
        """
        source = (self.role if role is None else role, rank)
        limit = self.options.call_timeout_s if timeout_s is None else timeout_s
        found = self._mailbox.take(source, limit)
        if found is None:
            raise ClusterTimeoutError(f"waited {limit:g} s for bytes from {source[0].name} {rank}.")
        return found

    # What a group of members is made of

    def start_step(self, role: Role, rank: int, data: bytes, tag: Tag) -> Future[None]:
        """Begin to send the bytes of one step; done when the receiver has them.

        Raises:
            FastrtError: this member is not started, or closed.
        """
        return self._loop.submit(self._give(role, rank, data, tag))

    def ends_of(self, ranks: Sequence[int]) -> dict[tuple[Role, int], int]:
        """How often members of this one's role were lost or replaced; see `Mailbox.ends`."""
        return self._mailbox.ends([(self.role, one) for one in ranks])

    def take_step(self, rank: int, tag: Tag, timeout_s: float, members: dict[tuple[Role, int], int]) -> bytes:
        """The bytes of one step of an operation in which these members, as `ends_of` gave them, take part.

        Raises:
            CollectiveTimeout, CollectiveMismatch: the sender does something else; see `Mailbox.take_step`.
            ClusterTimeoutError: they have not come in time.
            MemberLostError: a member is lost.
        """
        found = self._mailbox.take_step((self.role, rank), tag, timeout_s, members)
        if found is not None:
            return found
        lost = self._mailbox.lost(members)
        if lost is not None:
            raise MemberLostError(lost[1])
        raise ClusterTimeoutError(f"waited {timeout_s:g} s for bytes from {self.role.name.lower()} {rank}.")

    def forget_group(self, name: str) -> None:
        """Throw away what is left of a group."""
        self._mailbox.forget(name)

    async def _give(self, role: Role, rank: int, data: bytes, tag: Tag) -> None:
        caller = await self._peer(role, rank)
        command = Command.COLLECTIVE_SEND_DATA
        _, echo = await caller.call(command, data, self.role, self._view.rank, Kind.RAW, tag=tag)
        if echo != data:
            raise MemberUnreachableError(f"{role.name} {rank} gave back other bytes than it was sent.")
