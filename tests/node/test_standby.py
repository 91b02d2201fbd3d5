"""A standby head: which head a node connects to, and a cluster whose head is lost and comes back."""

import pytest

import fastrt
from fastrt.cluster.head_link import Heads
from fastrt.net.grpc.identity import new_token
from fastrt.node.daemon import sweep_sessions
from fastrt.runtime.nodes import nodes_at
from support.cluster import RunningNode

PATIENCE_S = 40.0


def test_first_head_is_tried_alone_until_it_was_lost_for_some_time():
    heads = Heads("first")
    heads.standbys = ["a", "b"]
    tried = []
    for now in (10.0, 11.0, 13.5, 14.0, 14.5, 15.0):
        tried.append(heads.address())
        heads.failed(now, False)
    assert tried == ["first", "first", "first", "a", "b", "first"]


def test_first_head_that_answers_is_tried_first_again():
    heads = Heads("first")
    heads.standbys = ["a"]
    heads.failed(0.0, False)
    heads.failed(5.0, False)
    assert heads.address() == "a"
    heads.joined()
    assert heads.address() == "first"
    heads.failed(6.0, False)  # it was not back: the standby is next at once
    assert heads.address() == "a"
    heads.failed(7.0, False)
    heads.joined()
    heads.failed(8.0, False)
    assert heads.address() == "first"


def test_standby_that_is_not_in_charge_yet_is_not_passed_over():
    heads = Heads("first")
    heads.standbys = ["a", "b"]
    heads.failed(0.0, False)
    for now in (5.0, 6.0):
        heads.failed(now, False)
        assert heads.address() == "a"
        heads.failed(now + 0.5, True)
        assert heads.address() == "first"


def names(node):
    """The names of the nodes that a node knows."""
    return sorted(row["NodeName"] for row in nodes_at(node.note.socket_path))


@fastrt.remote
def add(a, b):
    return a + b


def test_standby_takes_over_and_gives_the_cluster_back(runtime_dir, monkeypatch, wait_until, free_port):
    monkeypatch.setenv("FASTRT_TOKEN", new_token())
    first = RunningNode(runtime_dir, "--head", "--port", str(free_port), "--num-workers", "1", "--name", "one")
    more = ("--address", first.head, "--num-workers")
    nodes = [
        RunningNode(runtime_dir, *more, "1", "--name", "two", "--standby", "--port", "0"),
        RunningNode(runtime_dir, *more, "0", "--name", "three"),
    ]
    try:
        wait_until(lambda: all(len(names(node)) == 3 for node in nodes), "all nodes", PATIENCE_S)
        first.kill()
        wait_until(lambda: all(names(node) == ["three", "two"] for node in nodes), "the standby", PATIENCE_S)
        # Node three has no workers: what it runs was forwarded.
        with fastrt.init(address=first.head, runtime_dir=runtime_dir):
            assert fastrt.get(add.remote(1, 2), timeout=PATIENCE_S) == 3
        nodes.append(
            RunningNode(runtime_dir, "--head", "--port", str(free_port), "--num-workers", "0", "--name", "one")
        )
        wait_until(lambda: all(len(names(node)) == 3 for node in nodes), "the first head", PATIENCE_S)
    finally:
        said = [node.stop()[1] for node in nodes]
        sweep_sessions(runtime_dir, runtime_dir.parent / "spill")
    assert all("is lost: this node joins" in err for err in said[:2])
    assert not any("Traceback" in err for err in said)


@pytest.mark.parametrize("words", [["--head", "--standby"]])
def test_head_is_no_standby(runtime_dir, words):
    with pytest.raises(AssertionError, match="--standby is for another node than the head's"):
        RunningNode(runtime_dir, *words)
