"""An actor that is started again, and arguments of its constructor that were lost with a node."""

import numpy as np
import pytest

import fastrt

LARGE = 1 << 20  # bytes of a value that stays where it was made


@fastrt.remote(num_cpus=0, resources={"x": 1}, max_retries=3)
def make():
    return np.ones(LARGE, np.uint8)


@fastrt.remote(num_cpus=0, resources={"x": 1}, max_restarts=3, max_task_retries=-1)
class Total:
    def __init__(self, value):
        self.value = value

    def get(self):
        return int(self.value.sum())


@pytest.fixture
def add(start, runtime_dir, wait_until):
    """Add a node that has `x` once, and wait until it is a member; a driver has joined on the head's node."""
    head = start("--head", "--port", "0", "--num-workers", "0", "--name", "one")
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):

        def add_one(name):
            words = ("--num-workers", "1", "--name", name, "--resources", '{"x": 1}')
            node = start("--address", head.head, *words)
            wait_until(lambda: name in names(), f"{name} to join")
            return node

        yield add_one


def names():
    return [row["NodeName"] for row in fastrt.nodes()]


def test_actor_starts_again_when_its_argument_is_lost_with_its_node(add):
    two = add("two")
    ref = make.remote()
    assert fastrt.wait([ref], timeout=60)[0]
    total = Total.remote(ref)
    assert fastrt.get(total.get.remote(), timeout=60) == LARGE
    add("three")
    two.kill()
    assert fastrt.get(total.get.remote(), timeout=60) == LARGE
