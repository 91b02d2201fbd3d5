"""Transition tables of a cluster and its members: each move is reached, others raise."""

import pytest

from fastrt.membership import events as ev
from fastrt.membership.events import CLUSTER, Instruction, Phase
from fastrt.membership.members import MEMBER, MemberState
from fastrt.transitions import IllegalMoveError, Transitions
from support.cluster_play import Play

NAMES = ("w0", "w1", "s0", "s1")
AVAILABLE_S = 50.0


def ready() -> Play:
    play = Play(2, 2, available_timeout_s=AVAILABLE_S, heartbeat_timeout_s=1000.0, scale_timeout_s=1000.0)
    play.register(*NAMES)
    return play


def finish(play: Play, *names: str) -> None:
    for name in names:
        assert play.do(ev.Finish, play.link_of[name], name) is None


def instruct(instruction: Instruction):
    return lambda play: play.do(ev.Instruct, instruction, b"")


def starting() -> Play:
    """All members but w1, which was lost, are there: two ranks of the cluster were never alive together."""
    play = Play(2, 2, available_timeout_s=AVAILABLE_S, heartbeat_timeout_s=1000.0)
    play.register("w0", "w1", "s0")
    play.lose("w1")
    return play


def finish_all(play: Play) -> None:
    """Members finish; lost ones are waited for, and in a scaling those that it adds have come."""
    if play.phase is Phase.STARTING:
        play.register("s1")
    if play.phase is Phase.SCALE_OUT:
        play.register("s2")
    finish(play, *[member.member_id for member in play.state.members if member.alive])
    if play.phase is not Phase.EXIT:
        play.later(AVAILABLE_S)


def take_back_without_w1(play: Play) -> None:
    play.lose("w1")
    assert play.do(ev.TakeBack) is None


# Ways to each phase from READY, and to each event.
PHASES = {
    Phase.NODE_TIMEOUT: lambda play: play.lose("s1"),
    Phase.SCALE_OUT: lambda play: play.do(ev.ScaleOut, 0, 1),
    Phase.SCALE_IN: lambda play: play.do(ev.ScaleIn, ["s1"]),
    Phase.NEW_INSTANCE: instruct(Instruction.NEW_INSTANCE),
    Phase.ENABLE_FLS: instruct(Instruction.ENABLE_FLS),
    Phase.DISABLE_FLS: instruct(Instruction.DISABLE_FLS),
}
EVENTS = {
    "complete": lambda play: play.register(*({"s1"} if play.phase is Phase.NODE_TIMEOUT else {"w1", "s1"})),
    "incomplete": lambda play: play.lose("s1"),
    "start_timeout": lambda play: play.later(AVAILABLE_S),
    "scale_out": PHASES[Phase.SCALE_OUT],
    "scale_in": PHASES[Phase.SCALE_IN],
    "new_instance": PHASES[Phase.NEW_INSTANCE],
    "enable_fls": PHASES[Phase.ENABLE_FLS],
    "disable_fls": PHASES[Phase.DISABLE_FLS],
    "instructed": lambda play: play.feed(ev.Instructed(play.calls, {})),
    "round_over": lambda play: play.do(ev.TakeBack),
    "round_over_incomplete": take_back_without_w1,
    "all_finished": finish_all,
}


def moves_of(table: Transitions) -> list:
    moves = [(state, event) for state, row in table.table.items() for event in row]
    return [pytest.param(*move, id=f"{move[0].name}-{move[1]}") for move in moves]


@pytest.mark.parametrize(("phase", "event"), moves_of(CLUSTER))
def test_every_move_of_the_cluster_is_reached(phase: Phase, event: str) -> None:
    play = starting() if phase is Phase.STARTING else ready()
    if phase in PHASES:
        PHASES[phase](play)
    assert play.phase is phase
    EVENTS[event](play)
    assert play.phase is CLUSTER.table[phase][event]
    assert CLUSTER.history(play.state.moves)[-1] == (phase, event)


def restarted(play: Play) -> Play:
    """After a restart of the scheduler members are as recorded, and have no connection."""
    after = play.restarted()
    after.links, after.link_of = play.links, play.link_of
    return after


def play_with(state: MemberState, event: str) -> Play:
    """A cluster in which s1 is in a state; for a removal of one that is not lost, in a scaling that it leaves."""
    play = ready()
    if event == "removed" and state is not MemberState.LOST:
        assert play.do(ev.ScaleIn, ["s1"]) is None
    if state in (MemberState.FINISHED, MemberState.GONE):
        finish(play, "s1")
    if state in (MemberState.LOST, MemberState.GONE):
        play.lose("s1")
    if event == "reconnected" and state in (MemberState.ALIVE, MemberState.FINISHED):
        play = restarted(play)
    return play


@pytest.mark.parametrize(("state", "event"), moves_of(MEMBER))
def test_every_move_of_a_member_is_reached(state: MemberState, event: str) -> None:
    play = play_with(state, event)
    member = play.state.members.by_id["s1"]
    assert member.state is state
    if event == "registered":
        play.register("s1", link=member.link)
    elif event == "reconnected":
        play.do(ev.Heartbeat, 77, "s1")
    elif event == "finished":
        finish(play, "s1")
    elif event == "lost":
        play.lose("s1")
    elif state is MemberState.LOST:
        play.register("s9")
    else:
        play.again("w0", "w1", "s0")
    assert member.state is MEMBER.table[state][event]
    assert MEMBER.history(member.moves)[-1] == (state, event)
    assert (play.state.members.by_id.get("s1") is member) == (event != "removed")


def test_illegal_move_of_the_cluster_raises_with_its_story() -> None:
    play = ready()
    play.lose("s1")
    words = (
        "cluster of 2 workers and 2 servers: 'scale_out' is not possible in the state NODE_TIMEOUT. Its last moves: "
        "STARTING -complete-> READY -incomplete-> NODE_TIMEOUT"
    )
    with pytest.raises(IllegalMoveError, match=words):
        play.state._move("scale_out")
    assert play.phase is Phase.NODE_TIMEOUT


def test_illegal_move_of_a_member_raises_with_its_story_and_changes_no_count() -> None:
    play = ready()
    play.lose("s1")
    members = play.state.members
    with pytest.raises(IllegalMoveError, match=r"member s1: 'lost' is not possible .* ALIVE -lost-> LOST"):
        members.note(members.by_id["s1"], "lost")
    assert [member.member_id for member in members.lost()] == ["s1"]
    play.state.check_invariants()
