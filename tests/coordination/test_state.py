"""The state machine alone: facts in, orders out, and no time but the test's."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastrt.coordination import events as ev
from fastrt.coordination.events import Answer, Persist
from fastrt.coordination.members import State
from fastrt.coordination.state import CoordinationState, Settings
from fastrt.coordination.status import Code, Failure, Member


class Play:
    """Plays events into a state machine and collects the answers by call."""

    def __init__(self, count: int = 2, **changes: Any) -> None:
        self.state = CoordinationState(Settings(roles={"job": count}, incarnation=7, **changes))
        self.now = 100.0
        self.calls = 0
        self.answers: dict[int, Any] = {}
        self.records: dict[tuple[str, str], bytes | None] = {}

    def do(self, kind: type, *arguments: Any, **named: Any) -> int:
        self.calls += 1
        self.feed(kind(self.calls, *arguments, **named))
        return self.calls

    def feed(self, event: Any) -> None:
        for effect in self.state.handle(event, self.now):
            if isinstance(effect, Persist):
                self.records[effect.kind, effect.key] = effect.value
            else:
                assert isinstance(effect, Answer)
                assert effect.call not in self.answers, "answered twice"
                self.answers[effect.call] = effect.value

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    def register(self, *ranks: int, **named: Any) -> list[int]:
        return [self.do(ev.Register, Member("job", rank), 1000 + rank, **named) for rank in ranks]

    def barrier(self, rank: int, name: str = "b", counter: int = 0, timeout_s: float = 10.0, *others: int) -> int:
        members = tuple(Member("job", other) for other in others)
        return self.do(ev.EnterBarrier, name, counter, timeout_s, Member("job", rank), members)

    def code(self, call: int) -> Code:
        problem = self.answers[call]
        assert isinstance(problem, Failure), problem
        return problem.code

    def restarted(self, count: int = 2) -> "Play":
        """Another machine, from the records of this one."""
        after = Play(count)
        after.now = self.now
        kept = [(kind, key, value) for (kind, key), value in self.records.items() if value is not None]
        after.state.restore(kept, self.now)
        after.calls = self.calls
        return after


def test_register_waits_for_all_and_then_answers_all() -> None:
    play = Play(3)
    first, second = play.register(0, 1)
    assert not play.answers
    (third,) = play.register(2)
    assert [play.answers[call] for call in (first, second, third)] == [None] * 3
    play.state.check_invariants()


def test_register_of_a_task_that_never_comes_times_out_naming_it() -> None:
    play = Play(2, register_timeout_s=5.0)
    (call,) = play.register(0)
    play.later(5.1)
    assert play.code(call) is Code.DEADLINE_EXCEEDED
    assert Member("job", 1) in play.answers[call].parts


def test_silent_member_fails_and_all_who_poll_are_told() -> None:
    play = Play(2, heartbeat_timeout_s=10.0)
    play.register(0, 1)
    poll = play.do(ev.PollError, Member("job", 0))
    barrier = play.barrier(0)
    play.now += 9.0
    play.do(ev.Heartbeat, Member("job", 0), 1000)
    play.later(1.5)
    assert play.code(poll) is Code.UNAVAILABLE
    assert play.code(barrier) is Code.INTERNAL
    play.state.check_invariants()


@pytest.mark.parametrize(("incarnation", "code"), [(1001, None), (5, Code.ABORTED)])
def test_second_registration_of_a_live_task(incarnation: int, code: Code | None) -> None:
    play = Play(2)
    play.register(0, 1)
    again = play.do(ev.Register, Member("job", 1), incarnation)
    assert (play.answers[again] is None) if code is None else play.code(again) is code


def test_recoverable_member_comes_back_without_the_others_failing() -> None:
    play = Play(2, heartbeat_timeout_s=10.0)
    play.register(0, 1, recoverable=True)
    poll = play.do(ev.PollError, Member("job", 0))
    play.now += 6
    play.do(ev.Heartbeat, Member("job", 0), 1000)
    play.later(5)
    assert poll not in play.answers
    back = play.do(ev.Register, Member("job", 1), 99)
    assert play.answers[back] is None


def test_barrier_rounds_follow_each_other_and_remember_their_outcome() -> None:
    play = Play(2)
    play.register(0, 1)
    for counter in range(3):
        calls = [play.barrier(0, counter=counter), play.barrier(1, counter=counter)]
        assert [play.answers[call] for call in calls] == [counter, counter]
    late = play.barrier(1, counter=2)
    assert play.answers[late] == 2


def test_barrier_deadline_is_the_first_callers() -> None:
    play = Play(3)
    play.register(0, 1, 2)
    first = play.barrier(0, timeout_s=5.0)
    second = play.barrier(1, timeout_s=500.0)
    play.later(5.0)
    assert play.code(first) is play.code(second) is Code.DEADLINE_EXCEEDED
    late = play.barrier(2, timeout_s=500.0)
    assert play.code(late) is Code.DEADLINE_EXCEEDED


def test_negative_barrier_timeout_is_over_at_once() -> None:
    play = Play(2)
    play.register(0, 1)
    call = play.barrier(0, timeout_s=-3.0)
    play.later(0)
    assert play.code(call) is Code.DEADLINE_EXCEEDED


def test_stranger_at_a_barrier_harms_nobody() -> None:
    play = Play(2)
    play.register(0, 1)
    waiting = play.barrier(0)
    stranger = play.barrier(77)
    assert play.code(stranger) is Code.INVALID_ARGUMENT
    other = play.barrier(1)
    assert play.answers[waiting] == play.answers[other] == 0


def test_cancelled_barrier_stays_cancelled_for_those_who_come_later() -> None:
    play = Play(2)
    play.register(0, 1)
    cancel = play.do(ev.CancelBarrier, "b", 0, Member("job", 0))
    assert play.answers[cancel] is None
    assert play.code(play.barrier(1)) is Code.CANCELLED


def test_shutdown_answers_all_together_and_disconnects_them() -> None:
    play = Play(2)
    play.register(0, 1)
    first = play.do(ev.Shutdown, Member("job", 0))
    assert first not in play.answers
    second = play.do(ev.Shutdown, Member("job", 1))
    assert play.answers[first] is play.answers[second] is None
    assert not play.state.members.connected()


@pytest.mark.parametrize("polled", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_shutdown_barrier_that_times_out_disconnects_its_tasks_where_the_dialect_says_so(
    leaves: bool, polled: bool
) -> None:
    play = Play(3, shutdown_timeout_s=5.0)
    play.register(0, 1, 2)
    polls = [play.do(ev.PollError, Member("job", rank)) for rank in (0, 2)] if polled else []
    waiting = play.do(ev.Shutdown, Member("job", 0), 0.0, leaves)
    hung_up = play.do(ev.Shutdown, Member("job", 1), 0.0, leaves)
    play.feed(ev.Forget(hung_up))
    play.later(5.1)
    assert play.code(waiting) is Code.INTERNAL
    expected = State.DISCONNECTED if leaves else State.ERROR
    assert [play.state.members[Member("job", rank)].state for rank in range(3)] == [expected, expected, State.ERROR]
    if polled:
        assert [play.code(call) for call in polls] == [Code.CANCELLED if leaves else Code.INTERNAL, Code.INTERNAL]
    assert play.code(play.do(ev.Heartbeat, Member("job", 2), 1002)) is Code.ABORTED
    play.state.check_invariants()


def test_shutdown_without_waiting_disconnects_each_alone() -> None:
    play = Play(2, shutdown_timeout_s=0.0)
    play.register(0, 1)
    call = play.do(ev.Shutdown, Member("job", 0))
    assert play.answers[call] is None
    assert list(play.state.members.connected()) == [Member("job", 1)]


def test_clear_after_shutdown_gives_the_next_run_a_fresh_service() -> None:
    play = Play(2, clear_after_shutdown=True)
    play.register(0, 1)
    play.do(ev.InsertKey, "k", b"v", False)
    play.barrier(0), play.barrier(1)
    play.do(ev.Shutdown, Member("job", 0)), play.do(ev.Shutdown, Member("job", 1))
    (first,) = play.register(0)
    assert first not in play.answers, "the new run waits for all its members"
    (second,) = play.register(1)
    assert play.answers[first] is play.answers[second] is None
    assert play.code(play.do(ev.TryGetKey, "k")) is Code.NOT_FOUND
    assert play.restarted().state.keys.bytes_count == 0


@pytest.mark.parametrize("clear", [False, True])
def test_run_after_one_that_failed_begins_only_where_runs_are_cleared(clear: bool) -> None:
    play = Play(2, clear_after_shutdown=clear, heartbeat_timeout_s=10.0)
    play.register(0, 1)
    play.do(ev.InsertKey, "k", b"v", False)
    play.do(ev.PollError, Member("job", 1))
    play.do(ev.ReportError, Member("job", 0), 13, "it broke")
    waiting = play.barrier(1, "left open", 0, 100.0, 1)  # passes at once: only its caller is wanted
    assert play.answers[waiting] == 0
    early = play.do(ev.Register, Member("job", 0), 5)
    assert play.code(early) is Code.ABORTED, "one of the last run is connected still"
    play.later(10.0)
    calls = [play.do(ev.Register, Member("job", rank), 7 + rank) for rank in (0, 1)]
    if clear:
        assert [play.answers[call] for call in calls] == [None, None]
        assert play.code(play.do(ev.TryGetKey, "k")) is Code.NOT_FOUND
        assert play.do(ev.PollError, Member("job", 1)) not in play.answers
        assert play.restarted().state.polls.error is None
    else:
        assert [play.code(call) for call in calls] == [Code.ABORTED, Code.ABORTED]


def test_recoverable_member_comes_back_to_its_keys_also_where_runs_are_cleared() -> None:
    play = Play(1, clear_after_shutdown=True, recoverable=True, heartbeat_timeout_s=10.0)
    play.register(0)
    play.do(ev.InsertKey, "k", b"v", False)
    play.later(10.0)
    (again,) = play.register(0)
    assert play.answers[again] is None
    assert play.answers[play.do(ev.TryGetKey, "k")] == b"v"


@pytest.mark.parametrize("clear", [False, True])
def test_nodes_connect_anew_after_a_silent_one_only_where_runs_are_cleared(clear: bool) -> None:
    play = Play(2, clear_after_shutdown=clear, heartbeat_timeout_s=10.0)
    first, _ = (play.do(ev.NodeConnect, rank, rank + 1, 10.0, 3) for rank in range(2))
    session = play.answers[first]
    play.do(ev.NodeSetKey, session, "k", b"v")
    play.later(10.0)
    calls = [play.do(ev.NodeConnect, rank, rank + 5, 10.0, 3) for rank in range(2)]
    if clear:
        assert play.answers[calls[0]] == play.answers[calls[1]] == session
        missing = play.do(ev.NodeGetKey, session, "k", 1.0)
        play.later(1.0)
        assert play.code(missing) is Code.NOT_FOUND
    else:
        assert [play.code(call) for call in calls] == [Code.ABORTED, Code.ABORTED]


def test_alive_members_answers_when_all_living_have_asked() -> None:
    play = Play(3)
    play.register(0, 1, 2)
    everybody = tuple(Member("job", rank) for rank in range(3))
    first = play.do(ev.AliveMembers, Member("job", 0), everybody)
    second = play.do(ev.AliveMembers, Member("job", 1), everybody)
    assert not {first, second} & play.answers.keys()
    play.do(ev.Reset, Member("job", 2))
    alive = [(Member("job", 0), 1000), (Member("job", 1), 1001)]
    assert play.answers[first] == play.answers[second] == alive


def test_records_restore_members_keys_barriers_and_the_error() -> None:
    play = Play(2)
    play.register(0, 1)
    play.do(ev.InsertKey, "a/b", b"1", False)
    play.barrier(0), play.barrier(1)
    play.do(ev.PollError, Member("job", 1))
    play.do(ev.ReportError, Member("job", 0), 9, "disk full")
    after = play.restarted()
    assert after.state.version == play.state.version
    assert after.answers.get(after.barrier(1)) == 0, "a passed barrier is remembered"
    assert after.state.keys.value("a/b") == b"1"
    assert after.code(after.do(ev.PollError, Member("job", 1))) is Code.FAILED_PRECONDITION
    assert after.state.members[Member("job", 0)].error == play.state.members[Member("job", 0)].error
    after.state.check_invariants()


def test_stop_answers_everybody_who_waits() -> None:
    play = Play(2)
    play.register(0, 1)
    waiting = [
        play.barrier(0),
        play.do(ev.GetKey, "never"),
        play.do(ev.PollError, Member("job", 0)),
        play.do(ev.WatchMembers, None, play.state.version),
        play.do(ev.AliveMembers, Member("job", 0), (Member("job", 0), Member("job", 1))),
    ]
    play.feed(ev.Stop())
    assert all(isinstance(play.answers[call], Failure) for call in waiting)
    assert play.state.waiting_count() == 0


def test_nodes_connect_together_enumerate_in_order_and_shut_down() -> None:
    play = Play(2)
    first = play.do(ev.NodeConnect, 1, 11, 10.0, 3)
    second = play.do(ev.NodeConnect, 0, 10, 10.0, 3)
    session = play.answers[first]
    assert session == play.answers[second]
    one = play.do(ev.NodeEnumerate, session, 1, b"one")
    zero = play.do(ev.NodeEnumerate, session, 0, b"zero")
    assert play.answers[one] == play.answers[zero] == [(3, b"zero"), (3, b"one")]
    down = [play.do(ev.NodeShutdown, session, rank) for rank in range(2)]
    assert [play.answers[call] for call in down] == [None, None]
    assert play.code(play.do(ev.NodeHeartbeat, session, 0)) is Code.FAILED_PRECONDITION


def test_node_waits_for_a_key_until_its_own_timeout_and_is_answered_once() -> None:
    play = Play(1)
    session = play.answers[play.do(ev.NodeConnect, 0, 10, 10.0, 1)]
    missing = play.do(ev.NodeGetKey, session, "k", 2.0)
    play.later(2.0)
    assert play.code(missing) is Code.NOT_FOUND
    waiting = play.do(ev.NodeGetKey, session, "k", 2.0)
    play.do(ev.NodeSetKey, session, "k", b"v")
    assert play.answers[waiting] == b"v"
    play.later(60.0)


def test_silent_node_ends_the_session_for_all() -> None:
    play = Play(2, heartbeat_timeout_s=10.0)
    calls = [play.do(ev.NodeConnect, rank, rank + 1, 10.0, 3) for rank in range(2)]
    session = play.answers[calls[0]]
    waiting = play.do(ev.NodeBarrier, session, 0, b"b", 100.0)
    play.now += 8
    play.do(ev.NodeHeartbeat, session, 0)
    play.later(3)
    assert play.code(waiting) is Code.ABORTED
    assert play.code(play.do(ev.NodeHeartbeat, session, 0)) is Code.ABORTED


RANKS = st.integers(-1, 3)
KEYS = st.sampled_from(["a", "a/b", "/a//b/", "a/b/c", "d", "", "//"])
NAMES = st.sampled_from(["x", "y"])


class AnyOrder(RuleBasedStateMachine):
    """Every order of events leaves the machine sound, and answers no call twice."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(3, heartbeat_timeout_s=10.0, register_timeout_s=20.0, shutdown_timeout_s=15.0)
        self.model: dict[str, bytes] = {}

    @rule(rank=RANKS, incarnation=st.integers(1, 2), recoverable=st.sampled_from([None, None, True]))
    def register(self, rank: int, incarnation: int, recoverable: bool | None) -> None:
        self.play.do(ev.Register, Member("job", rank), incarnation, recoverable)

    @rule(rank=RANKS, incarnation=st.integers(1, 2))
    def heartbeat(self, rank: int, incarnation: int) -> None:
        self.play.do(ev.Heartbeat, Member("job", rank), incarnation)

    @rule(rank=RANKS, leaves=st.booleans())
    def shutdown(self, rank: int, leaves: bool) -> None:
        self.play.do(ev.Shutdown, Member("job", rank), 0.0, leaves)

    @rule(rank=RANKS, kind=st.sampled_from([ev.Reset, ev.PollError]))
    def simple(self, rank: int, kind: type) -> None:
        self.play.do(kind, Member("job", rank))

    @rule(rank=RANKS, code=st.integers(-1, 20))
    def report(self, rank: int, code: int) -> None:
        self.play.do(ev.ReportError, Member("job", rank), code, "it broke")

    @rule(rank=RANKS, name=NAMES, counter=st.integers(-1, 2), others=st.lists(RANKS, max_size=3))
    def barrier(self, rank: int, name: str, counter: int, others: list[int]) -> None:
        self.play.barrier(rank, name, counter, 5.0, *others)

    @rule(rank=RANKS, name=NAMES, counter=st.integers(0, 2))
    def cancel(self, rank: int, name: str, counter: int) -> None:
        self.play.do(ev.CancelBarrier, name, counter, Member("job", rank))

    @rule(rank=RANKS, others=st.lists(RANKS, max_size=3))
    def alive(self, rank: int, others: list[int]) -> None:
        self.play.do(ev.AliveMembers, Member("job", rank), tuple(Member("job", other) for other in others))

    @rule(key=KEYS, value=st.binary(max_size=3), overwrite=st.booleans())
    def insert(self, key: str, value: bytes, overwrite: bool) -> None:
        name = "/".join(part for part in key.split("/") if part)
        call = self.play.do(ev.InsertKey, key, value, overwrite)
        if overwrite or name not in self.model:
            self.model[name] = value
            assert self.play.answers[call] is None
        else:
            assert self.play.code(call) is Code.ALREADY_EXISTS

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        name = "/".join(part for part in key.split("/") if part)
        call = self.play.do(ev.GetKey, key)
        assert self.play.answers.get(call) == self.model.get(name)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        name = "/".join(part for part in key.split("/") if part)
        self.play.do(ev.DeleteKey, key)
        self.model = {k: v for k, v in self.model.items() if k != name and not k.startswith(name + "/")}

    @rule(key=KEYS)
    def listing(self, key: str) -> None:
        name = "/".join(part for part in key.split("/") if part)
        call = self.play.do(ev.ListKeys, key)
        assert self.play.answers[call] == [(k, v) for k, v in sorted(self.model.items()) if k.startswith(name + "/")]

    @rule(back=st.integers(0, 8))
    def hang_up(self, back: int) -> None:
        self.play.feed(ev.Forget(self.play.calls - back))

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.play.later(seconds)

    @rule()
    def restart(self) -> None:
        after = self.play.restarted(3)
        assert {k: after.state.keys.value(k) for k in after.state.keys.below("")} == {
            k: v for k, v in self.model.items() if k
        }
        after.state.check_invariants()

    @invariant()
    def sound(self) -> None:
        self.play.state.check_invariants()


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestAnyOrder = AnyOrder.TestCase


class AnyOrderOfRuns(AnyOrder):
    """The same where a run that is over is forgotten at the next one's first registration."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(
            3, heartbeat_timeout_s=10.0, clear_after_shutdown=True, register_timeout_s=20.0, shutdown_timeout_s=15.0
        )

    @rule(rank=RANKS, incarnation=st.integers(1, 2), recoverable=st.sampled_from([None, None, True]))
    def register(self, rank: int, incarnation: int, recoverable: bool | None) -> None:
        self.play.do(ev.Register, Member("job", rank), incarnation, recoverable)
        if len(self.play.state.keys) == 0:
            self.model = {}


AnyOrderOfRuns.TestCase.settings = settings(AnyOrder.TestCase.settings, max_examples=30)
TestAnyOrderOfRuns = AnyOrderOfRuns.TestCase
