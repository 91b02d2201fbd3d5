"""Placement groups that tasks make: they end with the task's program, on whatever node the task ran."""

import pytest

import fastrt
from support.amounts import counted
from support.cluster import two_nodes


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 1, "--resources", '{"seat": 3}') as nodes:
        yield nodes


@pytest.fixture(scope="module")
def runtime(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


RESERVES = """
import os, signal, threading
import fastrt

@fastrt.remote(num_cpus=0, max_retries=0)
def reserve(name, stays=True):
    group = fastrt.placement_group([{"seat": 1}], name=name)
    assert group.wait(30)
    if not stays:
        os.kill(os.getpid(), signal.SIGKILL)
    return group

@fastrt.remote(num_cpus=0)
def nested():
    return fastrt.get(reserve.options(scheduling="one").remote("there and back"))

with fastrt.init(address="auto"):
    near = reserve.options(scheduling="one").remote("near", False)
    groups = fastrt.get([reserve.options(scheduling="two").remote("far"), nested.options(scheduling="two").remote()])
    fastrt.wait([near])
    groups.append(fastrt.get_placement_group("near"))
    print(*(fastrt.placement_group_table(group)["state"] for group in groups), flush=True)
    while not os.path.exists(PATH):
        threading.Event().wait(0.02)
"""


def test_group_that_a_task_makes_ends_with_its_program_and_not_before(program, runtime, tmp_path, wait_until):
    """The group belonged to the worker, which lives on: its resources stayed reserved for as long as the node ran."""
    wait_until(lambda: counted(fastrt.cluster_resources()) == {"CPU": 2.0, "seat": 3.0}, "both nodes to be known")
    path = tmp_path / "end"
    driver = program(RESERVES.replace("PATH", repr(str(path))))
    assert driver.wait_for_line("CREATED").split() == ["CREATED"] * 3
    wait_until(lambda: not fastrt.available_resources().get("seat"), "the other node to tell what is reserved")
    path.touch()
    driver.finish()
    wait_until(lambda: counted(fastrt.available_resources()) == {"CPU": 2.0, "seat": 3.0}, "everything to be free")


WAITS = """
import fastrt
from fastrt import PlacementGroupSchedulingStrategy as InGroup

@fastrt.remote(num_cpus=0)
class Actor:
    def call(self):
        pass

with fastrt.init(address="auto"):
    group = fastrt.placement_group([{"seat": 9}])
    actors = [Actor.options(scheduling_strategy=InGroup(group)).remote() for _ in range(3)]
    actors.append(Actor.options(label_selector={"zone": "nowhere"}).remote())
    waiting = [group.ready(), *(actor.call.remote() for actor in actors)]
    assert fastrt.wait(waiting, timeout=0.2)[0] == []
    assert fastrt.placement_group_table(group)["state"] == "PENDING"
    if not LEAVES:
        os._exit(0)
"""

HEARS = """
import fastrt, os, threading

with fastrt.init(address="auto"):
    print("hears", flush=True)
    while not os.path.exists(PATH):
        threading.Event().wait(0.02)
"""


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "exits"])
def test_program_that_ends_while_its_groups_and_actors_wait_says_nothing_of_it(
    program, runtime, tmp_path, wait_until, leaves
):
    """Its own end made errors of what waited, and both the program and the other ones on its node printed them."""
    path = tmp_path / "end"
    other = program(HEARS.replace("PATH", repr(str(path))))
    other.wait_for_line("hears")
    _, err = program("import os\n" + WAITS.replace("LEAVES", str(leaves))).finish()
    assert "never read" not in err
    wait_until(lambda: not fastrt.placement_group_table(), "the group to be gone")
    path.touch()
    _, err = other.finish()
    assert "never read" not in err
