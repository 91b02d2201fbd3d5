"""A node that leaves its cluster in order, so that nothing is lost: pure state, without I/O, clock or arena.

The node asks its peers whether they still need anything of it. A peer that is asked gives it no more work, fetches the
values that the node keeps for it, and moves actors away; it answers once it needs nothing. An answer counts only if the
node has sent nothing else since the question: each question has a number, and the node asks again after it has worked.
The streams keep the order of messages, so an answer to the last question follows all that both sides have sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastrt.transitions import Transitions

# States of this node. Texts: they stand in messages.
STAYS = "STAYS"
WORKS = "WORKS"  # it leaves, and tasks, calls or actors are still here
ASKS = "ASKS"  # it is at rest, and has asked its peers
LEFT = "LEFT"  # no peer needs it

LEAVING = Transitions[str](
    "leaving node",
    {
        STAYS: {"leave": WORKS},
        WORKS: {"rest": ASKS},
        ASKS: {"work": WORKS, "agree": LEFT},
        LEFT: {},
    },
)


class Leaving:
    """How far this node has left its cluster.

    Attributes:
        asked: the number of the last question to all peers; 0: the node stays.
        state, moves: see `LEAVING`.
    """

    def __init__(self) -> None:
        self.state: str = STAYS
        self.moves = self.asked = 0

    def leave(self) -> None:
        """Begin to leave; a second call changes nothing."""
        if self.state is STAYS:
            LEAVING.move(self, "leave", "this node")
            self.asked = 1  # answers to it do not count: it has the peers begin

    def look(self, is_at_rest: bool, answers: Iterable[int]) -> bool:
        """Take the state of this node and the answers of its peers; return whether the node may end.

        Args:
            is_at_rest: nothing runs or waits here, and all messages to the peers are sent.
            answers: of each peer, the last question that it has answered; 0: none.
        """
        if self.state is WORKS and is_at_rest:
            LEAVING.move(self, "rest", "this node")
            self.asked += 1
        elif self.state is ASKS and not is_at_rest:
            LEAVING.move(self, "work", "this node")
        elif self.state is ASKS and all(answer == self.asked for answer in answers):
            LEAVING.move(self, "agree", "this node")
        return self.state is LEFT


class PeerLeaves:
    """The questions and answers of this node and one peer about leaving.

    Attributes:
        asked: the number of its last question; 0: it stays.
        answered: the last question that this node has answered.
        agreed: the last question of this node that the peer has answered.
    """

    def __init__(self) -> None:
        self.asked = self.answered = self.agreed = 0

    @property
    def must_answer(self) -> bool:
        """Return whether the peer waits for an answer."""
        return self.asked > self.answered

    def hear(self, question: int, answer: int) -> None:
        """Take the numbers in a frame of the peer; 0: none."""
        self.asked = max(self.asked, question)
        self.agreed = max(self.agreed, answer)

    def answer(self) -> int:
        """Return the number to answer with, once this node needs nothing of the peer."""
        self.answered = self.asked
        return self.answered
