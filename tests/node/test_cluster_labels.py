"""Labels in a cluster: tasks, actors and bundles run on nodes that match, and wait until there is one."""

import pytest

import fastrt
from fastrt.util.scheduling_strategies import DoesNotExist, Exists, In, NodeLabelSchedulingStrategy, NotIn
from support.amounts import counted
from support.cluster import RunningNode, two_nodes

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 1, "--labels", '{"zone": "b"}', of_head=("--labels", "zone=a")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def rt(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@fastrt.remote
def where():
    return next(node["NodeName"] for node in fastrt.nodes() if node["IsHere"])


@fastrt.remote
class Where:
    def name(self):
        return next(node["NodeName"] for node in fastrt.nodes() if node["IsHere"])


def wait_for_both(wait_until):
    wait_until(lambda: len(fastrt.nodes()) == 2, "both nodes", PATIENCE_S)


def test_nodes_show_their_labels(rt, wait_until):
    wait_for_both(wait_until)
    labels = {node["NodeName"]: node["Labels"] for node in fastrt.nodes()}
    ids = {node["NodeName"]: node["NodeID"] for node in fastrt.nodes()}
    assert labels == {
        "one": {"zone": "a", "ray.io/node-id": ids["one"]},
        "two": {"zone": "b", "ray.io/node-id": ids["two"]},
    }


@pytest.mark.parametrize(
    ("selector", "expected"),
    [({"zone": "a"}, "one"), ({"zone": "b"}, "two"), ({"zone": "!a"}, "two"), ({"zone": "in(b, c)"}, "two")],
)
def test_task_runs_on_a_node_that_matches(rt, wait_until, selector, expected):
    wait_for_both(wait_until)
    refs = [where.options(label_selector=selector).remote() for _ in range(5)]
    assert fastrt.get(refs, timeout=PATIENCE_S) == [expected] * 5
    assert not [name for node in fastrt.nodes() for name in node["Resources"] if "zone" in name]
    assert counted(fastrt.cluster_resources()) == {"CPU": 2.0}


def test_task_runs_on_a_node_that_its_fallback_names(rt, wait_until):
    wait_for_both(wait_until)
    fallback = [{"label_selector": {"zone": "c"}}, {"label_selector": {"zone": "b"}}]
    refs = [where.options(label_selector={"zone": "d"}, fallback_strategy=fallback).remote() for _ in range(3)]
    assert fastrt.get(refs, timeout=PATIENCE_S) == ["two"] * 3


@pytest.mark.parametrize(
    ("hard", "soft", "expected"),
    [
        ({"zone": In("b", "c")}, None, "two"),
        ({"zone": NotIn("a")}, None, "two"),
        ({"zone": Exists()}, {"zone": In("b")}, "two"),
        ({"disk": DoesNotExist(), "zone": In("b")}, {"disk": Exists()}, "two"),
        (None, {"zone": In("b")}, "two"),
    ],
)
def test_strategy_of_labels_places_tasks_and_actors(rt, wait_until, hard, soft, expected):
    wait_for_both(wait_until)
    strategy = NodeLabelSchedulingStrategy(hard, soft=soft)
    actor = Where.options(scheduling_strategy=strategy).remote()
    refs = [where.options(scheduling_strategy=strategy).remote(), actor.name.remote()]
    assert fastrt.get(refs, timeout=PATIENCE_S) == [expected] * 2


def test_task_is_bound_to_a_node_by_its_id(rt, wait_until):
    wait_for_both(wait_until)
    for node in fastrt.nodes():
        ref = where.options(label_selector={"ray.io/node-id": node["NodeID"]}).remote()
        assert fastrt.get(ref, timeout=PATIENCE_S) == node["NodeName"]


def test_actor_runs_on_a_node_that_matches(rt, wait_until):
    wait_for_both(wait_until)
    actors = [Where.options(label_selector={"zone": zone}).remote() for zone in "ab"]
    assert fastrt.get([actor.name.remote() for actor in actors], timeout=PATIENCE_S) == ["one", "two"]


def test_bundles_lie_on_nodes_that_match(rt, wait_until):
    wait_for_both(wait_until)
    group = fastrt.placement_group([{"CPU": 1}, {"CPU": 1}], bundle_label_selector=[{"zone": "b"}, {"zone": "a"}])
    assert group.wait(PATIENCE_S)
    for index, name in enumerate(["two", "one"]):
        strategy = fastrt.PlacementGroupSchedulingStrategy(group, index)
        assert fastrt.get(where.options(scheduling_strategy=strategy).remote(), timeout=PATIENCE_S) == name
    assert fastrt.placement_group_table(group)["bundles"] == {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}
    fastrt.remove_placement_group(group)


def test_task_without_a_matching_node_waits_until_one_joins(rt, nodes, runtime_dir, wait_until):
    wait_for_both(wait_until)
    ref = where.options(label_selector={"zone": "c"}).remote()
    assert fastrt.wait([ref], timeout=0.5) == ([], [ref])
    three = RunningNode(
        runtime_dir, "--address", nodes[0].head, "--num-workers", "1", "--name", "three", "--labels", "zone=c"
    )
    try:
        assert fastrt.get(ref, timeout=PATIENCE_S) == "three"
    finally:
        three.stop()
