"""One round of scaling: who must register again, who must still say that it goes on, and who goes where.

A round gathers first: members end what they do and register again, newcomers register. Then it is applied at one
moment, everybody is told, and the round is settling until all have said that they go on. Each round has its own sets,
so nothing of an earlier one counts in it.

Source: `leader_scaler.cc`, `follower_scaler.cc` of MindSpore's `ps/core`. There the sets were the scheduler's and
never emptied, and stayers above the lowest leaver all got other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fastrt.membership.events import Phase, Role
from fastrt.membership.members import Member

Counts = dict[Role, int]


@dataclass
class Round:
    """A scaling under way.

    Attributes:
        phase: SCALE_OUT or SCALE_IN.
        before: how many members each role had.
        after: how many it shall have.
        deadline: when the round is given up.
        leaving: ids of members that shall leave.
        missing: ids of members that must still register again.
        gathering: whether the round has not been applied yet.
        undone: once it has been applied, ids of members that have not said that they go on.
    """

    phase: Phase
    before: Counts
    after: Counts
    deadline: float
    leaving: frozenset[str] = frozenset()
    missing: set[str] = field(default_factory=set)
    gathering: bool = True
    undone: set[str] = field(default_factory=set)

    def is_newcomer(self, member: Member) -> bool:
        """Whether a member is only there because of this round."""
        return self.phase is Phase.SCALE_OUT and member.rank >= self.before[member.role]

    def returned(self, member_id: str) -> None:
        """A member has registered, the first time or again."""
        self.missing.discard(member_id)

    def lost(self, member: Member) -> None:
        """A member is gone: when it comes back it must do again what the round asks for."""
        if not self.gathering:
            self.undone.add(member.member_id)
        elif not self.is_newcomer(member) and member.member_id not in self.leaving:
            self.missing.add(member.member_id)

    def forget(self, member_id: str) -> None:
        """Nothing is expected of a member any more."""
        self.missing.discard(member_id)
        self.undone.discard(member_id)


def moves(members: Iterable[Member], leaving: Collection[str], after: Counts) -> list[tuple[Member, int]]:
    """Who gets which rank when some have left: as few as possible move, the highest into the gaps."""
    kept: dict[Role, set[int]] = {role: set() for role in after}
    high: dict[Role, list[Member]] = {role: [] for role in after}
    for member in members:
        if member.member_id in leaving:
            continue
        if member.rank < after[member.role]:
            kept[member.role].add(member.rank)
        else:
            high[member.role].append(member)
    found = []
    for role, movers in high.items():
        gaps = (rank for rank in range(after[role]) if rank not in kept[role])
        found += list(zip(movers, gaps, strict=False))
    return found
