"""`ray.cluster_utils.Cluster`: a cluster of several nodes for the tests of a program."""

import pytest

from fastrt import ray
from fastrt.errors import UnsupportedError
from fastrt.ray.cluster_utils import Cluster
from fastrt.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=1)
def node():
    return ray.get_runtime_context().get_node_id()


@pytest.fixture
def cluster(runtime_dir, monkeypatch):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("FASTRT_SPILL_DIR", str(runtime_dir.parent / "spill"))
    cluster = Cluster()
    yield cluster
    cluster.shutdown()
    assert not cluster.list_all_nodes()


def test_nodes_are_added_used_and_removed(cluster):
    with pytest.raises(ValueError, match="give initialize_head"):
        Cluster(head_node_args={"num_cpus": 1})
    with pytest.raises(UnsupportedError, match="'colour'"):
        cluster.add_node(colour="red")
    head = cluster.add_node(num_cpus=1, object_store_memory=64 << 20, include_dashboard=False)
    other = cluster.add_node(num_cpus=1, object_store_memory=64 << 20, resources={"seat": 2}, labels={"zone": "a"})
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
    cluster.remove_node(other, allow_graceful=False)
    cluster.wait_for_nodes()
    assert [row["NodeID"] for row in ray.nodes() if row["Alive"]] == [head.node_id]
    assert cluster.remaining_processes_alive()
    assert not other.is_alive()
