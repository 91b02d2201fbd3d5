"""How long two nodes keep values for each other after the end of a stream: pure state, without I/O, clock or arena.

Both wait `CLAIM_S` for the next stream, the one that keeps values and the one that claims them. A node that leaves the
cluster gets `GONE_S`: an uplink that was killed is back before that. One that joins again gets the whole time once
more, each time: its uplink is another process, which claims for so long, and a head that was restarted does not list
all nodes in its first views. An uplink that keeps dying ends its node, so this ends.
"""

from __future__ import annotations

from enum import IntEnum

from fastrt.transitions import Transitions

CLAIM_S = 30.0  # after the end of a stream, both nodes keep what they have for each other for so long
GONE_S = 2.0  # a node that has left the cluster for so long does not come back: an uplink that was killed is faster


class Absent(IntEnum):
    """States of a node whose stream has ended, while it keeps values for this one, or this one keeps values for it."""

    AWAY = 0
    LEFT = 1  # it is not a member of the cluster
    BACK = 2  # it is a member again, or still is when its time is almost over
    LOST = 3  # the values are given up
    CLAIMED = 4  # all of them are claimed


ABSENT = Transitions[Absent](
    "absent node",
    {
        Absent.AWAY: {"leave": Absent.LEFT, "return": Absent.BACK, "lose": Absent.LOST, "claim": Absent.CLAIMED},
        Absent.LEFT: {"return": Absent.BACK, "lose": Absent.LOST, "claim": Absent.CLAIMED},
        Absent.BACK: {"leave": Absent.LEFT, "lose": Absent.LOST, "claim": Absent.CLAIMED},
        Absent.LOST: {},
        Absent.CLAIMED: {},
    },
)


class Absence:
    """A node whose stream has ended.

    Args:
        node: its id, for messages.
        why: how its stream ended.
        now: the time.

    Attributes:
        until: when it is lost unless it comes back.
        state, moves: see `ABSENT`.
    """

    def __init__(self, node: str, why: str, now: float) -> None:
        self.node = node
        self.why = why
        self.until = now + CLAIM_S
        self.state = Absent.AWAY
        self.moves = 0

    def look(self, now: float, is_member: bool | None) -> bool:
        """Take the time and the membership; return whether the node is lost now.

        Args:
            now: the time.
            is_member: whether it is a member of the cluster; None: the members are not known.
        """
        is_here = self.state in (Absent.AWAY, Absent.BACK)
        if is_member is False:
            if is_here:
                ABSENT.move(self, "leave", self.node)
            self.until = min(self.until, now + GONE_S)
        elif is_member and self.until < now + GONE_S and self.state in (Absent.AWAY, Absent.LEFT):
            ABSENT.move(self, "return", self.node)
            self.until = now + CLAIM_S
        return now > self.until

    def lose(self) -> None:
        """Record that the values are given up."""
        ABSENT.move(self, "lose", self.node)

    def claimed(self) -> None:
        """Record that all values are claimed, or that nothing uses the others any more."""
        ABSENT.move(self, "claim", self.node)
