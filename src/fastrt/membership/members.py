"""The members of a cluster: who they are, which rank each has, and which ranks nobody has.

A rank belongs to a member until another one takes it, also while its owner is lost; so whoever comes back under its
own id finds its rank. Every operation costs the same however many members there are, but for lists of all of them.

Invariants: ranks of a role are from 0 to its count less one; each is free or has one owner; a member is the owner of
its rank; a link is one member's.

Source: `NodeManager::NextRankId` of MindSpore's `ps/core/node_manager.cc`, which also gave ranks beyond the count.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass

from fastrt.membership.events import MemberView, Refused, Role


@dataclass(eq=False, slots=True)
class Member:
    """One process.

    Attributes:
        link: its connection; None when it has none.
        alive: it is thought to live; after a restart of ours, before it has come back too.
        heard: when it was last heard of.
        finished: it has said that it is done.
    """

    member_id: str
    role: Role
    rank: int
    host: str
    port: int
    link: int | None
    heard: float
    alive: bool = True
    finished: bool = False
    view: MemberView | None = None

    @property
    def present(self) -> bool:
        """Whether nobody need wait for it."""
        return self.alive or self.finished

    def record(self) -> bytes:
        """What is kept of it over restarts."""
        kept = [int(self.role), self.rank, self.host, self.port, self.alive, self.finished]
        return json.dumps(kept, separators=(",", ":")).encode()


class Members:
    """The table. Not thread-safe.

    Args:
        counts: how many members each role has.
    """

    def __init__(self, counts: dict[Role, int]) -> None:
        self.counts = dict(counts)
        self.by_id: dict[str, Member] = {}
        self.by_link: dict[int, Member] = {}
        self.present_count = 0
        self.finished_count = 0
        self._owners: dict[Role, dict[int, Member]] = {role: {} for role in counts}
        self._lost: dict[Role, dict[int, Member]] = {role: {} for role in counts}
        # Heaps of ranks that may be free; one that has an owner, or is beyond the count, is passed over.
        self._free: dict[Role, list[int]] = {role: list(range(count)) for role, count in counts.items()}

    def __iter__(self) -> Iterator[Member]:
        """All, by role and rank."""
        for owners in self._owners.values():
            for rank in sorted(owners):
                yield owners[rank]

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def complete(self) -> bool:
        """Whether every rank has an owner who need not be waited for."""
        return self.present_count == sum(self.counts.values())

    def lost(self) -> list[Member]:
        """Those that are neither alive nor finished."""
        return [member for lost in self._lost.values() for _, member in sorted(lost.items())]

    def next_rank(self, role: Role) -> tuple[int, Member | None]:
        """The rank for a newcomer: of the lost member with the lowest, who loses it; else the lowest free one.

        Raises:
            Refused: there is none.
        """
        lost = self._lost[role]
        if lost:
            rank = min(lost)
            return rank, lost[rank]
        free, owners = self._free[role], self._owners[role]
        while free and (free[0] in owners or free[0] >= self.counts[role]):
            heapq.heappop(free)
        if not free:
            count = self.counts[role]
            raise Refused(
                f"the cluster has {count} {role.name.lower()}s, and all of them are there. Scale it out first, or end "
                "one of them."
            )
        return free[0], None

    def add(self, member: Member) -> None:
        """A member takes the rank it has; the rank is free."""
        assert member.rank not in self._owners[member.role], f"rank {member.rank} has an owner"
        self.by_id[member.member_id] = member
        self._owners[member.role][member.rank] = member
        if member.link is not None:
            self.by_link[member.link] = member
        self.finished_count += member.finished
        if member.present:
            self.present_count += 1
        else:
            self._lost[member.role][member.rank] = member

    def remove(self, member: Member) -> None:
        """A member is none any more; its rank is free."""
        del self.by_id[member.member_id]
        del self._owners[member.role][member.rank]
        heapq.heappush(self._free[member.role], member.rank)
        if member.link is not None:
            del self.by_link[member.link]
        self.finished_count -= member.finished
        if member.present:
            self.present_count -= 1
        else:
            del self._lost[member.role][member.rank]

    def attach(self, member: Member, link: int | None, now: float) -> None:
        """A member has another connection, or none; with one it is alive."""
        if member.link is not None:
            del self.by_link[member.link]
        member.link = link
        if link is not None:
            self.by_link[link] = member
            member.heard = now
            self.mark(member, True, member.finished)

    def mark(self, member: Member, alive: bool, finished: bool) -> None:
        """A member is alive or not, done or not."""
        before = member.present
        self.finished_count += finished - member.finished
        member.alive, member.finished, member.view = alive, finished, None
        if before and not member.present:
            self.present_count -= 1
            self._lost[member.role][member.rank] = member
        elif member.present and not before:
            self.present_count += 1
            del self._lost[member.role][member.rank]

    def move(self, member: Member, rank: int) -> None:
        """A member gets another rank, which is free."""
        lost, owners = self._lost[member.role], self._owners[member.role]
        assert rank not in owners, f"rank {rank} has an owner"
        heapq.heappush(self._free[member.role], member.rank)
        owners[rank] = owners.pop(member.rank)
        if member.rank in lost:
            lost[rank] = lost.pop(member.rank)
        member.rank, member.view = rank, None

    def resize(self, counts: dict[Role, int]) -> None:
        """Each role has so many members from now on; ranks beyond that have no owners."""
        for role, count in counts.items():
            for rank in range(self.counts[role], count):
                heapq.heappush(self._free[role], rank)
        self.counts = dict(counts)

    def views(self) -> tuple[MemberView, ...]:
        """All members as others see them, by role and rank."""
        return tuple(member.view or _view(member) for member in self)

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this table is broken."""
        seen = 0
        for role, owners in self._owners.items():
            for rank, member in owners.items():
                assert 0 <= rank < self.counts[role], f"{member} has a rank beyond {self.counts[role]}"
                assert (member.rank, member.role) == (rank, role), f"{member} is listed as {role} {rank}"
                assert self.by_id[member.member_id] is member, f"{member} is not listed by its id"
                assert (rank in self._lost[role]) != member.present, f"{member} and the list of the lost"
                assert member.link is None or self.by_link[member.link] is member, f"{member} and its link"
                seen += 1
            assert set(self._lost[role]) <= set(owners)
            free = set(self._free[role]) - set(owners)
            assert free >= set(range(self.counts[role])) - set(owners), f"a free rank of {role} would not be found"
        assert seen == len(self.by_id)
        assert all(self.by_id.get(member.member_id) is member for member in self.by_link.values())
        assert self.present_count == sum(member.present for member in self)
        assert self.finished_count == sum(member.finished for member in self)


def _view(member: Member) -> MemberView:
    member.view = MemberView(
        member.member_id, member.role, member.rank, member.host, member.port, member.alive, member.finished
    )
    return member.view
