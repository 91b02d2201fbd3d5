"""Every move of the coordination service's transition tables happens, and an illegal one tells the story."""

import pytest

from fastrt.coordination import events as ev
from fastrt.coordination.barriers import BARRIER, BarrierState
from fastrt.coordination.legacy_runtime import SESSION
from fastrt.coordination.members import MEMBER
from fastrt.coordination.state import CoordinationState, Settings
from fastrt.coordination.status import Code, Member, failure
from fastrt.transitions import IllegalMoveError, Transitions

ONE = Member("job", 0)


class Play:
    """A service of a job of one, and the moves that happen in it."""

    def __init__(self, recoverable: bool = False) -> None:
        settings = Settings({"job": 1}, 10.0, recoverable=recoverable, clear_after_shutdown=True, shutdown_timeout_s=0)
        self.state = CoordinationState(settings)
        self.calls, self.now = 0, 100.0

    def do(self, kind: type, *arguments: object, **named: object) -> None:
        self.calls += 1
        self.state.handle(kind(self.calls, *arguments, **named), self.now)

    def barrier(self, counter: int = 0, *members: Member) -> None:
        self.do(ev.EnterBarrier, "b", counter, 5.0, ONE, members)


def every_move(table: Transitions) -> set[tuple[object, str]]:
    return {(state, event) for state, row in table.table.items() for event in row}


def test_every_move_of_a_member_happens():
    play = Play(recoverable=True)
    record = play.state.members[ONE]
    play.do(ev.Register, ONE, 1)
    play.do(ev.Register, ONE, 1)  # the answer to the first was lost
    play.now += 11
    play.state.handle(ev.Tick(), play.now)  # silent
    play.do(ev.Register, ONE, 2)  # comes back without a reset
    play.do(ev.Reset, ONE)
    play.state.members.fail(ONE, failure(Code.INTERNAL, "broken"))
    play.do(ev.Reset, ONE)
    assert set(MEMBER.history(record.moves)) == every_move(MEMBER)


def test_every_move_of_a_barrier_happens():
    play = Play()
    play.do(ev.Register, ONE, 1)
    play.barrier(0)
    barrier = play.state.barriers.find("b")
    assert barrier is not None
    play.barrier(0, Member("job", 7))  # disagrees about the members of the round that ended
    play.barrier(1)
    play.do(ev.ReportError, ONE, 13, "broken")
    play.barrier(2)  # ends at once: its member is in error
    assert set(BARRIER.history(barrier.moves)) == every_move(BARRIER)


def test_every_move_of_a_session_happens():
    play = Play()
    nodes = play.state.nodes
    play.do(ev.NodeConnect, 0, 1, 5.0, 3)
    play.do(ev.NodeShutdown, nodes.session, 0)
    play.do(ev.NodeConnect, 0, 2, 5.0, 3)
    play.do(ev.NodeShutdown, nodes.session, 0)
    stopped = Play()
    stopped.state.handle(ev.Stop(), stopped.now)
    seen = {*SESSION.history(nodes.moves), *SESSION.history(stopped.state.nodes.moves)}
    assert seen == every_move(SESSION)


def test_illegal_move_tells_the_story_of_the_member():
    play = Play()
    play.do(ev.Register, ONE, 1)
    play.do(ev.Reset, ONE)
    with pytest.raises(IllegalMoveError, match="DISCONNECTED -connect-> CONNECTED -disconnect-> DISCONNECTED"):
        play.state.members.disconnect(ONE, 0.0)


def test_illegal_move_of_a_barrier_tells_its_round():
    play = Play()
    play.do(ev.Register, ONE, 1)
    play.barrier(0)
    barrier = play.state.barriers.find("b")
    with pytest.raises(IllegalMoveError, match="barrier b::0: 'open' is not possible in the state ENDED"):
        BARRIER.move(barrier, "open", barrier.name)
    assert barrier.state is BarrierState.ENDED
