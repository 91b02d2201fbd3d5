"""A program outside of the cluster adds nodes by the demand that waits, and removes them when nothing waits."""

import json
import os
import subprocess

import pytest

import fastrt
from support.cluster import FASTRT, RunningNode

ANYWHERE = {"fallback_selectors": [], "scheduling": "", "is_soft": True}
DISK = {"resources": {"CPU": 1.0, "disk": 1.0}, "label_selector": {}, **ANYWHERE}


@pytest.fixture
def head(runtime_dir):
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1", "--name", "one")
    yield node
    out, err = node.stop()
    assert node.process.returncode == 0, out + err


@pytest.fixture
def rt(runtime_dir, head):
    with fastrt.init(address=head.head, runtime_dir=runtime_dir) as runtime:
        yield runtime


def status(runtime_dir, *words):
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)}
    return subprocess.run(
        [*FASTRT, "status", *words], env=env, capture_output=True, text=True, check=True, timeout=30
    ).stdout


def demand(runtime_dir):
    return json.loads(status(runtime_dir, "--demand", "--json"))


@fastrt.remote(resources={"disk": 1})
def where():
    return fastrt.runtime_context().get_node_id()


def test_node_is_added_for_what_waits_and_removed_when_nothing_waits(runtime_dir, head, rt, wait_until):
    refs = [where.remote() for _ in range(5)]
    group = fastrt.placement_group([{"disk": 2}, {"CPU": 1}])
    wait_until(lambda: len(demand(runtime_dir)[0]["placement_groups"]) == 1, "the group to wait")
    (session,) = demand(runtime_dir)
    assert session["tasks"] == [{"kind": "task", **DISK, "count": 5, "is_feasible": False}]
    assert session["placement_groups"] == [{"strategy": "PACK", "bundles": [{"disk": 2.0}, {"CPU": 1.0}]}]
    assert (session["queued_tasks"], session["more"]) == (0, 0)
    assert [node["NodeName"] for node in session["nodes"]] == ["one"]
    assert fastrt.waiting_demand() == {
        name: session[name] for name in ("tasks", "placement_groups", "queued_tasks", "requested", "more")
    }

    # The part of the program that owns the machines: a node with the largest of what no node has.
    disks = max(row["resources"]["disk"] for row in session["tasks"] if not row["is_feasible"])
    disks = max(disks, *(bundle.get("disk", 0) for one in session["placement_groups"] for bundle in one["bundles"]))
    resources = json.dumps({"disk": disks})
    added = RunningNode(
        runtime_dir, "--address", head.head, "--num-workers", "2", "--name", "two", "--resources", resources
    )
    assert group.wait(30)
    fastrt.remove_placement_group(group)
    other = {node["NodeID"] for node in fastrt.nodes() if not node["IsHere"]}
    assert set(fastrt.get(refs, timeout=30)) == other

    mine = [one for one in demand(runtime_dir) if one["session"] == session["session"]]
    assert (mine[0]["tasks"], mine[0]["placement_groups"]) == ([], [])
    out, err = added.stop()
    assert added.process.returncode == 0, out + err
    wait_until(lambda: len(fastrt.nodes()) == 1, "the node to leave")


def test_cancelled_task_is_no_demand_and_actors_and_selectors_are(rt, wait_until):
    @fastrt.remote
    class Holder:
        def ready(self):
            return True

    cancelled = where.remote()
    wanted = where.options(label_selector={"zone": "north"}).remote()
    actor = Holder.options(num_cpus=3).remote()
    fastrt.cancel(cancelled)
    north = {**DISK, "label_selector": {"zone": "north"}, "kind": "task", "count": 1, "is_feasible": False}
    three = {"kind": "actor", "resources": {"CPU": 3.0}, "label_selector": {}, **ANYWHERE}
    three |= {"count": 1, "is_feasible": False}
    rows = sorted(fastrt.waiting_demand()["tasks"], key=lambda row: row["kind"])
    assert rows == [three, north]
    fastrt.kill(actor)
    fastrt.cancel(wanted)
    wait_until(lambda: fastrt.waiting_demand()["tasks"] == [], "nothing to wait")


def test_requested_resources_are_shown_until_the_next_request(rt, runtime_dir):
    from fastrt.ray.autoscaler.sdk import request_resources

    request_resources(num_cpus=2, bundles=[{"GPU": 0.5}])
    assert fastrt.waiting_demand()["requested"] == [{"CPU": 2.0}, {"GPU": 0.5}]
    lines = [line.strip() for line in status(runtime_dir, "--demand").splitlines()]
    assert lines[1:] == ["requested: CPU 2.0", "requested: GPU 0.5", "0 tasks wait for a worker only"]
    with pytest.raises(ValueError, match="numbers from 0"):
        request_resources(bundles=[{"CPU": -1}])
    request_resources(num_cpus=0)
    assert fastrt.waiting_demand()["requested"] == []
