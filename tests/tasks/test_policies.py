"""How tasks are run that say so: again after which errors, when, how often; for how long; and their children's end."""

import asyncio
import importlib
import os
import random
import signal
import threading
import time

import pytest

import fastrt
from fastrt.errors import TaskCancelledError, TaskError, TaskTimeoutError
from fastrt.worker import timeouts as worker_timeouts

pytestmark = pytest.mark.usefixtures("rt")
cancel_module = importlib.import_module("fastrt.tasks.cancel")  # the package has a function of that name
SOON_S = 30.0


class Passing(Exception):
    """An error whose cause passes."""


class Lasting(Exception):
    """One whose cause does not."""


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


def note(path, word="x"):
    """Add a line with the time, and say how many there are."""
    with open(path, "a") as file:
        file.write(f"{word} {time.monotonic()}\n")
    return len(times(path))


def times(path):
    with open(path) as file:
        return [float(line.split()[1]) for line in file]


@fastrt.remote
def fail(path, until, kind=Passing):
    if note(path) < until:
        raise kind(f"run before number {until}")
    return "done"


@fastrt.remote
def wait_for(path, gate):
    note(path)
    pause = threading.Event()
    while not os.path.exists(gate):
        pause.wait(0.002)
    return "done"


@fastrt.remote
class Actor:
    def __init__(self):
        self.runs = 0

    @fastrt.method(retry_exceptions=[Passing])
    def fail(self, until, kind=Passing):
        self.runs += 1
        if self.runs < until:
            raise kind(self.runs)
        return self.runs

    @fastrt.method(retry_exceptions=True, retry_delay=0.01)
    def items(self, until):
        self.runs += 1
        yield 1
        if self.runs < until:
            raise Passing(self.runs)
        yield 2


@fastrt.remote
class AsyncActor:
    def __init__(self):
        self.runs = 0

    @fastrt.method(retry_exceptions=True, retry_delay=0.01)
    async def fail(self, until):
        self.runs += 1
        await asyncio.get_running_loop().run_in_executor(None, int)
        if self.runs < until:
            raise Passing(self.runs)
        return self.runs


# ---- again ----


def test_only_named_exceptions_are_retried(tmp_path):
    named = fail.options(retry_exceptions=[Passing, KeyError], max_retries=5)
    assert get(named.remote(tmp_path / "a", 3)) == "done"
    with pytest.raises(Lasting):
        get(named.remote(tmp_path / "b", 3, Lasting))
    assert len(times(tmp_path / "b")) == 1
    with pytest.raises(Passing):
        get(named.options(max_retries=1).remote(tmp_path / "c", 9))
    assert len(times(tmp_path / "c")) == 2
    assert get(fail.options(retry_exceptions=True, max_retries=-1).remote(tmp_path / "d", 30)) == "done"


def test_each_attempt_waits_longer_and_no_worker_waits_with_it(tmp_path):
    slow = fail.options(retry_exceptions=True, retry_delay=0.05, retry_backoff=3, retry_delay_max=0.1, max_retries=9)
    refs = [slow.remote(tmp_path / f"{k}", 4) for k in range(6)]  # more than there are workers
    assert get(refs) == ["done"] * 6
    for k in range(6):
        first, second, third, last = times(tmp_path / f"{k}")
        assert second - first >= 0.05
        assert third - second >= 0.1
        assert last - third >= 0.1


def test_task_that_waits_for_its_next_attempt_can_be_cancelled(tmp_path, wait_until):
    ref = fail.options(retry_exceptions=True, retry_delay=1000, retry_delay_max=1000).remote(tmp_path / "a", 9)
    wait_until((tmp_path / "a").exists, "its first attempt")
    fastrt.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)


def test_actors_calls_run_again_where_they_are():
    actor = Actor.options(max_task_retries=3).remote()
    assert get(actor.fail.remote(3)) == 3
    with pytest.raises(Lasting):
        get(actor.fail.remote(99, Lasting))
    with pytest.raises(TaskError):
        get(actor.fail.remote(99))
    assert get(actor.fail.options(max_task_retries=-1).remote(30)) == 30
    again = Actor.options(max_task_retries=3).remote()
    assert [get(ref) for ref in again.items.remote(3)] == [1, 2]
    assert get(AsyncActor.options(max_task_retries=2).remote().fail.remote(3)) == 3


# ---- for how long ----


def test_task_that_runs_too_long_is_interrupted_and_its_worker_lives(tmp_path):
    @fastrt.remote(timeout=0.5)
    def endless(path):
        try:
            threading.Event().wait(SOON_S)
        finally:
            note(path)

    ref = endless.remote(tmp_path / "a")
    with pytest.raises(TaskTimeoutError, match=r"did not end within its timeout of 0.5 s") as caught:
        get(ref)
    assert isinstance(caught.value, TimeoutError)
    assert len(times(tmp_path / "a")) == 1
    quick = fail.options(timeout=SOON_S)
    assert get([quick.remote(tmp_path / f"q{k}", 0) for k in range(20)]) == ["done"] * 20


def test_timeout_counts_each_attempt_and_can_be_retried(tmp_path):
    @fastrt.remote(timeout=0.1, retry_exceptions=[TimeoutError], max_retries=20)
    def slow_at_first(path):
        if note(path) < 3:
            threading.Event().wait(SOON_S)
        return "done"

    assert get(slow_at_first.remote(tmp_path / "a")) == "done"


@fastrt.remote
class Waiter:
    def __init__(self):
        self.interrupted = 0

    @fastrt.method(timeout=0.5)  # long enough that the call has begun before, on a busy machine too
    def wait(self):
        try:
            threading.Event().wait(SOON_S)
        finally:
            self.interrupted += 1

    def count(self):
        return self.interrupted

    def deaf(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        worker_timeouts._GRACE_S = 0.15
        threading.Event().wait(SOON_S)

    def until(self, path, seconds=SOON_S):
        while seconds > 0 and not os.path.exists(path):
            threading.Event().wait(0.002)
            seconds -= 0.002
        return fastrt.get_runtime_context().task_id

    @fastrt.method(timeout=0.5)
    def first_items(self):
        yield 1
        threading.Event().wait(SOON_S)


def test_call_that_runs_too_long_is_interrupted_and_the_actor_lives():
    waiter = Waiter.remote()
    refs = [waiter.wait.remote(), waiter.wait.options(timeout=0.4).remote()]
    for ref, limit in zip(refs, ("0.5", "0.4"), strict=True):
        with pytest.raises(TaskTimeoutError, match=rf"'Waiter.wait' did not end within its timeout of {limit} s"):
            get(ref)
    assert get(waiter.count.remote()) == 2
    first, last = waiter.first_items.remote()
    assert get(first) == 1
    with pytest.raises(TaskTimeoutError):
        get(last)


def test_call_that_does_not_listen_to_its_timeout_ends_with_the_actors_process():
    waiter = Waiter.options(max_restarts=1).remote()
    with pytest.raises(TaskTimeoutError, match="a call of actor 'Waiter' ran for longer"):
        get(waiter.deaf.options(timeout=0.5).remote())
    assert get(waiter.count.remote()) == 0, "another process"


def test_caller_of_a_call_in_a_thread_is_told_while_that_goes_on(tmp_path):
    waiter = Waiter.options(max_concurrency=2).remote()
    gate = str(tmp_path / "gate")
    late = [waiter.until.options(timeout=0.1).remote(gate) for _ in range(2)]
    for ref in late:
        with pytest.raises(TaskTimeoutError, match="did not end within its timeout"):
            get(ref)
    after = waiter.until.options(timeout=SOON_S).remote(gate)
    assert fastrt.wait([after], timeout=0.05) == ([], [after]), "both threads are busy still"
    (tmp_path / "gate").touch()
    assert get(after)
    assert all(get([waiter.until.remote(gate) for _ in range(20)]))


def test_coroutine_that_takes_too_long_is_cancelled_and_may_run_again():
    @fastrt.remote
    class Sleeper:
        def __init__(self):
            self.begun = 0

        @fastrt.method(timeout=0.1, retry_exceptions=[TimeoutError])
        async def stay(self, times):
            self.begun += 1
            if self.begun <= times:
                await asyncio.Event().wait()
            return self.begun

        @fastrt.method(timeout=0.5)
        async def items(self):
            yield 1
            await asyncio.Event().wait()

    sleeper = Sleeper.options(max_task_retries=3).remote()
    assert get(sleeper.stay.remote(2)) == 3
    with pytest.raises(TaskTimeoutError, match="did not end within its timeout"):
        get(sleeper.stay.options(retry_exceptions=False).remote(100))
    first, last = sleeper.items.remote()
    assert get(first) == 1
    with pytest.raises(TaskTimeoutError):
        get(last)


def test_time_in_the_queue_does_not_count(tmp_path):
    gate = tmp_path / "gate"
    waiting = [wait_for.remote(tmp_path / f"w{k}", gate) for k in range(2)]
    ref = fail.options(timeout=1.0).remote(tmp_path / "a", 0)
    assert fastrt.wait([ref], timeout=1.02) == ([], [ref])
    gate.touch()
    assert get([ref, *waiting]) == ["done"] * 3


@pytest.mark.parametrize("again", [False, True])
def test_task_that_does_not_listen_to_its_timeout_ends_with_its_worker(tmp_path, again):
    @fastrt.remote(timeout=0.05, retry_exceptions=[TimeoutError] if again else False, max_retries=20)
    def deaf(path, again):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        if note(path) == 1 or not again:
            worker_timeouts._GRACE_S = 0.15
            threading.Event().wait(SOON_S)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return "done"

    ref = deaf.remote(tmp_path / "a", again)
    if again:
        assert get(ref) == "done"
        assert len(times(tmp_path / "a")) > 1
    else:
        with pytest.raises(TaskTimeoutError, match="did not end when it was interrupted"):
            get(ref)
        assert len(times(tmp_path / "a")) == 1


# ---- children ----


@fastrt.remote
def parent(folder, depth):
    """Submits a task like itself, down to one that waits for ever, and waits for it."""
    note(f"{folder}/{depth}")
    if depth == 0:
        return fastrt.get(wait_for.remote(f"{folder}/child", f"{folder}/gate"))
    return fastrt.get(parent.remote(folder, depth - 1))


@pytest.mark.parametrize("force", [False, True])
def test_cancel_takes_the_children_with_it(tmp_path, wait_until, force):
    ref = parent.remote(str(tmp_path), 2)
    wait_until((tmp_path / "child").exists, "the last child")
    fastrt.cancel(ref, force=force)
    with pytest.raises(TaskCancelledError):
        get(ref)
    # All workers are free again: the last child, which waits for ever, is gone, too.
    assert get([fail.remote(tmp_path / f"n{k}", 0) for k in range(4)]) == ["done"] * 4


def test_children_can_be_spared(tmp_path, wait_until):
    ref = parent.remote(str(tmp_path), 0)
    wait_until((tmp_path / "child").exists, "the child")
    fastrt.cancel(ref, recursive=False)
    with pytest.raises(TaskCancelledError):
        get(ref)
    (tmp_path / "gate").touch()
    assert get(fail.remote(tmp_path / "n", 0)) == "done"


# ---- force ----


@fastrt.remote(max_retries=0)
def hold(folder, name):
    """Says in which process it runs, and runs until it is let go."""
    note(f"{folder}/{name}-{os.getpid()}")
    pause = threading.Event()
    while not os.path.exists(f"{folder}/{name}"):
        pause.wait(0.002)
    return os.getpid()


@pytest.mark.parametrize("force", [False, True])
def test_signal_that_comes_too_late_does_nothing_to_the_next_task(tmp_path, wait_until, monkeypatch, force):
    """The worker goes on to another task after the canceller has seen the first, and before it sends its signal."""
    doomed = hold.remote(str(tmp_path), "doomed")
    kept = [hold.remote(str(tmp_path), "kept") for _ in range(4)]  # more than there are workers
    wait_until(lambda: any(tmp_path.glob("doomed-*")), "the task that is cancelled")
    interrupt = cancel_module.interrupt
    sent = []

    def interrupt_late(store, pid, force):
        (tmp_path / "doomed").touch()
        wait_until((tmp_path / f"kept-{pid}").exists, "the next task there")
        interrupt(store, pid, force)
        sent.append(pid)

    monkeypatch.setattr(cancel_module, "interrupt", interrupt_late)
    fastrt.cancel(doomed, force=force)
    (tmp_path / "kept").touch()
    assert len(sent) == 1
    assert sent[0] in get(kept)
    assert get(doomed) == sent[0]


def test_force_under_many_tasks_ends_no_worker_that_runs_another():
    @fastrt.remote(max_retries=0)
    def spin(x, seconds):
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        return x

    dice = random.Random(5)
    kept, ended = [], 0
    for x in range(300):
        seconds = dice.choice([0.0001, 0.0003, 0.001])
        doomed = spin.remote(-1, seconds)
        kept += [spin.remote(x, 0.001), spin.remote(x, 0.001)]
        until = time.perf_counter() + seconds * dice.uniform(0.2, 1.5)
        while time.perf_counter() < until:
            pass
        fastrt.cancel(doomed, force=True)
        try:
            get(doomed)
        except TaskCancelledError:
            ended += 1
        if len(kept) > 8:
            assert get(kept) == [y for y in range(x - len(kept) // 2 + 1, x + 1) for _ in range(2)]
            kept = []
    assert ended


# ---- how often in one process ----


@fastrt.remote(max_calls=2)
def where(fails=False):
    if fails:
        raise ValueError("no")
    return os.getpid()


def test_worker_leaves_after_so_many_calls_of_a_function_and_another_takes_its_place():
    seen = get([where.remote() for _ in range(20)])
    assert max(seen.count(pid) for pid in seen) <= 2
    assert len(set(seen)) >= 10
    others = get([fastrt.remote(os.getpid).remote() for _ in range(50)])
    assert len(set(others)) < 10, "other functions do not count"


def test_calls_that_fail_wait_or_yield_count_too(tmp_path):
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            get(where.options(max_calls=1, max_retries=0).remote(True))

    @fastrt.remote(max_calls=1)
    def lead():
        return os.getpid(), fastrt.get([where.options(max_calls=1).remote() for _ in range(6)])

    here, there = get(lead.remote())
    assert len({here, *there}) == 7

    @fastrt.remote(max_calls=1)
    def items():
        yield os.getpid()
        yield os.getpid()

    streams = [[get(ref) for ref in items.remote()] for _ in range(3)]
    assert len({pid for stream in streams for pid in stream}) == 3


def test_worker_that_leaves_keeps_the_delay_of_what_it_is_to_run_again(tmp_path):
    @fastrt.remote(max_calls=1, retry_exceptions=[Passing], retry_delay=0.3, max_retries=1)
    def again(path):
        if note(path) < 2:
            raise Passing
        return os.getpid()

    began = time.monotonic()
    get(again.remote(tmp_path / "a"))
    assert time.monotonic() - began >= 0.3


# ---- wrong use ----


def test_wrong_options_are_refused():
    for options, error, words in (
        ({"retry_exceptions": 5}, TypeError, "list of exception classes"),
        ({"retry_exceptions": []}, TypeError, "list of exception classes"),
        ({"retry_exceptions": [5]}, TypeError, "list of exception classes"),
        ({"retry_exceptions": [KeyboardInterrupt]}, TypeError, "list of exception classes"),
        ({"retry_delay": -1}, ValueError, "retry_delay is -1"),
        ({"retry_delay": "1"}, TypeError, "it must be a number"),
        ({"retry_backoff": 2}, ValueError, "give that, too"),
        ({"retry_delay": 1, "retry_backoff": 0.5}, ValueError, "from 1 to"),
        ({"timeout": 0}, ValueError, "above 0"),
        ({"timeout": True}, TypeError, "it must be a number"),
        ({"max_retries": -2}, ValueError, "max_retries is -2"),
        ({"max_calls": -1}, ValueError, "max_calls is -1"),
        ({"max_calls": 1.5}, TypeError, "max_calls is 1.5"),
    ):
        with pytest.raises(error, match=words):
            fastrt.remote(**options)(note)
    with pytest.raises(ValueError, match="timeout is 0"):
        fastrt.method(timeout=0)(note)
    with pytest.raises(TypeError, match="'max_calls' is not an option of methods"):
        fastrt.method(max_calls=1)
    settings = {"retry_exceptions": [Passing], "retry_delay": 2, "timeout": 3, "max_retries": -1}
    again = fastrt.remote(**settings)(note).options(timeout=4)
    assert again.options()._settings.policy.timeout_s == 4
    assert again.options()._settings.policy.retry_on == (Passing,)
