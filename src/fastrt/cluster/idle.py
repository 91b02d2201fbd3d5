"""When a stream between two nodes is closed because neither uses it. No message is lost and no attempt is counted.

The side that has not used the stream for a time claims that it is idle, and sends nothing that needs an answer until
the peer has answered. The stream keeps the order of messages. So when the claim arrives, the peer knows all that was
sent before it: if the peer has nothing open either, then there is nothing in transit, and it closes the stream. Else it
says that it still uses the stream. Two claims that cross each other are answers to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

# Values of `Frame.idle`.
NOTHING, CLAIM, IN_USE = range(3)


class Idle:
    """The state of one side of a stream.

    Attributes:
        is_claimed: this side has claimed that the stream is idle, and waits for the answer: it may not use the stream.
        is_agreed: both sides have agreed: this side closes the stream.
    """

    def __init__(self) -> None:
        self.is_claimed = self.is_agreed = False
        self._unused_since: float | None = None
        self._word = NOTHING

    @property
    def is_open(self) -> bool:
        """Whether this side may use the stream."""
        return not (self.is_claimed or self.is_agreed)

    def look(self, is_used: bool, now: float, after_s: float) -> bool:
        """Claim that the stream is idle if this side has not used it for `after_s`; return whether it does so now."""
        if is_used or not self.is_open:
            self._unused_since = None
            return False
        if self._unused_since is None:
            self._unused_since = now
        if now - self._unused_since < after_s:
            return False
        self.is_claimed, self._word = True, CLAIM
        return True

    def received(self, word: int, is_used: bool, now: float, after_s: float) -> bool:
        """Take what the peer says; return whether an answer must be sent.

        A side that has used the stream lately refuses, or streams in use now and then would be opened again and again.
        """
        if is_used and not self.is_claimed:
            self._unused_since = None
        if word == IN_USE and self.is_claimed:
            self.is_claimed, self._unused_since = False, None
        elif word == CLAIM:
            since = self._unused_since
            lately = is_used or since is None or now - since < after_s / 2
            if self.is_claimed or not lately:
                self.is_agreed = True
            else:
                self._word = IN_USE
                return True
        return False

    def next_word(self) -> int:
        """Return what the next frame says."""
        word, self._word = self._word, NOTHING
        return word


def is_used(exchange: Exchange) -> bool:
    """Return whether anything on this node needs a stream: tasks, calls, actors, objects, messages, questions."""
    return not (
        exchange.ledger.is_empty
        and exchange.out.is_empty
        and exchange.questions.is_empty
        and exchange.remote_actors.is_empty
        and exchange.hosted_actors.is_empty
        and not exchange.references.has_stand_ins
        and not exchange.references.exported
    )
