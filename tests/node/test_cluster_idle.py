"""Connections between nodes: opened when they are needed, and closed once neither side uses them."""

import contextlib
import threading
from pathlib import Path

import psutil
import pytest

import fastrt
from fastrt._core.tasks import tasks as core
from fastrt.store import join
from fastrt.store.messages import Bye
from support.cluster import RunningNode

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTRT_PEER_IDLE_S", "0.2")
        head = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "0", "--name", "one")
        others = [
            RunningNode(runtime_dir, "--address", head.head, "--num-workers", "1", "--name", name)
            for name in ("two", "three")
        ]
        yield [head, *others]
        for node in (*others, head):
            out, err = node.stop()
            assert node.process.returncode == 0, out + err
            assert err == ""


@pytest.fixture(scope="module")
def rt(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@fastrt.remote
def add(a, b):
    return a + b


@fastrt.remote(num_cpus=1)
class Counter:
    def __init__(self):
        self.count = 0

    def more(self):
        self.count += 1
        return self.count


def connections(nodes):
    """Open connections between the uplinks."""
    found = 0
    ports = {node.note.address.rpartition(":")[2] for node in nodes}
    for node in nodes:
        uplink = node.child("fastrt.runtime.uplink")
        for one in uplink.net_connections():
            found += one.status == psutil.CONN_ESTABLISHED and bool(one.raddr) and str(one.raddr.port) in ports
    return found


def test_nodes_without_work_are_not_connected(rt, nodes, wait_until):
    wait_until(lambda: len(fastrt.nodes()) == 3, "all nodes", PATIENCE_S)
    assert connections(nodes) == 0


def test_connection_is_closed_after_use_and_opened_for_the_next_task(rt, nodes, wait_until):
    for _ in range(2):
        assert fastrt.get(add.remote(1, 2), timeout=PATIENCE_S) == 3
        assert connections(nodes) >= 1
        wait_until(lambda: connections(nodes) == 0, "the connections to be closed", PATIENCE_S)


def test_connection_stays_while_an_actor_or_an_object_needs_it(rt, nodes, wait_until):
    counter = Counter.remote()
    assert fastrt.get(counter.more.remote(), timeout=PATIENCE_S) == 1
    wait_until(lambda: connections(nodes) == 1, "the connections that nothing needs to be closed", PATIENCE_S)
    assert fastrt.get(counter.more.remote(), timeout=PATIENCE_S) == 2
    del counter
    wait_until(lambda: connections(nodes) == 0, "the connection to be closed", PATIENCE_S)


@fastrt.remote
def hold(folder, name):
    Path(folder, f"{name} begun").touch()
    while not Path(folder, f"{name} ends").exists():
        threading.Event().wait(0.005)


def test_tasks_queued_at_a_node_that_falls_behind_move_to_an_idle_one(rt, nodes, tmp_path, wait_until):
    """Two nodes get tasks ahead, and one of them a task that does not end: the others run without it."""
    with contextlib.ExitStack() as stack:
        clients = []
        for node in nodes[1:]:
            client, link = join.join(node.note.socket_path, "tool", "test")
            stack.callback(link.close)
            stack.callback(link.send, Bye())
            stack.callback(client.close)
            clients.append(client)
        long = [hold.options(scheduling=name).remote(str(tmp_path), name) for name in ("two", "three")]
        wait_until(lambda: len(list(tmp_path.glob("* begun"))) == 2, "both workers to be busy", PATIENCE_S)
        short = [add.remote(k, 1) for k in range(20)]
        wait_until(lambda: all(core.queued(client) for client in clients), "tasks to wait on both nodes", PATIENCE_S)
        (tmp_path / "three ends").touch()
        assert fastrt.get(short, timeout=PATIENCE_S) == list(range(1, 21))
        assert not core.queued(clients[0])
        assert fastrt.wait(long, timeout=0)[1] == long[:1]
        (tmp_path / "two ends").touch()
        fastrt.get(long, timeout=PATIENCE_S)
