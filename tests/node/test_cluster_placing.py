"""Real nodes choose places for tasks without CPUs, for tasks of one CPU, and for actors without demands."""

import threading
from collections import Counter

import pytest

import fastrt
from support.cluster import RunningNode


@pytest.fixture
def cluster(runtime_dir, wait_until):
    """Starts a head and other nodes with so many workers each, and joins the head; the nodes are `n0`, `n1`, ..."""
    nodes = []

    def start(*workers):
        for k, count in enumerate(workers):
            where = ("--address", nodes[0].head) if nodes else ("--head", "--port", "0")
            nodes.append(RunningNode(runtime_dir, *where, "--num-workers", str(count), "--name", f"n{k}"))
        fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir)
        wait_until(lambda: len(fastrt.nodes()) == len(workers), "the nodes to be known")

    yield start
    fastrt.shutdown()
    for node in reversed(nodes):
        _, err = node.stop()
        assert "Traceback" not in err, err


@fastrt.remote
def node_after(seconds):
    threading.Event().wait(seconds)
    return fastrt.runtime_context().node_id


@fastrt.remote
class Actor:
    def node(self):
        return fastrt.runtime_context().node_id


def names(refs):
    """The names of the nodes that results name, with how often they do."""
    known = {row["NodeID"]: row["NodeName"] for row in fastrt.nodes()}
    return Counter(known[node] for node in fastrt.get(refs, timeout=60))


def test_node_without_workers_runs_what_needs_no_cpu_and_nothing_else(cluster):
    cluster(1, 0)
    there = {"num_cpus": 0, "scheduling": "n1"}
    actors = [Actor.options(**there).remote(), Actor.options(scheduling="n1").remote()]
    assert names([node_after.options(**there).remote(0), *[actor.node.remote() for actor in actors]]) == {"n1": 3}
    with pytest.raises(fastrt.InfeasibleTaskError, match=r"CPU 1 on node 'n1'"):
        fastrt.get(node_after.options(scheduling="n1").remote(0), timeout=30)
    assert names([node_after.remote(0.05) for _ in range(8)]) == {"n0": 8}
    assert names([Actor.remote().node.remote() for _ in range(3)]) == {"n0": 3}


def test_tasks_of_a_node_without_workers_are_dealt_out_by_cpus(cluster):
    cluster(0, 2, 2)
    names([node_after.remote(0)])  # one of the nodes has finished something
    found = Counter()
    for _ in range(3):
        found += names([node_after.remote(0.5) for _ in range(8)])
    assert min(found["n1"], found["n2"]) >= 9, found  # a node that has been slow may send one on


def test_actors_without_demands_stay_until_there_is_one_for_each_cpu_and_are_then_dealt_out(cluster, wait_until):
    cluster(1, 1, 2, 0)
    actors = [Actor.remote()]
    assert names([actors[0].node.remote()]) == {"n0": 1}
    actors += [Actor.remote() for _ in range(7)]
    assert names([actor.node.remote() for actor in actors]) == {"n0": 2, "n1": 2, "n2": 4}
    known = {row["NodeID"]: row["NodeName"] for row in fastrt.nodes()}
    for actor in [one for one in actors if known[fastrt.get(one.node.remote(), timeout=30)] == "n0"]:
        fastrt.kill(actor)
    wait_until(lambda: len(fastrt.list_actors(state="alive")) == 6, "the actors of this node to be gone", 30)
    assert names([Actor.remote().node.remote()]) == {"n0": 1}
