"""References to objects of another node that do not exist yet outlive the uplinks of both nodes."""

from pathlib import Path

import pytest

import fastrt
from fastrt._core.repair import inspect
from fastrt.store.client import require


@fastrt.remote
def later(gate, k):
    """A value, once there is a file."""
    import threading

    while not Path(gate).exists():
        threading.Event().wait(0.005)
    return [fastrt.put(k), "x" * 50_000]


@fastrt.remote(max_retries=0)
def asked(gate):
    """References to values that do not exist when this task ends; it may not run again."""
    return [later.remote(gate, k) for k in range(2)]


@pytest.fixture
def head(start, runtime_dir):
    """A head without workers, and this process at it."""
    head = start("--head", "--port", "0", "--num-workers", "0", "--name", "one")
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        yield head


@pytest.mark.parametrize("whose", ["the driver's", pytest.param("the other node's", marks=pytest.mark.long)])
def test_reference_to_what_does_not_exist_yet_survives_the_death_of_an_uplink(head, start, tmp_path, wait_until, whose):
    gate = tmp_path / "gate"
    two = start("--address", head.head, "--num-workers", "3", "--name", "two")
    refs = fastrt.get(asked.remote(str(gate)), timeout=30)
    assert fastrt.wait(refs, num_returns=2, timeout=0)[0] == []
    node = head if "driver" in whose else two
    before = node.kill_child("fastrt.runtime.uplink")
    wait_until(lambda: node.child("fastrt.runtime.uplink") not in (None, before), "the next uplink")
    passed_on = fastrt.remote(lambda one: one[1][:3]).remote(refs[1])
    gate.touch()
    assert [fastrt.get(fastrt.get(ref, timeout=30)[0], timeout=30) for ref in refs] == [0, 1]
    assert fastrt.get(passed_on, timeout=30) == "xxx"
    del refs, passed_on
    wait_until(lambda: not [row for row in inspect.objects(require().client) if row["bytes"] > 40_000], "objects to go")
