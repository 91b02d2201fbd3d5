"""fastrt.cancel: tasks that wait, are queued, run, sleep, refuse, or have ended."""

import os
import signal
import threading

import pytest

import fastrt
from fastrt.errors import TaskCancelledError

pytestmark = pytest.mark.usefixtures("rt")


@fastrt.remote
def until(started, gate, value=None):
    """Say that it runs by a file with its pid, and end when another file is there."""
    with open(started + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(started + ".new", started)
    pause = threading.Event()
    while not os.path.exists(gate):
        pause.wait(0.002)
    return value


@fastrt.remote
def echo(x=None):
    return x


class Task:
    """A running task and its two files."""

    def __init__(self, folder, name, function=until):
        self.started, self.gate = folder / f"{name}.started", folder / f"{name}.gate"
        self.ref = function.remote(str(self.started), str(self.gate), name)

    @property
    def runs(self):
        return self.started.exists()


@pytest.fixture
def start(tmp_path, wait_until):
    """Start tasks that run until the end of the test at the latest."""
    tasks = []

    def start(name, function=until, wait=True):
        tasks.append(Task(tmp_path, name, function))
        if wait:
            wait_until(lambda: tasks[-1].runs, f"{name} to run")
        return tasks[-1]

    yield start
    for task in tasks:
        task.gate.touch()
    tasks.clear()  # pytest keeps the function above, and so the references, until the last fixture is done


def is_cancelled(ref):
    with pytest.raises(TaskCancelledError):
        fastrt.get(ref, timeout=60)
    return True


def test_queued_task_never_runs(start):
    first, second = start("a"), start("b")
    third = start("c", wait=False)
    fastrt.cancel(third.ref)
    assert is_cancelled(third.ref)
    first.gate.touch()
    second.gate.touch()
    assert fastrt.get([first.ref, second.ref, echo.remote(1)], timeout=60) == ["a", "b", 1]
    assert not third.runs


def test_waiting_task_never_runs_and_its_argument_lives_on(start):
    task = start("a")
    waiting = echo.remote(task.ref)
    fastrt.cancel(waiting)
    assert is_cancelled(waiting)
    task.gate.touch()
    assert fastrt.get(task.ref, timeout=60) == "a"


def test_dependents_of_a_cancelled_task_fail_with_it(start):
    first = start("a")
    chain = [first.ref]
    for _ in range(20):
        chain.append(echo.remote(chain[-1]))
    fastrt.cancel(first.ref)
    assert all(is_cancelled(ref) for ref in chain)


def test_running_task_is_interrupted_and_its_worker_lives(start):
    task = start("a")
    pid = int(task.started.read_text())
    fastrt.cancel(task.ref)
    assert is_cancelled(task.ref)
    os.kill(pid, 0)
    assert fastrt.get([echo.remote(i) for i in range(10)], timeout=60) == list(range(10))


def test_error_of_a_task_that_ran_is_a_task_error_and_that_of_a_queued_one_is_not(start):
    first, second = start("a"), start("b")
    queued, dependent = echo.remote(), echo.remote(first.ref)
    for ref in (queued, first.ref):
        fastrt.cancel(ref)
    with pytest.raises(TaskCancelledError, match="before it started") as caught:
        fastrt.get(queued, timeout=60)
    assert not isinstance(caught.value, fastrt.TaskError)
    with pytest.raises(fastrt.TaskError, match="cancelled while it ran") as caught:
        fastrt.get(first.ref, timeout=60)
    assert isinstance(caught.value, TaskCancelledError)
    assert caught.value.task_name == "until"
    assert caught.value.pid == int(first.started.read_text())
    with pytest.raises(fastrt.TaskError, match=r"(?s)'echo'.*arguments could not be computed.*'until'"):
        fastrt.get(dependent, timeout=60)
    fastrt.cancel(second.ref, force=True)
    assert is_cancelled(second.ref)


def test_running_task_is_killed_with_force(start):
    @fastrt.remote
    def stubborn(started, gate, value=None):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        until.function(started, gate, value)

    task = start("a", stubborn)
    pid = int(task.started.read_text())
    fastrt.cancel(task.ref)
    assert fastrt.wait([task.ref], timeout=0.05) == ([], [task.ref])
    fastrt.cancel(task.ref, force=True)
    assert is_cancelled(task.ref)
    assert not os.path.exists(f"/proc/{pid}/environ") or int(task.started.read_text()) == pid


def test_task_asleep_in_get_is_interrupted(start):
    inner = start("a")

    @fastrt.remote
    def outer(started, gate, value, box):
        open(started, "w").close()
        return fastrt.get(box[0])

    outer = start("b", WithMore(outer, [inner.ref]))
    fastrt.cancel(outer.ref)
    assert is_cancelled(outer.ref)
    inner.gate.touch()
    assert fastrt.get(inner.ref, timeout=60) == "a"


class WithMore:
    """A remote function with further arguments at the end."""

    def __init__(self, function, *more):
        self.function, self.more = function, more

    def remote(self, *args):
        return self.function.remote(*args, *self.more)


def test_cancelled_task_runs_its_cleanup_code(start, tmp_path):
    @fastrt.remote
    def careful(started, gate, value):
        try:
            until.function(started, gate)
        finally:
            open(gate + ".cleaned", "w").close()

    task = start("a", careful)
    fastrt.cancel(task.ref)
    assert is_cancelled(task.ref)
    assert (tmp_path / "a.gate.cleaned").exists()


def test_task_that_catches_the_interrupt_and_returns_has_its_value(start):
    @fastrt.remote
    def polite(started, gate, value):
        try:
            until.function(started, gate)
        except KeyboardInterrupt:
            return "left"

    task = start("a", polite)
    fastrt.cancel(task.ref)
    assert fastrt.get(task.ref, timeout=60) == "left"


def test_cancelled_task_is_not_retried(start):
    task = start("a", until.options(max_retries=5, retry_exceptions=True))
    fastrt.cancel(task.ref, force=True)
    assert is_cancelled(task.ref)


def test_every_result_of_a_cancelled_task_says_so(start):
    task = start("a", until.options(num_returns=3))
    fastrt.cancel(task.ref[1])
    assert all(is_cancelled(ref) for ref in task.ref)


def test_what_is_there_already_is_left_alone(rt):
    ref, put = echo.remote(1), fastrt.put(2)
    fastrt.get(ref)
    for _ in range(2):
        for one in (ref, put):
            fastrt.cancel(one)
            fastrt.cancel(one, force=True)
    assert fastrt.get([ref, put]) == [1, 2]


def test_cancelling_twice_and_from_threads_is_harmless(start):
    tasks = [start("a"), start("b")] + [start(f"q{i}", wait=False) for i in range(50)]
    threads = [threading.Thread(target=lambda: [fastrt.cancel(task.ref) for task in reversed(tasks)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(is_cancelled(task.ref) for task in tasks)


def test_late_interrupt_does_not_hit_the_next_task(rt):
    refs = []
    for i in range(300):
        refs.append((i, echo.remote(i)))
        fastrt.cancel(echo.remote(-1))
    assert [fastrt.get(ref, timeout=60) for _, ref in refs] == [i for i, _ in refs]
