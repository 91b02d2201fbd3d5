"""Admission survives the daemon that it is part of."""

import os
import signal
import threading
from pathlib import Path

import psutil

import fastrt
from fastrt.node.admission import Admission
from fastrt.node.cpu_room import Workers
from fastrt.store import client as store_client
from fastrt.store.messages import ClusterNodes, NodeRow
from support.sides import Side, in_loop


@fastrt.remote(num_cpus=0.1)
def hold(folder, name):
    Path(folder, name).touch()
    while not Path(folder, "gate").exists():
        threading.Event().wait(0.002)
    return name


@fastrt.remote(resources={"seat": 1}, max_retries=20)
def alone(path, k):
    fd = os.open(path, os.O_CREAT | os.O_EXCL)  # fails when another has the seat
    threading.Event().wait(0.002)
    os.close(fd)
    os.unlink(path)
    return k


@fastrt.remote(num_cpus=0)
def nothing():
    return 1


class Daemonless(Admission):
    """Admission whose `refresh` is called by the test."""

    def _listen(self):
        pass


class Uplink:
    """The daemon's end of the connection to an uplink."""

    def post(self, message):
        return True

    send = post


@in_loop
async def test_nodes_that_an_uplink_has_reported_stay_until_the_next_one_has_joined():
    """A task that waited for a busy node was refused when its own node's uplink was started again."""
    side = Side()
    rows = [NodeRow(node * 32, f"node {node}", {"CPU": 10_000}, {}, {}) for node in "ab"]
    admission = Daemonless(side.store, {"CPU": 10_000}, {}, True, *[lambda slot: False] * 2, Workers(1, 2, list),
                           lambda: None, print)  # fmt: skip
    first, second, placing = Uplink(), Uplink(), admission.placing
    admission.on_cluster(first, ClusterNodes("one", [], [], False, False))
    assert (placing.has_uplink, placing.name) == (False, "one")  # before it has joined
    admission.on_cluster(first, ClusterNodes("one", rows, [], False, False))
    assert placing.has_uplink
    admission.on_hang_up(first)
    admission.on_cluster(second, ClusterNodes("one", [], [], False, False))
    assert (placing.has_uplink, sorted(placing.views)) == (False, ["a" * 32, "b" * 32])
    admission.on_cluster(second, ClusterNodes("one", rows[1:], [], False, False))
    assert (placing.has_uplink, sorted(placing.views)) == (True, ["b" * 32])
    os.close(admission.news)
    side.close()


def daemon():
    return store_client.require().client.segment.daemon[0]


def test_daemon_is_killed_again_and_again_and_nothing_is_lost_or_counted_twice(tmp_path, wait_until):
    seat = str(tmp_path / "seat")
    with fastrt.init(2, "64MiB", resources={"seat": 1}, spill_dir=tmp_path):
        held = [hold.options(num_cpus=0.5).remote(str(tmp_path), "held")]
        wait_until((tmp_path / "held").exists, "one that runs all the time")
        refs = [alone.remote(seat, k) for k in range(200)]
        for round_ in range(3):
            fastrt.wait(refs, num_returns=30 * (round_ + 1), timeout=30)
            old = daemon()
            os.kill(old, signal.SIGKILL)
            refs += [alone.remote(seat, k) for k in range(len(refs), len(refs) + 50)]
            wait_until(lambda old=old: daemon() not in (old, 0) and psutil.pid_exists(daemon()), "another daemon")
        assert fastrt.get(refs, timeout=60) == list(range(350))
        # What the one that still runs has is counted once: of 1.6 further CPUs 1.5 are free.
        held += [hold.remote(str(tmp_path), f"more{k}") for k in range(16)]
        wait_until(lambda: len(list(tmp_path.glob("more*"))) == 15, "fifteen more", 60)
        assert fastrt.get(nothing.remote(), timeout=30) == 1
        assert len(list(tmp_path.glob("more*"))) == 15
        (tmp_path / "gate").touch()
        assert fastrt.get(held, timeout=30) == ["held", *(f"more{k}" for k in range(16))]
