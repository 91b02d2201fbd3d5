"""Sends bytes from member to member with COLLECTIVE_SEND_DATA; `ClusterMember` inherits these methods.

A receiver acknowledges a message by echoing all of it; members that are not fastrt's do the same.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from fastrt.errors import FastrtError
from fastrt.membership.events import Role
from fastrt.membership.framing import Kind
from fastrt.membership.mailbox import MESSAGE, Mailbox, Tag
from fastrt.membership.member_loop import MemberLoop
from fastrt.membership.options import ClusterTimeoutError, MemberOptions
from fastrt.membership.peers import Caller, MemberUnreachableError
from fastrt.membership.view import ClusterView
from fastrt.membership.wire import Command


class MemberLostError(FastrtError):
    """A member of a group is lost or was replaced.

    Attributes:
        rank: its rank in the cluster.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the cluster is lost")
        self.rank = rank


class Messages:
    """The methods of a member that send and receive bytes."""

    role: Role
    options: MemberOptions
    _mailbox: Mailbox
    _view: ClusterView
    _loop: MemberLoop

    async def _peer(self, role: Role, rank: int) -> Caller:
        raise NotImplementedError

    def _wait(self, work: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        raise NotImplementedError

    def collective_send(self, rank: int, data: bytes, role: Role | None = None, timeout_s: float | None = None) -> None:
        """Send bytes to a member of the same role (or another), and wait until it has received all of them.

        Raises:
            MemberUnreachableError: it cannot be reached.
            ClusterTimeoutError: it did not acknowledge them in time.
        """
        self._wait(self._give(self.role if role is None else role, rank, data, MESSAGE), timeout_s)

    def collective_send_async(self, rank: int, data: bytes, role: Role | None = None) -> Future[None]:
        """Send bytes without waiting for the receiver's acknowledgement.

        Returns:
            A future that raises the errors of `collective_send`.

        Raises:
            FastrtError: this member is not started, or closed.
        """
        return self.start_step(self.role if role is None else role, rank, data, MESSAGE)

    def collective_receive(self, rank: int, role: Role | None = None, timeout_s: float | None = None) -> bytes:
        """Receive the next bytes that a member of the same role (or another) has sent to this one, in sending order.

        Raises:
            ClusterTimeoutError: none came in time.
        """
        source = (self.role if role is None else role, rank)
        limit = self.options.call_timeout_s if timeout_s is None else timeout_s
        found = self._mailbox.take(source, limit)
        if found is None:
            raise ClusterTimeoutError(f"waited {limit:g} s for bytes from {source[0].name} {rank}.")
        return found

    # For `MemberGroup`

    def start_step(self, role: Role, rank: int, data: bytes, tag: Tag) -> Future[None]:
        """Begin to send the bytes of one step; the future is done when the receiver has them.

        Raises:
            FastrtError: this member is not started, or closed.
        """
        return self._loop.submit(self._give(role, rank, data, tag))

    def ends_of(self, ranks: Sequence[int]) -> dict[tuple[Role, int], int]:
        """Number of times that members of this member's role were lost or replaced; see `Mailbox.ends`."""
        return self._mailbox.ends([(self.role, one) for one in ranks])

    def take_step(self, rank: int, tag: Tag, timeout_s: float, members: dict[tuple[Role, int], int]) -> bytes:
        """Take the bytes of one step of an operation whose members are those that `ends_of` returned.

        Raises:
            CollectiveTimeout, CollectiveMismatch: the sender is at another operation; see `Mailbox.take_step`.
            ClusterTimeoutError: they did not come in time.
            MemberLostError: a member is lost or was replaced.
        """
        found = self._mailbox.take_step((self.role, rank), tag, timeout_s, members)
        if found is not None:
            return found
        lost = self._mailbox.lost(members)
        if lost is not None:
            raise MemberLostError(lost[1])
        raise ClusterTimeoutError(f"waited {timeout_s:g} s for bytes from {self.role.name.lower()} {rank}.")

    def forget_group(self, name: str) -> None:
        """Drop the messages of a group that were not taken."""
        self._mailbox.forget(name)

    async def _give(self, role: Role, rank: int, data: bytes, tag: Tag) -> None:
        caller = await self._peer(role, rank)
        command = Command.COLLECTIVE_SEND_DATA
        _, echo = await caller.call(command, data, self.role, self._view.rank, Kind.RAW, tag=tag)
        if echo != data:
            raise MemberUnreachableError(f"{role.name} {rank} acknowledged other bytes than it was sent.")
