"""Tasks, calls and generators whose process was killed: they end once nothing refers to their results."""

import os
import signal
import threading

import pytest

import fastrt
from fastrt.util.state import list_actors, list_tasks


@pytest.fixture(scope="module")
def rt(runtime_dir):
    with fastrt.init(3, "64MiB", runtime_dir=runtime_dir, resources={"gate": 1}) as runtime:
        yield runtime


def get(refs):
    return fastrt.get(refs, timeout=30)


@fastrt.remote
def hang(value=None):
    threading.Event().wait()


@fastrt.remote
def touch(path):
    with open(path, "w"):
        return path


@fastrt.remote(resources={"gate": 1})
def gated(value):
    return value


def say(path):
    """Write this process's number to a file that then exists as a whole."""
    with open(path + "_", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + "_", path)


@fastrt.remote(resources={"gate": 1})
class Gate:
    def pid(self):
        return os.getpid()


@fastrt.remote
class Keeper:
    def __init__(self):
        self.kept = []

    def keep(self, box):
        self.kept += box

    def take(self):
        return self.kept.pop()

    def hang(self):
        threading.Event().wait()

    def count(self):
        return len(self.kept)


def closed_gate():
    """Start an actor: no task with the resource "gate" runs while it lives."""
    actor = Gate.remote()
    get(actor.pid.remote())
    return actor


def kill(path, wait_until, ref=None):
    wait_until(path.exists, "the process to have submitted all")
    os.kill(int(path.read_text()), signal.SIGKILL)
    if ref is not None:
        with pytest.raises(fastrt.WorkerCrashedError):
            get(ref)


def named(name):
    return list_tasks(name=name)


@fastrt.remote(max_retries=0)
def leave(path, keeper):
    """Submit tasks that wait, some in a chain, one that runs, and one whose reference another process gets."""
    waiting = gated.options(name="left").remote(1)
    chain = [waiting]
    for _ in range(3):
        chain.append(gated.options(name="left").remote(chain[-1]))
    running = hang.options(name="left").remote()
    kept = gated.options(name="kept").remote(5)
    fastrt.get(keeper.keep.remote([kept]))
    say(path)
    fastrt.get(running)


def test_tasks_of_a_killed_worker_end_unless_another_process_has_a_reference(rt, tmp_path, wait_until):
    gate = closed_gate()
    keeper = Keeper.remote()
    left = leave.remote(str(tmp_path / "pid"), keeper)
    wait_until(lambda: len(named("left")) == 5, "the tasks to be submitted")
    kill(tmp_path / "pid", wait_until, left)
    wait_until(lambda: not named("left"), "the tasks to end")
    assert len(named("kept")) == 1
    fastrt.kill(gate)
    assert get(get(keeper.take.remote())) == 5


def test_kept_task_ends_with_the_last_reference(rt, tmp_path, wait_until):
    gate = closed_gate()
    keeper = Keeper.remote()
    left = leave.remote(str(tmp_path / "pid"), keeper)
    kill(tmp_path / "pid", wait_until, left)
    wait_until(lambda: not named("left"), "the tasks to end")
    assert len(named("kept")) == 1
    fastrt.kill(keeper)
    wait_until(lambda: not named("kept"), "the task to end with the process that had the reference")
    fastrt.kill(gate)


@fastrt.remote
def forget(path):
    gated.options(name="forgotten").remote(0)
    say(path)


def test_task_that_nothing_refers_to_goes_on_while_its_process_lives(rt, tmp_path, wait_until):
    gate = closed_gate()
    get(forget.remote(str(tmp_path / "pid")))
    gated.options(name="forgotten").remote(0)  # the driver's
    wait_until(lambda: len(named("forgotten")) == 2, "both to be submitted")
    assert not fastrt.wait([gate.pid.remote()], timeout=2)[1]
    assert len(named("forgotten")) == 2
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: len(named("forgotten")) == 1, "the task of the killed process to end")
    fastrt.kill(gate)
    wait_until(lambda: not named("forgotten"), "the other one to run")


def test_task_of_a_worker_that_has_ended_by_itself_runs(rt, tmp_path, wait_until):
    gate = closed_gate()
    get(forget.options(max_calls=1).remote(str(tmp_path / "pid")))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the worker to end")
    path = str(tmp_path / "ran")
    get(after.options(max_calls=1).remote(path, str(tmp_path / "pid2")))
    pid = int((tmp_path / "pid2").read_text())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the other worker to end")
    fastrt.kill(gate)
    wait_until(lambda: os.path.exists(path), "the task to run")


@fastrt.remote
def after(path, pid):
    touch.options(resources={"gate": 1}).remote(path)
    say(pid)


@fastrt.remote
def stay(path):
    gated.options(name="spared").remote(0)
    say(path)
    hang_on()


def hang_on():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Event().wait()


def test_cancel_by_force_spares_what_the_task_has_submitted_if_it_is_not_recursive(rt, tmp_path, wait_until):
    gate = closed_gate()
    ref = stay.remote(str(tmp_path / "pid"))
    wait_until((tmp_path / "pid").exists, "the task to run")
    fastrt.cancel(ref, force=True, recursive=False)
    with pytest.raises(fastrt.TaskCancelledError):
        get(ref)
    assert not fastrt.wait([gate.pid.remote()], timeout=2)[1]
    assert len(named("spared")) == 1
    fastrt.kill(gate)
    wait_until(lambda: not named("spared"), "the task to run")


@fastrt.remote(max_retries=0)
def call(path, keeper):
    own = Keeper.options(name="own").remote()
    own.hang.remote()
    own.count.remote()
    keeper.hang.remote()
    keeper.count.remote()
    say(path)
    threading.Event().wait()


def test_actor_without_a_handle_ends_and_calls_of_others_go_on(rt, tmp_path, wait_until):
    keeper = Keeper.options(name="other").remote()
    ref = call.remote(str(tmp_path / "pid"), keeper)
    wait_until((tmp_path / "pid").exists, "the calls to be made")
    wait_until(lambda: [row["calls"] for row in list_actors(name="o*")] == [2, 2], "the calls to be there")
    kill(tmp_path / "pid", wait_until, ref)
    wait_until(lambda: not list_actors(name="own"), "the actor without a handle to end")
    assert not fastrt.wait([touch.remote(str(tmp_path / "x"))], timeout=1)[1]
    (row,) = list_actors(name="other")
    assert row["calls"] == 2
    fastrt.kill(keeper)


@fastrt.remote
def count_up(path):
    try:
        k = 0
        while True:
            yield k
            k += 1
            threading.Event().wait(0.01)
    finally:
        with open(path, "w"):
            pass


@fastrt.remote(max_retries=0)
def consume(path, closed):
    items = count_up.options(name="items").remote(closed)
    limited = count_up.options(name="items", generator_backpressure=2).remote(closed + "2")
    queued = count_up.options(name="items", resources={"gate": 1}).remote(closed + "3")
    fastrt.get([next(items), next(limited)])
    say(path)
    threading.Event().wait()
    del queued


def test_generators_whose_consumer_was_killed_are_closed(rt, tmp_path, wait_until):
    gate = closed_gate()
    ref = consume.remote(str(tmp_path / "pid"), str(tmp_path / "closed"))
    kill(tmp_path / "pid", wait_until, ref)
    wait_until((tmp_path / "closed").exists, "the generator to be closed")
    wait_until((tmp_path / "closed2").exists, "the other one to be closed")
    wait_until(lambda: not named("items"), "the third not to start")
    assert not (tmp_path / "closed3").exists()
    fastrt.kill(gate)
