"""A node leaves its cluster in order: nothing that runs, waits or is kept there is lost."""

import gc
import json
import signal
import sys
import threading

import numpy as np
import pytest

import fastrt
from fastrt.cluster.leaving import ASKS, LEFT, STAYS, WORKS, Leaving, PeerLeaves
from fastrt.errors import ActorDiedError
from fastrt.runtime.nodes import nodes_at
from support.cluster import RunningNode

LARGE = 1 << 20  # bytes of a value that stays where it was made


# ---- decisions ----


def test_node_leaves_once_all_peers_have_answered_its_last_question():
    leaving = Leaving()
    assert (leaving.state, leaving.asked) == (STAYS, 0)
    leaving.leave()
    leaving.leave()
    assert (leaving.state, leaving.asked) == (WORKS, 1)
    assert not leaving.look(False, [1, 1])  # an answer to the first question, which has the peers begin, does not count
    assert not leaving.look(True, [1, 1])
    assert (leaving.state, leaving.asked) == (ASKS, 2)
    assert not leaving.look(True, [2, 1])
    assert leaving.look(True, [2, 2])
    assert leaving.state is LEFT


def test_node_that_has_worked_since_its_question_asks_again():
    leaving = Leaving()
    leaving.leave()
    leaving.look(True, [0])
    assert not leaving.look(False, [2])  # a task came before the peer knew
    assert not leaving.look(True, [2])
    assert (leaving.state, leaving.asked) == (ASKS, 3)
    assert not leaving.look(True, [2])
    assert leaving.look(True, [3])


def test_node_without_peers_leaves_when_its_own_tasks_have_ended():
    leaving = Leaving()
    leaving.leave()
    assert not leaving.look(False, [])
    assert not leaving.look(True, [])
    assert leaving.look(True, [])


def test_question_is_answered_once():
    peer = PeerLeaves()
    assert not peer.must_answer
    peer.hear(2, 0)
    peer.hear(0, 0)
    assert peer.must_answer
    assert peer.answer() == 2
    assert not peer.must_answer
    peer.hear(3, 7)
    assert (peer.must_answer, peer.agreed) == (True, 7)


# ---- real nodes ----


class Nodes:
    """Nodes that come and leave, and a driver on the head's node "one", which has no workers."""

    def __init__(self, runtime_dir, head, wait_until):
        self.runtime_dir, self.head, self._wait_until = runtime_dir, head, wait_until
        self.nodes = {}

    def add(self, name, *options):
        words = ("--num-workers", "2", "--name", name, "--resources", json.dumps({name: 8, "disk": 8}), *options)
        self.nodes[name] = node = RunningNode(self.runtime_dir, "--address", self.head.head, *words)
        self._wait_until(lambda: name in self.names(), f"{name} to join")
        return node

    def names(self):
        return [row["NodeName"] for row in fastrt.nodes()]

    def leave(self, name):
        """Have a node leave; it must end by itself, without a complaint."""
        node = self.nodes.pop(name)
        node.process.send_signal(signal.SIGTERM)
        return node

    def left(self, node, says=""):
        out, err = node.process.communicate(timeout=30)
        assert node.process.returncode == 0, out + err
        assert (says in err) if says else not err, err

    def close(self):
        for node in self.nodes.values():
            node.stop()


@pytest.fixture(scope="module")
def head(runtime_dir):
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "0", "--name", "one")
    yield node
    out, err = node.stop()
    assert node.process.returncode == 0, out + err
    assert "Traceback" not in err, err


@pytest.fixture
def nodes(runtime_dir, head, wait_until):
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        made = Nodes(runtime_dir, head, wait_until)
        try:
            yield made
        finally:
            made.close()
    wait_until(lambda: len(nodes_at(head.note.socket_path)) == 1, "the other nodes to leave")


def node_name():
    here = fastrt.runtime_context().get_node_id()
    return next(row["NodeName"] for row in fastrt.nodes() if row["NodeID"] == here)


@fastrt.remote(max_retries=0)
def count(k, seconds):
    threading.Event().wait(seconds)
    return k


@fastrt.remote(max_retries=0, num_cpus=0.5, resources={"disk": 0.5})
def count_with_demand(k, seconds):
    threading.Event().wait(seconds)
    return k


def test_nodes_join_and_leave_under_load_and_no_task_is_lost(nodes):
    nodes.add("two")
    refs = [task.remote(k, 0.01) for k in range(300) for task in (count, count_with_demand)]
    fastrt.wait(refs, num_returns=40)
    nodes.add("three")
    second = nodes.leave("two")  # with tasks that run, wait for a worker, and wait for resources
    fastrt.wait(refs, num_returns=200)
    nodes.left(second)
    nodes.add("four")
    third = nodes.leave("three")
    assert fastrt.get(refs, timeout=30) == [k for k in range(300) for _ in range(2)]
    nodes.left(third)
    assert sorted(nodes.names()) == ["four", "one"]


@fastrt.remote(max_retries=0, resources={"two": 1})
def make(k):
    return np.full(LARGE, k % 251, np.uint8)


@fastrt.remote(max_retries=0, resources={"two": 1})
def make_inside(k):
    """A value that the task puts, a task that it submits, and one of its own values."""
    slow = count.options(resources={"two": 1}).remote(k, 0.3)
    return [fastrt.put(np.full(LARGE, k, np.uint8)), slow, fastrt.put("small")]


def test_values_that_only_the_leaving_node_has_move(nodes):
    nodes.add("two", "--object-store-memory", "64MiB")
    refs = [make.remote(k) for k in range(90)]  # some of them are in files by now
    (inner, slow, small), spare = fastrt.get(make_inside.remote(7)), make.remote(1)
    del spare
    fastrt.wait(refs, num_returns=90, timeout=30)
    nodes.left(nodes.leave("two"))
    for k, ref in enumerate(refs):
        value = fastrt.get(ref, timeout=60)
        assert value.shape == (LARGE,)
        assert (value == k % 251).all()
    assert (fastrt.get(inner, timeout=60) == 7).all()
    assert fastrt.get([slow, small], timeout=60) == [7, "small"]


@fastrt.remote(max_retries=0, resources={"two": 1})
def items(n):
    for k in range(n):
        threading.Event().wait(0.02)
        yield np.full(LARGE, k, np.uint8) if k % 2 else k


@pytest.mark.long
def test_generator_ends_before_its_node_leaves(nodes):
    nodes.add("two")
    generator = items.options(num_returns="streaming").remote(20)
    found = [fastrt.get(next(generator), timeout=60)]
    leaving = nodes.leave("two")
    found += [fastrt.get(ref, timeout=60) for ref in generator]
    assert [int(np.max(item)) for item in found] == list(range(20))
    nodes.left(leaving)


@fastrt.remote(num_cpus=0.5, resources={"disk": 1})
class Counter:
    def __init__(self):
        self.calls = 0

    def add(self, seconds=0.0, begun=None):
        self.calls += 1
        if begun is not None:
            begun.touch()
        threading.Event().wait(seconds)
        return self.calls, node_name()


def test_actor_that_may_restart_moves_after_its_running_call(nodes, tmp_path, wait_until):
    nodes.add("two")
    counter = Counter.options(max_restarts=1).remote()
    assert fastrt.get(counter.add.remote(), timeout=60) == (1, "two")
    nodes.add("three")
    group = fastrt.placement_group([{"CPU": 1, "disk": 1}])
    assert group.wait(10)
    running = counter.add.remote(0.5, tmp_path / "begun")
    wait_until((tmp_path / "begun").exists, "the call to begin")
    leaving = nodes.leave("two")
    later = [counter.add.remote() for _ in range(3)]
    assert fastrt.get(running, timeout=60) == (2, "two")
    found = fastrt.get(later, timeout=60)
    nodes.left(leaving)
    assert {name for _, name in found} <= {"two", "three"}
    assert fastrt.get(counter.add.remote(), timeout=60)[1] == "three"
    in_group = Counter.options(scheduling_strategy=fastrt.PlacementGroupSchedulingStrategy(group)).remote()
    assert fastrt.get(in_group.add.remote(), timeout=60) == (1, "three")
    fastrt.remove_placement_group(group)


captured = None  # by a function, as a global


def run_functions_that_capture(counter):
    def kinds(calls_itself=False):
        return kinds(False) if calls_itself else (type(counter).__name__, type(captured).__name__)

    function = fastrt.remote(kinds)
    refs = [function.options(resources={name: 1}).remote(True) for name in ("two", "three")]
    assert fastrt.get(refs, timeout=60) == [("ActorHandle", "ActorHandle")] * 2


def test_node_leaves_when_functions_that_captured_its_actor_are_dropped(nodes, monkeypatch):
    for name in ("two", "three"):
        nodes.add(name, "--grace", "20")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "captured", Counter.options(resources={"two": 1}).remote())
        run_functions_that_capture(captured)
    gc.collect()
    nodes.left(nodes.leave("two"))


def test_grace_ends_what_cannot_move(nodes):
    nodes.add("two", "--grace", "1")
    counter = Counter.remote()
    assert fastrt.get(counter.add.remote(), timeout=60) == (1, "two")
    endless = count.options(max_retries=1, resources={"disk": 1}).remote(5, 3.0)
    nodes.add("three")
    nodes.left(nodes.leave("two"), says="node two leaves after its grace of 1 s")
    with pytest.raises(ActorDiedError):
        fastrt.get(counter.add.remote(), timeout=60)
    assert fastrt.get(endless, timeout=60) == 5


@fastrt.remote(max_retries=0, resources={"two": 1})
def hang(path):
    path.touch()
    threading.Event().wait(60)


@pytest.mark.long
def test_second_sigterm_ends_the_node_at_once(nodes, tmp_path, wait_until):
    nodes.add("two")
    ref = hang.remote(tmp_path / "begun")
    wait_until((tmp_path / "begun").exists, "the task to begin")
    leaving = nodes.leave("two")
    with pytest.raises(fastrt.errors.GetTimeoutError):
        fastrt.get(ref, timeout=0.3)
    assert leaving.process.poll() is None
    leaving.process.send_signal(signal.SIGTERM)
    nodes.left(leaving)
    with pytest.raises(fastrt.errors.WorkerCrashedError):
        fastrt.get(ref, timeout=60)


@pytest.mark.long
def test_uplink_that_is_killed_while_its_node_leaves_is_replaced(nodes):
    nodes.add("two")
    refs = [make.remote(k) for k in range(5)]
    fastrt.wait(refs, num_returns=5, timeout=60)
    long = count.options(max_retries=2, resources={"disk": 1}).remote(3, 1.0)
    leaving = nodes.leave("two")
    leaving.kill_child("fastrt.runtime.uplink")
    for k, ref in enumerate(refs):
        assert (fastrt.get(ref, timeout=60) == k).all()
    nodes.add("three")
    assert fastrt.get(long, timeout=60) == 3
    nodes.left(leaving, says="the uplink of this node ended; another one is started")
