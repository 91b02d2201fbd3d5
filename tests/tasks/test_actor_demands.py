"""Actors that demand something, on one node: what they take, how they wait for it, and when it is free again."""

import os
import signal

import pytest

import fastrt
from fastrt.errors import ActorDiedError, ActorUnschedulableError
from support.amounts import counted


@pytest.fixture(scope="module")
def rt(runtime_dir):
    with fastrt.init(2, "64MiB", runtime_dir=runtime_dir, resources={"license": 2}) as runtime:
        yield runtime


@fastrt.remote(resources={"license": 1.5})
class Licensed:
    def pid(self):
        return os.getpid()


@fastrt.remote
def one():
    return 1


def get(refs):
    return fastrt.get(refs, timeout=30)


def is_free(**amounts):
    return counted(fastrt.available_resources()) == {"CPU": 2.0, "license": 2.0, **amounts}


def test_actor_holds_what_it_demands_while_it_lives(rt, wait_until):
    first = Licensed.remote()
    pid = get(first.pid.remote())
    assert is_free(license=0.5)
    small = Licensed.options(resources={"license": 0.5}, num_cpus=0.5).remote()
    get(small.pid.remote())
    assert counted(fastrt.available_resources()) == {"CPU": 1.5}
    second = Licensed.options(max_restarts=1).remote()
    waiting = second.pid.remote()
    assert fastrt.wait([waiting], timeout=0)[0] == []
    os.kill(pid, signal.SIGKILL)
    before = get(waiting)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: fastrt.available_resources().get("CPU") == 1.5, "the daemon to see it")
    late = second.pid.options(max_task_retries=3).remote()
    assert get(late) != before
    fastrt.kill(second)
    del small
    wait_until(is_free, "everything to be free")


def test_actors_and_tasks_wait_for_each_other_but_leave_a_worker_to_plain_tasks(rt, wait_until):
    both = [Licensed.options(num_cpus=1, resources=None).remote() for _ in range(2)]
    assert len(set(get([actor.pid.remote() for actor in both]))) == 2
    assert counted(fastrt.available_resources()) == {"license": 2.0}
    assert get([one.remote() for _ in range(20)]) == [1] * 20
    task = one.options(num_cpus=0.5).remote()
    assert fastrt.wait([task], timeout=0)[0] == []
    both.pop()
    assert get(task) == 1


@fastrt.remote(resources={"license": 2})
class Built:
    def __init__(self, first, second=0):
        self.sum = first + second

    def get(self):
        return self.sum


@fastrt.remote(resources={"license": 2}, num_cpus=2)
def licensed(value):
    return value


def test_actor_takes_nothing_before_its_arguments_exist(rt, wait_until):
    """The tasks that make them need all that it will hold."""
    actor = Built.remote(licensed.remote(4), second=licensed.remote(5))
    assert get(actor.get.remote()) == 9
    del actor
    wait_until(is_free, "everything to be free")


@fastrt.remote
def read(fifo):
    return len(fifo.read_text())  # once it is written


def test_actor_that_is_killed_before_its_arguments_exist_is_forgotten(rt, tmp_path, wait_until):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    argument = read.remote(fifo)
    actor = Built.remote(argument)
    call = actor.get.remote()
    assert fastrt.available_resources()["license"] == 2
    fastrt.kill(actor)
    with pytest.raises(ActorDiedError):
        get(call)
    assert get(Built.remote(1).get.remote()) == 1
    fifo.write_text("now")
    assert get(argument) == 3
    del actor, call, argument
    wait_until(is_free, "everything to be free")


def test_what_no_node_has_is_told_by_every_call(rt):
    actor = Licensed.options(num_gpus=4).remote()
    words = r"Licensed is dead: it demands GPU 4, license 1.5, which no node has"
    with pytest.raises(ActorUnschedulableError, match=words):
        get(actor.pid.remote())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_cpus": -1}, ValueError, "num_cpus=-1"),
        ({"resources": {"CPU": 1}}, ValueError, "say num_cpus"),
        ({"scheduling": 3}, TypeError, "scheduling is 3; it must be 'spread', 'pack', a node's name"),
        ({"scheduling": "spread", "scheduling_strategy": "SPREAD"}, TypeError, "two names for one option"),
        ({"memory": -1}, ValueError, "memory=-1: must be a number of bytes"),
    ],
)
def test_wrong_demands_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        Licensed.options(**{"resources": None, **options})
