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
    """It belonged to the worker, which lives on: its resources were reserved for as long as the node ran."""
    wait_until(lambda: counted(fastrt.cluster_resources()) == {"CPU": 2.0, "seat": 3.0}, "both nodes to be known")
    path = tmp_path / "end"
    driver = program(RESERVES.replace("PATH", repr(str(path))))
    assert driver.wait_for_line("CREATED").split() == ["CREATED"] * 3
    wait_until(lambda: not fastrt.available_resources().get("seat"), "the other node to tell what is reserved")
    path.touch()
    driver.finish()
    wait_until(lambda: counted(fastrt.available_resources()) == {"CPU": 2.0, "seat": 3.0}, "everything to be free")
