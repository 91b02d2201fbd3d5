"""`max_pending_calls` of an actor: a process that has so many unended calls of it is refused another."""

import os
import threading

import pytest

import fastrt
from fastrt.errors import PendingCallsError, TaskError

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 30.0


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote(max_concurrency=2)
class Gate:
    def __init__(self):
        self.is_open = threading.Event()

    def wait(self):
        self.is_open.wait()
        return "open"

    def open(self):
        self.is_open.set()


@fastrt.remote(max_pending_calls=3)
class Limited:
    def wait_for(self, boxed):
        return get(boxed[0])

    def echo(self, value=None):
        return value

    @fastrt.method(num_returns=2)
    def pair(self):
        return 1, 2

    def count(self):
        yield from range(3)

    def fail(self):
        raise KeyError("no")


def fill(actor, gate):
    """Make calls until the actor has as many as it takes; the first one waits for the gate."""
    return [actor.wait_for.remote([gate.wait.remote()]), actor.echo.remote(1), actor.echo.remote(2)]


def test_call_beyond_the_limit_is_refused_until_calls_have_ended():
    gate = Gate.remote()
    actor = Limited.remote()
    waiting = fill(actor, gate)
    words = r"Limited.echo.remote: 3 calls .* have not ended, and its max_pending_calls is 3; wait"
    with pytest.raises(PendingCallsError, match=words):
        actor.echo.remote(3)
    with pytest.raises(fastrt.exceptions.PendingCallsLimitExceeded):
        actor.__fastrt_call__.remote(repr)
    get(gate.open.remote())
    assert get(waiting) == ["open", 1, 2]
    assert [get(actor.echo.remote(k)) for k in range(20)] == list(range(20))


def test_calls_of_every_kind_count():
    gate = Gate.remote()
    actor = Limited.remote()
    held = [actor.wait_for.remote([gate.wait.remote()]), actor.pair.remote(), actor.count.remote()]
    with pytest.raises(PendingCallsError):
        actor.echo.remote()
    get(gate.open.remote())
    assert get([held[0], *held[1], *list(held[2])]) == ["open", 1, 2, 0, 1, 2]
    get(held[2].completed())
    with pytest.raises(TaskError, match="no"):
        get(actor.fail.remote())
    del held


def test_calls_whose_results_were_dropped_count():
    gate = Gate.remote()
    actor = Limited.remote()
    actor.wait_for.remote([gate.wait.remote()])
    assert actor.echo.options(num_returns=0).remote() is None
    actor.echo.remote()
    with pytest.raises(PendingCallsError):
        actor.echo.remote()
    get(gate.open.remote())


def test_limit_is_the_actors_for_all_handles_of_a_process():
    gate = Gate.remote()
    actor = Limited.options(name="limited", max_pending_calls=2).remote()
    waiting = actor.wait_for.remote([gate.wait.remote()])
    others = [fastrt.get_actor("limited"), get(fastrt.put([actor]))[0]]
    waiting = [waiting, others[0].echo.remote(7)]
    for handle in (actor, *others):
        with pytest.raises(PendingCallsError, match="max_pending_calls is 2"):
            handle.echo.options(max_task_retries=1).remote()
    get(gate.open.remote())
    assert get(waiting) == ["open", 7]


def test_each_process_counts_for_itself():
    gate = Gate.remote()
    actor = Limited.remote()
    waiting = fill(actor, gate)

    @fastrt.remote
    def call(handle):
        made = [handle.echo.remote(k) for k in range(3)]
        try:
            handle.echo.remote()
        except PendingCallsError:
            return made
        return None

    made = get(call.remote(actor))
    get(gate.open.remote())
    assert get([*waiting, *made]) == ["open", 1, 2, 0, 1, 2]


def test_forked_child_counts_for_itself():
    gate = Gate.remote()
    actor = Limited.remote()
    waiting = fill(actor, gate)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            actor.echo.remote(3)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    get(gate.open.remote())
    assert get(waiting) == ["open", 1, 2]


def test_calls_of_a_dead_actor_end():
    actor = Limited.remote()
    get(actor.echo.remote())
    fastrt.kill(actor)
    for _ in range(10):
        with pytest.raises(fastrt.errors.ActorDiedError):
            get(actor.echo.remote())


@pytest.mark.parametrize("limit", [0, -2, 1 << 31])
def test_wrong_limit_is_refused(limit):
    with pytest.raises(ValueError, match=r"it must be from 1 to .*, or -1 for no limit"):
        Limited.options(max_pending_calls=limit)


def test_no_limit_is_the_default():
    gate = Gate.remote()
    actor = Limited.options(max_pending_calls=-1).remote()
    waiting = [*fill(actor, gate), *[actor.echo.remote(k) for k in range(100)]]
    get(gate.open.remote())
    assert get(waiting[3:]) == list(range(100))
    assert type(actor.echo) is type(gate.open)
