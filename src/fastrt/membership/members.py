"""Table of a cluster's members: identities, ranks and free ranks.

A member keeps its rank until another member takes it, also while it is lost, so a member that returns under the same
id finds its rank again. The cost of an operation does not depend on the number of members, except for those that list
all members.

Invariants: ranks of a role are from 0 to its count less one; each rank is free or has one owner; a member owns the rank
that it names; a link belongs to one member.

Source: `NodeManager::NextRankId` of MindSpore's `ps/core/node_manager.cc`, which also gave ranks beyond the count.
"""

from __future__ import annotations

import enum
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass

from fastrt.membership.events import MemberView, Refused, Role
from fastrt.transitions import Transitions


class MemberState(enum.Enum):
    """State of one member."""

    ALIVE = enum.auto()
    LOST = enum.auto()
    FINISHED = enum.auto()
    GONE = enum.auto()  # it has finished, and its process has ended or is silent
    REMOVED = enum.auto()  # another member has its rank, or its rank does not exist any more


_ALIVE, _LOST, _FINISHED = MemberState.ALIVE, MemberState.LOST, MemberState.FINISHED
_GONE, _REMOVED = MemberState.GONE, MemberState.REMOVED
# "registered": by Register, also during a scaling; it must finish again then. "reconnected": by a heartbeat over a new
# connection, as upstream's members return. "lost": its connection has ended, or it is silent for too long.
MEMBER = Transitions(
    "member",
    {
        _ALIVE: {
            "registered": _ALIVE, "reconnected": _ALIVE, "finished": _FINISHED, "lost": _LOST, "removed": _REMOVED
        },
        _LOST: {"registered": _ALIVE, "reconnected": _ALIVE, "removed": _REMOVED},
        _FINISHED: {"registered": _ALIVE, "reconnected": _FINISHED, "lost": _GONE, "removed": _REMOVED},
        _GONE: {"registered": _ALIVE, "reconnected": _FINISHED, "removed": _REMOVED},
        _REMOVED: {},
    },
)  # fmt: skip
# By the record's flags: alive, finished.
_RECORDED = {(True, False): _ALIVE, (False, False): _LOST, (True, True): _FINISHED, (False, True): _GONE}


@dataclass(eq=False, slots=True)
class Member:
    """One process of the cluster.

    Attributes:
        link: number of its connection; None without a connection.
        heard: time of its last message.
        state: only `Members` changes it. After a restart of the scheduler it is the recorded one before the member
            reconnects.
        moves: its last transitions.
    """

    member_id: str
    role: Role
    rank: int
    host: str
    port: int
    link: int | None
    heard: float
    state: MemberState = MemberState.ALIVE
    moves: int = 0
    view: MemberView | None = None

    @property
    def alive(self) -> bool:
        """Whether the scheduler takes it to be alive."""
        return self.state is _ALIVE or self.state is _FINISHED

    @property
    def finished(self) -> bool:
        """Whether it has sent Finish."""
        return self.state is _FINISHED or self.state is _GONE

    @property
    def present(self) -> bool:
        """Whether the cluster does not wait for this member: it is alive or has finished."""
        return self.state is not _LOST

    def record(self) -> bytes:
        """The part that is kept in the journal over restarts of the scheduler."""
        kept = [int(self.role), self.rank, self.host, self.port, self.alive, self.finished]
        return json.dumps(kept, separators=(",", ":")).encode()

    @staticmethod
    def recorded_state(alive: bool, finished: bool) -> MemberState:
        """State of a member with these flags in its record."""
        return _RECORDED[alive, finished]


class Members:
    """The members of all roles, by id, link and rank. Not thread-safe.

    Args:
        counts: number of members of each role.
    """

    def __init__(self, counts: dict[Role, int]) -> None:
        self.counts = dict(counts)
        self.by_id: dict[str, Member] = {}
        self.by_link: dict[int, Member] = {}
        self.present_count = 0
        self.finished_count = 0
        self._owners: dict[Role, dict[int, Member]] = {role: {} for role in counts}
        self._lost: dict[Role, dict[int, Member]] = {role: {} for role in counts}
        # Heaps of ranks that may be free; `next_rank` skips those that have an owner or exceed the count.
        self._free: dict[Role, list[int]] = {role: list(range(count)) for role, count in counts.items()}

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all members, by role and rank."""
        for owners in self._owners.values():
            for rank in sorted(owners):
                yield owners[rank]

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def complete(self) -> bool:
        """Whether every rank has an owner that is alive or has finished."""
        return self.present_count == sum(self.counts.values())

    def lost(self) -> list[Member]:
        """List the members that are neither alive nor finished."""
        return [member for lost in self._lost.values() for _, member in sorted(lost.items())]

    def next_rank(self, role: Role) -> tuple[int, Member | None]:
        """Choose the rank for a new member: the lowest rank of a lost member, which loses it, else the lowest free one.

        Returns:
            The rank, and the lost member that owns it or None.
        Raises:
            Refused: all ranks of the role have an owner that is not lost.
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
                f"the cluster has {count} {role.name.lower()}s, and none of them is lost. Scale it out first, or end "
                "one of them."
            )
        return free[0], None

    def add(self, member: Member) -> None:
        """Add a member under the rank that it names, which must be free."""
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
        """Remove a member and free its rank."""
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
        MEMBER.move(member, "removed", member.member_id)

    def attach(self, member: Member, link: int | None, now: float) -> None:
        """Set a member's connection; None: it has none."""
        if member.link is not None:
            del self.by_link[member.link]
        member.link = link
        if link is not None:
            self.by_link[link] = member
            member.heard = now

    def note(self, member: Member, event: str) -> None:
        """Move a member to its next state.

        Args:
            member: one of this table.
            event: one of `MEMBER`'s, except "removed".
        Raises:
            IllegalMoveError: the event is not possible in the member's state.
        """
        before, had_finished = member.present, member.finished
        MEMBER.move(member, event, member.member_id)
        member.view = None
        self.finished_count += member.finished - had_finished
        if before and not member.present:
            self.present_count -= 1
            self._lost[member.role][member.rank] = member
        elif member.present and not before:
            self.present_count += 1
            del self._lost[member.role][member.rank]

    def move(self, member: Member, rank: int) -> None:
        """Give a member another rank, which must be free."""
        lost, owners = self._lost[member.role], self._owners[member.role]
        assert rank not in owners, f"rank {rank} has an owner"
        heapq.heappush(self._free[member.role], member.rank)
        owners[rank] = owners.pop(member.rank)
        if member.rank in lost:
            lost[rank] = lost.pop(member.rank)
        member.rank, member.view = rank, None

    def resize(self, counts: dict[Role, int]) -> None:
        """Set the number of members of each role; ranks beyond it must have no owner."""
        for role, count in counts.items():
            for rank in range(self.counts[role], count):
                heapq.heappush(self._free[role], rank)
        self.counts = dict(counts)

    def views(self) -> tuple[MemberView, ...]:
        """Views of all members, by role and rank."""
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
