"""How two nodes agree to close a stream that neither uses: both sides without a network, messages in any order."""

import random
from collections import deque

import pytest

from fastrt.cluster.idle import CLAIM, IN_USE, NOTHING, Idle

AFTER_S = 10.0


class Side:
    """One side: requests that it has open at the peer, and those of the peer that it has not answered."""

    def __init__(self):
        self.idle = Idle()
        self.asked = self.owes = 0
        self.peer = None
        self.arriving = deque()  # frames to this side
        self.is_closed = False

    @property
    def is_used(self):
        return bool(self.asked or self.owes)

    def send(self, what):
        self.peer.arriving.append((what, self.idle.next_word()))

    def ask(self):
        if self.idle.is_open:
            self.asked += 1
            self.send("request")

    def answer(self):
        if self.owes:
            self.owes -= 1
            self.send("answer")

    def look(self, now):
        if self.idle.look(self.is_used, now, AFTER_S):
            self.send("")

    def take(self, now):
        """Process the next frame, as long as this side has not closed the stream."""
        if not self.arriving or self.is_closed:
            return
        what, word = self.arriving.popleft()
        self.owes += what == "request"
        self.asked -= what == "answer"
        if self.idle.received(word, self.is_used, now, AFTER_S):
            self.send("")
        self.is_closed = self.idle.is_agreed


def pair():
    one, other = Side(), Side()
    one.peer, other.peer = other, one
    return one, other


def test_stream_that_neither_side_uses_is_closed():
    one, other = pair()
    for now in (0.0, 9.0):
        one.look(now)
        other.look(now)
    assert not other.arriving
    one.look(10.0)
    assert not one.idle.is_open
    other.take(10.0)
    assert other.is_closed


def test_claim_is_refused_while_the_other_side_uses_the_stream_or_has_used_it_lately():
    one, other = pair()
    other.ask()
    one.take(0.0)
    one.answer()
    for now in (0.0, 10.0):
        one.look(now)
    other.take(10.0)  # the claim, sent after the answer
    other.take(10.0)
    assert other.idle.is_open
    assert [word for _, word in one.arriving] == [IN_USE]
    one.take(10.0)
    assert one.idle.is_open


def test_two_claims_that_cross_close_the_stream_at_both_ends():
    one, other = pair()
    for now in (0.0, 10.0):
        one.look(now)
        other.look(now)
    one.take(10.0)
    other.take(10.0)
    assert one.is_closed
    assert other.is_closed


def test_words_out_of_turn_change_nothing():
    idle = Idle()
    for word in (IN_USE, NOTHING, 7):
        assert not idle.received(word, False, 0.0, AFTER_S)
    assert idle.is_open
    assert idle.next_word() == NOTHING
    assert idle.received(CLAIM, False, 0.0, AFTER_S)  # it has never looked, so it may have used the stream lately
    assert idle.next_word() == IN_USE


@pytest.mark.parametrize("seed", range(50))
def test_no_request_is_lost_and_every_claim_is_answered(seed):
    rng = random.Random(seed)
    one, other = pair()
    now = 0.0
    for _ in range(2000):
        now += rng.random() * rng.choice([0.1, 8.0])
        side = rng.choice([one, other])
        what = rng.random()
        if what < 0.05:
            side.ask()
        elif what < 0.3:
            side.answer()
        elif what < 0.6:
            side.look(now)
        else:
            side.take(now)
        if one.is_closed or other.is_closed:
            break
    # What the side that closed the stream has sent still arrives; what it was sent does not.
    for closed, open_ in ((one, other), (other, one)):
        if closed.is_closed:
            assert not closed.is_used
            assert all(what == "" for what, _ in closed.arriving)
            assert not open_.idle.is_open
    for _ in range(1000):
        for side in (one, other):
            side.take(now)
            side.answer()
    assert not one.is_used
    assert not other.is_used
    if not (one.is_closed or other.is_closed):
        assert one.idle.is_open
        assert other.idle.is_open
