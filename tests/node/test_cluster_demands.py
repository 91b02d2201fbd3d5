"""Tasks with demands on two nodes: where they run, what is told of resources, and what deaths leave."""

import collections
import os
import threading
from pathlib import Path

import psutil
import pytest

import fastrt
from support.amounts import counted
from support.cluster import two_nodes


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 2, "--resources", '{"gpu": 1, "seat": 3}') as nodes:
        yield nodes


@pytest.fixture(scope="module")
def rt(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@fastrt.remote(num_gpus=1)
def endless(path):
    open(path, "w").close()
    threading.Event().wait(60)


@fastrt.remote
def where(seconds=0.0, *more):
    from fastrt.store import client

    threading.Event().wait(seconds)
    return client.require().client.segment.session


def run(count, seconds=0.0, **options):
    """How many of so many tasks ran on each node: {session: count}."""
    refs = [where.options(**options).remote(seconds) for _ in range(count)]
    return collections.Counter(fastrt.get(refs, timeout=60))


@pytest.fixture
def one(rt):
    return rt.session


@pytest.fixture
def two(rt, wait_until):
    wait_until(lambda: len(fastrt.nodes()) == 2, "the other node to be known")
    return fastrt.nodes()[1]["NodeID"]


def test_nodes_and_resources_are_listed(one, two, wait_until):
    wait_until(
        lambda: counted(fastrt.available_resources()) == {"CPU": 3.0, "GPU": 1.0, "seat": 3.0}, "an idle cluster"
    )
    assert counted(fastrt.cluster_resources()) == {"CPU": 3.0, "GPU": 1.0, "seat": 3.0}
    about = {"Alive": True, "NodeID": one, "NodeName": "one", "IsHere": True, "Labels": {"ray.io/node-id": one}}
    labels = {"ray.io/node-id": two}
    cpu = {"CPU": 1.0}
    there = {"CPU": 2.0, "GPU": 1.0, "seat": 3.0}
    nodes = [{**row, **{key: counted(row[key]) for key in ("Resources", "Available")}} for row in fastrt.nodes()]
    assert nodes == [
        {**about, "Resources": cpu, "Available": cpu},
        {
            "Alive": True,
            "NodeID": two,
            "NodeName": "two",
            "IsHere": False,
            "Resources": there,
            "Available": there,
            "Labels": labels,
        },
    ]
    assert set(fastrt.get(fastrt.remote(fastrt.cluster_resources).options(num_gpus=1).remote(), timeout=30)) == {
        "CPU", "GPU", "memory", "seat"
    }  # fmt: skip


@fastrt.remote(priority=7, max_retries=0)
def own_priority():
    return [row["priority"] for row in fastrt.list_tasks(pid=os.getpid(), name="own_priority", all_nodes=False)]


def test_task_has_its_priority_wherever_it_runs(rt, two):
    assert fastrt.get(own_priority.options(scheduling=two).remote(), timeout=30) == [7]
    assert fastrt.get(own_priority.options(num_gpus=1, priority=-9).remote(), timeout=30) == [-9]
    assert fastrt.get(own_priority.remote(), timeout=30) == [7]


@fastrt.remote(num_gpus=1)
def variable():
    return os.environ.get("FASTRT_TEST_VARIABLE"), where.function(), fastrt.get(variable_below.remote())


@fastrt.remote(resources={"seat": 1})
def variable_below():
    return os.environ.get("FASTRT_TEST_VARIABLE")


@fastrt.remote(resources={"seat": 1})
class Variable:
    def read(self):
        return variable_below.function(), where.function()


def test_environments_go_with_tasks_and_actors_to_other_nodes(two):
    env = {"env_vars": {"FASTRT_TEST_VARIABLE": "there"}}
    assert fastrt.get(variable.options(runtime_env=env).remote(), timeout=60) == ("there", two, "there")
    assert fastrt.get(variable.remote(), timeout=60) == (None, two, None)
    assert fastrt.get(Variable.options(runtime_env=env).remote().read.remote(), timeout=60) == ("there", two)


def test_what_is_in_use_elsewhere_is_told(two, tmp_path, wait_until):
    @fastrt.remote(num_gpus=1, resources={"seat": 1.5})
    def hold(path):
        while not os.path.exists(path):
            threading.Event().wait(0.005)

    ref = hold.remote(str(tmp_path / "gate"))
    wait_until(lambda: counted(fastrt.available_resources()) == {"CPU": 2.0, "seat": 1.5}, "what it takes to be told")
    (tmp_path / "gate").touch()
    fastrt.get(ref, timeout=30)
    wait_until(lambda: fastrt.available_resources().get("seat") == 3.0, "what it took to be free")


def work_of(nodes):
    """(CPU seconds, wake-ups) of all processes of these nodes so far."""
    seconds = wakes = 0
    for node in nodes:
        for process in [psutil.Process(node.process.pid), *psutil.Process(node.process.pid).children(recursive=True)]:
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                ns, _, slices = (thread / "schedstat").read_text().split()
                seconds, wakes = seconds + int(ns) / 1e9, wakes + int(slices)
    return seconds, wakes


def test_nodes_sleep_while_a_task_that_was_sent_elsewhere_just_sleeps(nodes, two, tmp_path, wait_until):
    """0.6 % of a core and 90 wake-ups a second were measured for all processes of two nodes; 17 % and 1240 before."""
    ref = endless.remote(str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists, "the task")

    seen = []

    def are_quiet():
        before = work_of(nodes)
        threading.Event().wait(1.0)
        seconds, wakes = (now - then for now, then in zip(work_of(nodes), before, strict=True))
        seen.append((seconds, wakes))
        return seconds < 0.01 and wakes < 130

    wait_until(are_quiet, "two nodes that sleep")
    fastrt.cancel(ref)


def test_task_goes_where_its_resources_are(one, two):
    assert run(20, num_gpus=1) == {two: 20}
    assert run(20, resources={"seat": 0.5}, num_cpus=0) == {two: 20}
    assert set(run(4, num_cpus=2)) == {two}


def test_task_without_need_stays_and_spills_when_there_is_no_room(one, two):
    assert run(1, num_cpus=0.5) == {one: 1}
    assert set(run(12, 0.05, num_cpus=0.9)) == {one, two}


def test_pack_spread_and_affinity(one, two):
    assert run(1, scheduling="pack") == {one: 1}
    spread = run(12, 0.05, scheduling="spread")
    assert spread[one] >= 3
    assert spread[two] >= 6 - 2
    assert run(6, scheduling="two") == run(6, scheduling_strategy=fastrt.NodeAffinity(two)) == {two: 6}
    assert run(6, scheduling=one) == {one: 6}
    assert sum(run(6, scheduling_strategy=fastrt.NodeAffinity("gone", soft=True)).values()) == 6


def test_arguments_references_and_cancellation_go_along(two, tmp_path, wait_until):
    @fastrt.remote(num_gpus=1)
    def total(values, ref, last):
        return sum(values) + fastrt.get(ref[0]) + last

    waits = where.remote(0.1)
    assert fastrt.get(total.remote([1, 2], [fastrt.put(3)], fastrt.put(4)), timeout=30) == 10

    running = endless.remote(str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists, "it to run there")
    waiting = endless.remote(str(tmp_path / "never"))
    for ref in (waiting, running):
        fastrt.cancel(ref)
        with pytest.raises(fastrt.TaskCancelledError):
            fastrt.get(ref, timeout=30)
    assert run(1, num_gpus=1) == {two: 1}
    assert not (tmp_path / "never").exists()
    fastrt.get(waits, timeout=30)


def test_demands_of_tasks_nested_there_are_met(one, two):
    @fastrt.remote(num_gpus=0.5)
    def outer():
        return fastrt.get(where.options(num_gpus=0.5).remote()), fastrt.get(where.options(scheduling="one").remote())

    assert fastrt.get(outer.remote(), timeout=30) == (two, one)


@pytest.mark.long
def test_killed_uplinks_lose_no_task_with_demands(nodes, two, wait_until):
    refs = [where.options(num_gpus=1, max_retries=20).remote(0.005) for _ in range(100)]
    for victim in nodes:
        assert fastrt.wait(refs, num_returns=20, timeout=30)[1]
        dead = victim.kill_child("fastrt.runtime.uplink")
        wait_until(
            lambda victim=victim, dead=dead: victim.child("fastrt.runtime.uplink") not in (None, dead), "another"
        )
    assert set(fastrt.get(refs, timeout=60)) == {two}


def test_task_goes_where_its_arguments_are_among_those_that_have_what_it_needs(start, nodes, two, tmp_path, wait_until):
    start("--address", nodes[0].head, "--num-workers", "4", "--name", "three", "--resources", '{"seat": 3}')
    wait_until(lambda: len(fastrt.nodes()) == 3, "the third node")
    three = next(node["NodeID"] for node in fastrt.nodes() if node["NodeName"] == "three")
    big, other = fastrt.put(b"x" * 500_000), fastrt.put(b"y" * 500_000)
    gate = tmp_path / "gate"

    @fastrt.remote(num_cpus=0.5)
    def keep(value, begun):
        open(begun, "w").close()
        while not gate.exists():
            threading.Event().wait(0.005)
        return len(value)

    def seat(*values):
        return fastrt.get(where.options(num_cpus=0.5, resources={"seat": 1}).remote(0.0, *values), timeout=30)

    wait_until(lambda: fastrt.available_resources()["seat"] == 6, "both to be idle")
    assert seat(other) == three, "which has most room"
    kept = keep.options(scheduling="two").remote(big, str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists, "the task that has the value there")
    wait_until(lambda: fastrt.available_resources()["seat"] == 6, "what the last one took")
    assert [seat(big), seat(big, 1), seat(1)] == [two, two, three]
    gate.touch()
    assert fastrt.get(kept, timeout=30) == 500_000
