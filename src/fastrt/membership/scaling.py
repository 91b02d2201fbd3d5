"""One round of scaling: the members that must register again, those that must acknowledge, and the new ranks.

A round first gathers: members finish their work and register again, and new members register. Then the round is applied
in one step and announced to all members, and it settles until every member has acknowledged that it continues. The sets
belong to the round, so that leftovers of an earlier round cannot count in a later one.

Source: `leader_scaler.cc`, `follower_scaler.cc` of MindSpore's `ps/core`. The sets there belong to the scheduler and
are never emptied, and remaining members above the lowest leaver all get other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fastrt.membership.events import Phase, Role
from fastrt.membership.members import Member

Counts = dict[Role, int]


@dataclass
class Round:
    """A scaling in progress.

    Attributes:
        phase: SCALE_OUT or SCALE_IN.
        before: number of members of each role before the round.
        after: number of members of each role after it.
        deadline: time at which the round is given up.
        leaving: ids of the members that leave.
        missing: ids of the members that have not registered again yet.
        gathering: whether the round has not been applied yet.
        undone: once the round is applied, ids of the members that have not acknowledged it yet.
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
        """Whether a member joined because of this round."""
        return self.phase is Phase.SCALE_OUT and member.rank >= self.before[member.role]

    def returned(self, member_id: str) -> None:
        """Note that a member has registered, for the first time or again."""
        self.missing.discard(member_id)

    def lost(self, member: Member) -> None:
        """Note that a member is lost: after its return it must repeat the step that the round waits for."""
        if not self.gathering:
            self.undone.add(member.member_id)
        elif not self.is_newcomer(member) and member.member_id not in self.leaving:
            self.missing.add(member.member_id)

    def forget(self, member_id: str) -> None:
        """Stop waiting for a member."""
        self.missing.discard(member_id)
        self.undone.discard(member_id)


def moves(members: Iterable[Member], leaving: Collection[str], after: Counts) -> list[tuple[Member, int]]:
    """New ranks after some members have left: as few members as possible move, the highest ranks into the gaps."""
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
