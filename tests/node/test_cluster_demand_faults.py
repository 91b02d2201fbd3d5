"""Tasks with demands in flight while processes and nodes of their cluster are killed."""

import fcntl
import io
import os
import re
import sys
import threading

import pytest

import fastrt
from support.amounts import counted

pytestmark = pytest.mark.long
MORE = ("--num-workers", "2", "--resources", '{"gpu": 1}')


@pytest.fixture
def pair(start, runtime_dir):
    """A head with one worker, a node with two and a gpu, and this process at the head."""
    head = start("--head", "--port", "0", "--num-workers", "1", "--name", "one")
    other = start("--address", head.head, "--name", "two", *MORE)
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        yield head, other


@fastrt.remote(num_gpus=1, max_retries=50)
def alone(path, k):
    """Fails when another task has this node's gpu."""
    from fastrt.store import client

    with open(f"{path}-{client.require().client.segment.session}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of by the kernel, however this ends
        threading.Event().wait(0.005)
    return k


@pytest.mark.parametrize("module", ["fastrt.cluster.head", "fastrt.runtime.uplink", "fastrt.node.__main__"])
def test_gpu_is_never_used_twice_and_no_task_is_lost(pair, tmp_path, wait_until, module):
    refs = [alone.remote(str(tmp_path / "gpu"), k) for k in range(150)]
    victims = pair[:1] if module == "fastrt.cluster.head" else pair
    for number, victim in enumerate(victims):
        assert fastrt.wait(refs, num_returns=30 * (number + 1), timeout=40)[1]
        dead = victim.kill_child(module)
        refs += [alone.remote(str(tmp_path / "gpu"), k) for k in range(len(refs), len(refs) + 20)]
        wait_until(lambda victim=victim, dead=dead: victim.child(module) not in (None, dead), "another", 30)
    assert fastrt.get(refs, timeout=60) == list(range(len(refs)))
    wait_until(
        lambda: counted(fastrt.available_resources()) == {"CPU": 3.0, "GPU": 1.0}, "everything to be free again", 30
    )


def test_lost_nodes_tasks_wait_for_the_next_that_has_what_they_need(pair, start, tmp_path, wait_until):
    refs = [alone.remote(str(tmp_path / "gpu"), k) for k in range(100)]
    fastrt.wait(refs, num_returns=10, timeout=30)
    pair[1].kill()
    wait_until(lambda: counted(fastrt.cluster_resources()) == {"CPU": 1.0}, "the loss to be known", 30)
    assert fastrt.wait(refs, num_returns=len(refs), timeout=0.2)[1]
    start("--address", pair[0].head, "--name", "three", *MORE)
    assert fastrt.get(refs, timeout=60) == list(range(100))


def test_next_head_knows_all_nodes_and_what_is_in_use_there(pair, start, tmp_path, wait_until):
    @fastrt.remote(num_gpus=1)
    def hold(path):
        while not os.path.exists(path):
            threading.Event().wait(0.005)
        return 1

    held = hold.remote(str(tmp_path / "gate"))
    wait_until(lambda: fastrt.available_resources().get("GPU") is None, "the gpu to be taken", 30)
    dead = pair[0].kill_child("fastrt.cluster.head")
    wait_until(lambda: pair[0].child("fastrt.cluster.head") not in (None, dead), "another head", 30)
    start("--address", pair[0].head, "--name", "three", *MORE)
    wait_until(lambda: counted(fastrt.cluster_resources()) == {"CPU": 5.0, "GPU": 2.0}, "all three", 30)
    wait_until(lambda: fastrt.available_resources().get("GPU") == 1.0, "what is in use", 30)
    assert fastrt.get([alone.remote(str(tmp_path / "gpu"), k) for k in range(10)], timeout=30) == list(range(10))
    (tmp_path / "gate").touch()
    assert fastrt.get(held, timeout=30) == 1


def test_what_no_node_has_is_told_and_waits_for_a_node_that_has_it(pair, start, wait_until, monkeypatch):
    @fastrt.remote(num_gpus=2, name="needs_two")
    def needs_two():
        return 2

    heard = io.StringIO()  # capsys loses what another thread writes while it is read
    monkeypatch.setattr(sys, "stderr", heard)
    refs = [needs_two.remote() for _ in range(3)]
    wait_until(lambda: "needs_two" in heard.getvalue(), "a warning", 20)
    words = heard.getvalue()
    there = r"\(one: CPU 1, memory [\d,.]+ \w+; two: CPU 2, GPU 1, memory [\d,.]+ \w+\)"
    assert re.search(rf"demands CPU 1, GPU 2, which no node has {there}; it waits", words), words
    assert fastrt.wait(refs, timeout=0.2)[0] == []
    start("--address", pair[0].head, "--name", "three", "--num-workers", "1", "--resources", '{"GPU": 2}')
    assert fastrt.get(refs, timeout=30) == [2, 2, 2]
