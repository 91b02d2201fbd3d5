"""Actors that wait for resources or arguments and lose their last handle: they are ended, and leave nothing."""

import os
import signal
import threading

import pytest

import fastrt
from fastrt.errors import ActorNotFoundError
from fastrt.util.state import list_actors


@pytest.fixture(scope="module")
def rt(runtime_dir):
    with fastrt.init(2, "64MiB", runtime_dir=runtime_dir, resources={"license": 1}) as runtime:
        yield runtime


@fastrt.remote(resources={"license": 1})
class Licensed:
    def __init__(self, value=None):
        self.value = value

    def pid(self):
        return os.getpid()


@fastrt.remote
def forever(path):
    with open(path, "w"):
        threading.Event().wait()


def get(refs):
    return fastrt.get(refs, timeout=30)


def is_known(name):
    return bool(list_actors(name=name))


def test_waiting_actor_ends_with_its_last_handle_and_its_name_is_free(rt, wait_until):
    first = Licensed.options(name="first").remote()
    get(first.pid.remote())
    second = Licensed.options(name="second").remote()
    wait_until(lambda: is_known("second"), "the actor to be listed")
    box = fastrt.put([second])  # a handle in a value is one
    del second
    for _ in range(3):
        assert is_known("second")
        assert not fastrt.wait([first.pid.remote()], timeout=0.5)[1]
    del box
    wait_until(lambda: not is_known("second"), "the actor to end")
    with pytest.raises(ActorNotFoundError):
        fastrt.get_actor("second")
    third = Licensed.options(name="second").remote()
    fastrt.kill(first)
    get(third.pid.remote())


def test_waiting_actor_with_a_call_goes_on_without_a_handle(rt, wait_until):
    first = Licensed.remote()
    get(first.pid.remote())
    pid = Licensed.options(name="called").remote().pid.remote()
    assert fastrt.wait([pid], timeout=2)[0] == []
    assert is_known("called")
    del first
    get(pid)
    wait_until(lambda: not is_known("called"), "the actor to end")


def test_actor_that_waits_for_an_argument_ends_with_its_last_handle_and_lets_go_of_the_argument(
    rt, tmp_path, wait_until
):
    value = forever.remote(str(tmp_path / "runs"))
    wait_until((tmp_path / "runs").exists, "the task to run")
    actor = Licensed.options(name="needy").remote(value)
    wait_until(lambda: is_known("needy"), "the actor to be listed")
    del actor
    wait_until(lambda: not is_known("needy"), "the actor to end")
    from fastrt._core.objects import remote
    from fastrt.store import client

    def is_ours():
        return remote.only_here(client.require().client, [value]) == [0]

    wait_until(is_ours, "the daemon to drop the argument")
    fastrt.cancel(value)


@fastrt.remote(max_retries=0)
def make(path):
    actor = Licensed.options(name="made").remote()
    calls = [actor.pid.remote() for _ in range(3)]
    with open(path + "_", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + "_", path)
    return fastrt.get(calls)


def test_waiting_actor_of_a_killed_worker_ends_with_its_calls(rt, tmp_path, wait_until):
    first = Licensed.remote()
    get(first.pid.remote())
    made = make.remote(str(tmp_path / "pid"))
    wait_until((tmp_path / "pid").exists, "the actor to be made")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(fastrt.WorkerCrashedError):
        get(made)
    wait_until(lambda: not is_known("made"), "the actor to end")
    get(first.pid.remote())
