"""Stores that are too small for what two nodes send each other: values wait for room, and no node counts as lost."""

from pathlib import Path

import numpy as np
import psutil
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from fastrt.store import join
from support.cluster import RunningNode

MIB = 1 << 20
STORE = 32 * MIB


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    """Two nodes with stores of 32 MiB: a head without workers, and one with two of them."""
    store = ("--object-store-memory", str(STORE))
    head = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "0", "--name", "one", *store)
    other = RunningNode(runtime_dir, "--address", head.head, "--num-workers", "2", "--name", "two", *store)
    yield head, other
    client, link = join.join(other.note.socket_path, "tool", "test")
    found = fsck.fsck(client)
    client.close()
    link.close()
    assert found == []
    for node in (other, head):
        out, err = node.stop()
        assert node.process.returncode == 0, out + err
        assert "is closed" not in err, err
        assert "Traceback" not in err, err


@pytest.fixture(scope="module")
def rt(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        # The functions come first, so they lie at the bottom of the stores and leave the rest in one piece.
        fastrt.get([total.remote(), make.remote(0, 0), put_some.remote(0, 0, 0), *items.remote(0)], timeout=60)
        yield runtime


@pytest.fixture
def small(rt, nodes):
    """The cluster; the driver's store is sound afterwards."""
    yield
    assert fsck.fsck(store_client.require().client) == []


def client():
    return store_client.require().client


def array(nbytes, value):
    return np.full(nbytes, value, np.uint8)


@fastrt.remote
def total(*arrays):
    return sum(int(one[-1]) for one in arrays)


@fastrt.remote
def make(nbytes, value):
    return array(nbytes, value)


@fastrt.remote
def put_some(count, nbytes, value):
    return [fastrt.put(array(nbytes, value + k)) for k in range(count)]


@fastrt.remote(num_returns="streaming")
def items(count):
    for k in range(count):
        yield array(3 * MIB, k)


def test_arguments_of_many_tasks_that_do_not_fit_together_all_arrive(small):
    tasks = [total.remote(*[fastrt.put(array(3 * MIB // 2, 8 * i + k)) for k in range(8)]) for i in range(8)]
    assert fastrt.get(tasks, timeout=60) == [sum(range(8 * i, 8 * i + 8)) for i in range(8)]


def test_arguments_below_the_size_of_an_offer_that_do_not_fit_together_all_arrive(small):
    tasks = [total.remote(*[fastrt.put(array(MIB // 2, 16 * i + k)) for k in range(16)]) for i in range(12)]
    assert fastrt.get(tasks, timeout=60) == [sum(range(16 * i, 16 * i + 16)) % 256**2 for i in range(12)]


def test_results_that_do_not_fit_together_all_arrive(small):
    refs = [make.remote(12 * MIB, i) for i in range(8)]
    for i, ref in enumerate(refs):
        assert fastrt.get(ref, timeout=60)[-1] == i


def test_objects_that_tasks_have_put_are_not_lost_for_want_of_room(small):
    listed = [put_some.remote(4, 2 * MIB, 4 * i) for i in range(8)]
    for i, refs in enumerate(listed):
        for k, ref in enumerate(fastrt.get(refs, timeout=60)):
            assert fastrt.get(ref, timeout=60)[-1] == 4 * i + k


def test_items_of_a_generator_that_do_not_fit_together_all_arrive(small):
    for k, ref in enumerate(items.remote(24)):
        assert fastrt.get(ref, timeout=60)[-1] == k


def test_value_that_finds_no_room_beside_views_arrives_in_a_file(small):
    views = [fastrt.get(make.remote(9 * MIB, 1), timeout=60) for _ in range(3)]
    before = spill.totals(client())["mapped_objects"]
    refs = [make.remote(9 * MIB, 2), make.remote(9 * MIB, 3)]
    assert [fastrt.get(ref, timeout=60)[-1] for ref in refs] == [2, 3]
    assert spill.totals(client())["mapped_objects"] == before + 2
    assert all(view[-1] == 1 for view in views)
    assert fastrt.get(total.remote(*refs), timeout=60) == 5


def test_values_larger_than_both_stores_travel(small, wait_until):
    ref = make.remote(40 * MIB, 4)
    assert fastrt.get(total.remote(ref, fastrt.put(array(48 * MIB, 5))), timeout=60) == 9
    value = fastrt.get(ref, timeout=60)
    assert np.array_equal(value, array(40 * MIB, 4))
    boxes = put_some.remote(2, 40 * MIB, 6)
    assert [int(fastrt.get(one, timeout=60)[-1]) for one in fastrt.get(boxes, timeout=60)] == [6, 7]
    del ref, value, boxes
    wait_until(lambda: not list(Path(spill.directory(client())).glob("[0-9a-f]*")), "no file left")


def test_uplink_that_can_open_no_file_sends_spilled_values_later(small, nodes):
    """The other node got an error in place of each value, for good."""
    refs = [fastrt.put(array(50_000, k % 251)) for k in range(1500)]
    uplink = nodes[0].child("fastrt.runtime.uplink")
    before = uplink.rlimit(psutil.RLIMIT_NOFILE)
    uplink.rlimit(psutil.RLIMIT_NOFILE, (uplink.num_fds(), before[1]))
    try:
        sums = [total.remote(ref) for ref in refs[:100]]
        fastrt.wait(sums, num_returns=len(sums), timeout=1)
    finally:
        uplink.rlimit(psutil.RLIMIT_NOFILE, before)
    assert fastrt.get(sums, timeout=60) == [k % 251 for k in range(100)]
