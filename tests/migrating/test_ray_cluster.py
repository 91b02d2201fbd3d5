"""`ray.cluster_utils.Cluster`: a cluster of several nodes for the tests of a program."""

import os
import subprocess
import sys
import threading

import psutil
import pytest

import fastrt
from fastrt import ray
from fastrt.errors import UnsupportedError
from fastrt.ray.cluster_utils import Cluster
from fastrt.ray.util.state import get_actor, get_task, list_actors, list_nodes, list_placement_groups, list_tasks
from fastrt.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=1)
def node():
    return ray.get_runtime_context().get_node_id()


@ray.remote
class Where:
    def about(self):
        context = ray.get_runtime_context()
        return context.get_actor_id(), context.get_node_id(), os.getpid()

    def listed(self):
        return list_actors()

    def reserve(self):
        self.group = ray.util.placement_group([{"seat": 0.5}], name="far")
        return ray.get(self.group.ready(), timeout=30).id

    def groups(self):
        return list_placement_groups()


def check_actors(here, there, wait_until):
    """Each actor is listed once, also one that has records on the node that created it and on the one that runs it."""
    away = Where.options(name="away", resources={"seat": 1}).remote()
    near, waits = Where.remote(), Where.options(resources={"nothing": 1}).remote()
    about = ray.get([away.about.remote(), near.about.remote()])
    assert [node for _, node, _ in about] == [there, here]
    alive = [(actor, "ALIVE", node, pid) for actor, node, pid in about]
    every = sorted([*alive, (waits._actor_id, "PENDING_CREATION", None, 0)])
    for rows in (list_actors(), ray.get(away.listed.remote())):
        assert sorted((row.actor_id, row.state, row.node_id, row.pid) for row in rows) == every
    (row,) = list_actors(filters=[("name", "=", "away")])
    assert row == get_actor(away._actor_id) == list_actors(filters=[("pid", "=", about[0][2])])[0]
    assert [one["class"] for one in fastrt.list_actors(name="away", all_nodes=False, state="away")] == ["Where"]
    assert fastrt.list_actors(pid=about[0][2]) == fastrt.list_actors(name="away")
    ray.kill(away)
    wait_until(lambda: get_actor(away._actor_id).state == "DEAD", "the end of the actor")
    wait_until(lambda: get_actor(away._actor_id).pid == 0, "the end of its record on the other node")
    (row,) = list_actors(filters=[("state", "=", "DEAD")])
    assert (row.actor_id, row.node_id) == (away._actor_id, None)


def check_groups(other):
    """Groups are listed on every node, also those that were made on another one."""
    actor = Where.options(resources={"seat": 1}).remote()
    far, near = ray.get(actor.reserve.remote()), ray.util.placement_group([{"CPU": 1}], name="near")
    for rows in (list_placement_groups(), ray.get(actor.groups.remote())):
        assert sorted((row.placement_group_id, row.name) for row in rows) == sorted([(far, "far"), (near.id, "near")])
    (row,) = list_placement_groups(filters=[("name", "=", "far")])
    assert (row.state, row.nodes, row.bundles[0]["unit_resources"]) == ("CREATED", {0: other.node_id}, {"seat": 0.5})
    ray.util.remove_placement_group(near)


@ray.remote(resources={"seat": 1})
def holds(path):
    while not os.path.exists(path):
        threading.Event().wait(0.02)


def check_tasks(other, path, wait_until):
    """A task and a call that another node runs are listed once, by their ids here and with their process there."""
    actor = Where.options(resources={"seat": 1}).remote()
    ray.get(actor.about.remote())
    running = [holds.remote(path), actor.__ray_call__.remote(lambda self: holds._function(path))]

    def found():
        return {row.task_id: row for row in list_tasks() if row.state == "RUNNING"}

    wait_until(lambda: len(found()) == 2, "both to run")
    rows = found()
    assert rows.keys() == {ref.task_id() for ref in running}
    assert {row.node_id for row in rows.values()} == {other.node_id}
    workers = {ps.pid for ps in psutil.Process(other._process.pid).children(recursive=True)}
    assert {row.worker_pid for row in rows.values()} <= workers
    assert rows[running[1].task_id()].actor_id == actor._actor_id
    assert get_task(running[0]).node_id == other.node_id
    assert len(fastrt.list_tasks(task_id=fastrt.list_tasks(name="holds")[0]["task_id"])) == 1
    with open(path, "w"):
        ray.get(running)


@pytest.fixture
def cluster(runtime_dir, monkeypatch):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("FASTRT_SPILL_DIR", str(runtime_dir.parent / "spill"))
    cluster = Cluster()
    yield cluster
    cluster.shutdown()
    assert not cluster.list_all_nodes()


PROGRAM = """
from fastrt.ray.cluster_utils import Cluster

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=64 << 20)
print(*(node._process.pid for node in cluster.list_all_nodes()), flush=True)
input()
"""


def test_nodes_end_with_a_program_that_is_killed(runtime_dir, wait_until):
    variables = {"FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_SPILL_DIR": str(runtime_dir.parent / "spill")}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        nodes = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        assert len(nodes) == 2
        processes = nodes + [child for node in nodes for child in node.children(recursive=True)]
        program.kill()
    wait_until(lambda: not any(process.is_running() for process in processes), "the end of the nodes")


def test_nodes_are_added_used_and_removed(cluster, tmp_path, wait_until):
    with pytest.raises(ValueError, match="give initialize_head"):
        Cluster(head_node_args={"num_cpus": 1})
    with pytest.raises(UnsupportedError, match="'colour'"):
        cluster.add_node(colour="red")
    more = {"labels": {}, "resources": {}, "include_dashboard": False, "enable_object_reconstruction": True}
    head = cluster.add_node(num_cpus=None, object_store_memory=64 << 20, **more)  # of one CPU
    other = cluster.add_node(num_cpus=1.0, object_store_memory=67e6, resources={"seat": 2}, labels={"zone": "a"})
    ray.init(address=cluster.address)
    assert cluster.head_node is head
    assert cluster.worker_nodes == {other}
    assert {row["NodeID"] for row in ray.nodes()} == {head.node_id, other.node_id}
    assert ray.get_runtime_context().get_node_id() == head.node_id
    assert ray.cluster_resources()["CPU"] == ray.cluster_resources()["seat"] == 2
    placed = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
    wanted = [node.options(resources={"seat": 1}), node.options(label_selector={"zone": "a"})]
    wanted.append(node.options(scheduling_strategy=placed))
    assert set(ray.get([one.remote() for one in wanted])) == {other.node_id}
    check_actors(head.node_id, other.node_id, wait_until)
    check_groups(other)
    check_tasks(other, str(tmp_path / "go on"), wait_until)
    disk = cluster.add_node(
        num_cpus=0.0, num_gpus=0.0, object_store_memory=67e6, resources={"disk": 1}
    )  # no worker, at first
    assert ray.get(node.options(num_cpus=0, resources={"disk": 1}).remote(), timeout=30) == disk.node_id
    cluster.remove_node(disk)
    cluster.remove_node(other, allow_graceful=False)
    cluster.wait_for_nodes()
    assert [row["NodeID"] for row in ray.nodes() if row["Alive"]] == [head.node_id]
    assert {row["NodeID"] for row in ray.nodes() if not row["Alive"]} == {disk.node_id, other.node_id}
    assert {row.state for row in list_nodes()} == {"ALIVE", "DEAD"}
    assert ray.get(node._remote(kwargs={}, num_cpus=0)) == head.node_id
    assert cluster.remaining_processes_alive()
    assert not other.is_alive()


SAYS_ONCE = """
import sys
import fastrt.ray as ray
from fastrt.ray.cluster_utils import Cluster

@ray.remote(num_cpus=0, max_retries=0)
def fail():
    print("a word", file=sys.stderr)
    raise ValueError("never mind")

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=64 << 20)
ray.init(address=cluster.address)
ray.wait([fail.remote()])
group = ray.util.placement_group([{"CPU": 9}])
assert not group.wait(0.5)
ray.shutdown()
cluster.shutdown()
"""


def test_what_a_program_prints_of_its_cluster_is_on_its_terminal_once(program):
    """Its nodes have the same terminal, and printed it too."""
    _, err = program(SAYS_ONCE).finish()
    assert [err.count(words) for words in ("a word", "was never read", "which the nodes do not suffice")] == [1, 1, 1]
