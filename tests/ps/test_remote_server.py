"""Servers on other nodes of a fastrt cluster: where they are, who maps what, and what deaths and the network leave."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fastrt
from fastrt import ps
from fastrt.errors import ActorDiedError, ConfigError, FastrtError
from fastrt.node.daemon import sweep_sessions
from fastrt.ps.remote_server import Keeper
from support.cluster import RunningNode, two_nodes
from support.netns import Net, UnavailableError

F = np.float32


@pytest.fixture(scope="module")
def nodes(runtime_dir: Path) -> Iterator[tuple[RunningNode, RunningNode]]:
    with two_nodes(runtime_dir, 1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def runtime(runtime_dir: Path, nodes: Any) -> Iterator[fastrt.Runtime]:
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


def node_of(pid: int, nodes: tuple[RunningNode, RunningNode]) -> str:
    """The name of the node that a process descends from."""
    above = [one.pid for one in psutil.Process(pid).parents()]
    (name,) = [name for name, node in zip(("one", "two"), nodes, strict=True) if node.process.pid in above]
    return name


def servers(cluster: ps.Cluster) -> dict[int, Any]:
    return dict(cluster._head.servers)  # type: ignore[union-attr]


@fastrt.remote(num_cpus=0, scheduling="two")
def push_from_there(cluster: ps.Cluster) -> bool:
    cluster.table("w", (3000,), optimizer=ps.SGD(lr=1.0), shard=3).push(np.ones(3000, F))
    return True


@pytest.mark.long
def test_servers_lie_on_nodes_as_is_said_and_lose_nothing(runtime: Any, nodes: Any, wait_until: Any) -> None:
    """A server over there is killed and comes back; more come by scaling; a group's bundles are taken in turns."""
    wait_until(lambda: len(fastrt.nodes()) == 2, "the other node to be known")
    with ps.start(2, "async", num_workers=2, scheduling=["one", "two"]) as cluster:
        pids = {index: server.pid for index, server in servers(cluster).items()}
        assert [node_of(pids[k], nodes) for k in (0, 1)] == ["one", "two"]
        there = push_from_there.remote(cluster)
        table = cluster.table("w", (3000,), optimizer=ps.SGD(lr=1.0), shard=3)
        table.push(np.ones(3000, F))
        assert fastrt.get(there, timeout=30)
        os.kill(pids[1], signal.SIGKILL)
        table.push(np.ones(3000, F))
        assert (table.pull() == -3).all()
        assert servers(cluster)[1].pid != pids[1]
        cluster.scale(3)
        assert node_of(servers(cluster)[2].pid, nodes) == "one"
        cluster.scale(2)
        table.push(np.ones(3000, F))
        assert (table.pull() == -4).all()
        pids = {index: server.pid for index, server in servers(cluster).items()}
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), "the end of the servers")
    group = fastrt.placement_group([{"CPU": 0.5}, {"CPU": 0.5}], "STRICT_SPREAD")
    assert group.wait(30)
    with ps.start(2, placement_group=group) as cluster:
        assert sorted(node_of(server.pid, nodes) for server in servers(cluster).values()) == ["one", "two"]
        with pytest.raises(FastrtError, match="has another keeper"):
            Keeper().keep(cluster.address, cluster.token, 1)
        (keeper,) = {psutil.Process(servers(cluster)[1].pid).ppid()}
        table = cluster.table("w", (3000,), shard=3)
        table.push(np.ones(3000, F))
        os.kill(keeper, signal.SIGKILL)

        def push() -> None:
            while True:
                table.push(np.ones(3000, F), timeout=60)

        with pytest.raises(ps.ServerLostError, match=r"server 1 is lost, with the actor"):
            push()
    fastrt.remove_placement_group(group)
    wait_until(lambda: fastrt.available_resources() == fastrt.cluster_resources(), "what the group had to be free")
    with ps.start(2, scheduling="spread") as cluster:
        assert sorted(node_of(server.pid, nodes) for server in servers(cluster).values()) == ["one", "two"]


@pytest.mark.long
def test_cluster_that_lost_a_server_which_does_not_answer_leaves_nothing(
    runtime: Any, nodes: Any, wait_until: Any
) -> None:
    """The server's process is stopped, so it does not answer the end of its connections. The module's check looks."""
    wait_until(lambda: len(fastrt.nodes()) == 2, "the other node to be known")
    with ps.start(2, scheduling=["one", "two"]) as cluster:
        cluster.table("w", (3000,), shard=3).push(np.ones(3000, F))
        wait_until(lambda: cluster.state() == "READY", "the membership to know all servers", 30)
        stopped = psutil.Process(servers(cluster)[1].pid)
        keeper = stopped.ppid()
        stopped.suspend()
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: cluster._head.failed, "the head to notice the loss")  # type: ignore[union-attr]
    stopped.kill()


def test_server_that_an_actor_keeps_is_killed_and_goes_on(rt: Any) -> None:
    """On this very node; and what cannot be a place for servers."""
    with ps.start(1, scheduling="default") as cluster:
        table = cluster.table("w", (3000,), optimizer=ps.SGD(lr=1.0))
        table.push(np.ones(3000, F))
        before = servers(cluster)[0].pid
        os.kill(before, signal.SIGKILL)
        table.push(np.ones(3000, F))
        assert (table.pull() == -2).all()
        assert servers(cluster)[0].pid != before
    group = fastrt.placement_group([{"CPU": 1}])
    for wrong, words in (
        ({"scheduling": 7}, "scheduling is 7"),
        ({"scheduling": []}, "it must name at least one node"),
        ({"scheduling": "one", "placement_group": group}, "or placement_group="),
    ):
        with pytest.raises(ConfigError, match=words):
            ps.start(1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ActorDiedError, match="node 'nowhere', which no node has"):
        ps.start(1, scheduling="nowhere")
    fastrt.remove_placement_group(group)


def test_server_whose_actor_is_killed_goes_on_from_its_folder(rt: Any, tmp_path: Path, wait_until: Any) -> None:
    with ps.start(1, scheduling="default", checkpoint_dir=tmp_path / "c") as cluster:
        table = cluster.table("w", (3000,), optimizer=ps.SGD(lr=1.0))
        for count in range(1, 3):
            table.push(np.ones(3000, F))
            before = servers(cluster)[0].pid
            os.kill(psutil.Process(before).ppid(), signal.SIGKILL)
            table.push(np.ones(3000, F))  # maybe before that server has noticed
            wait_until(lambda before=before: servers(cluster)[0].pid != before, "another one")
            assert (table.pull() == -2 * count).all()
        cluster.checkpoint()
        last = servers(cluster)[0].pid
    wait_until(lambda: not psutil.pid_exists(last), "the end of the server")


OVER_THERE = """
import json, sys
import numpy as np
import fastrt
from fastrt import ps

head, host, folder, insecure = sys.argv[1:]
F = np.float32

@fastrt.remote(num_cpus=0, scheduling="two")
def work(cluster):
    table = cluster.table("w", (100_000,), init=np.arange(100_000, dtype=F), optimizer=ps.SGD(lr=1.0), shard=4)
    rows = cluster.embedding("e", 8, init=0.0, optimizer=ps.SGD(lr=1.0))
    table.push(np.ones(100_000, F))
    rows.push(np.arange(1000), np.ones((1000, 8), F))
    links = cluster._session._links
    values = table.pull(), rows.pull(np.arange(1000))
    return [links[k].wire.is_local for k in (0, 1)], values

with fastrt.init(address=head, runtime_dir=folder):
    with ps.start(2, num_workers=2, host=host, insecure=insecure == "insecure", scheduling=["one", "two"]) as cluster:
        there = work.remote(cluster)
        table = cluster.table("w", (100_000,), init=np.arange(100_000, dtype=F), optimizer=ps.SGD(lr=1.0), shard=4)
        rows = cluster.embedding("e", 8, init=0.0, optimizer=ps.SGD(lr=1.0))
        table.push(np.ones(100_000, F))
        rows.push(np.arange(1000), np.ones((1000, 8), F))
        theirs, (values, found) = fastrt.get(there, timeout=60)
        ours = [cluster._session._links[k].wire.is_local for k in (0, 1)]
        good = [table.pull(), values, rows.pull(np.arange(1000)), found]
        wanted = [np.arange(100_000) - 1] * 2 + [np.full((1000, 8), -1)] * 2
        hosts = [view.host for view in cluster.nodes() if view.role.name == "SERVER"]
        right = all(np.array_equal(a, b) for a, b in zip(good, wanted))
        print(json.dumps([ours, theirs, hosts, right]), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["tls", "insecure"])
def test_workers_map_what_is_on_their_host_and_stream_what_is_not(runtime_dir: Path, how: str) -> None:
    """Two hosts, which are network namespaces: a server and a worker on each."""
    with contextlib.ExitStack() as stack:
        try:
            net = stack.enter_context(contextlib.closing(Net()))
        except UnavailableError as exc:
            pytest.skip(f"network namespaces cannot be made here: {exc}")
        hosts = [net.host(name) for name in "ab"]
        options = ("--insecure", "--num-workers", "1", "--host")
        first = (*options, hosts[0], "--head", "--port", "0", "--name", "one")
        head = RunningNode(runtime_dir, *first, within=net.within("a"))
        stack.callback(head.stop)
        second = (*options, hosts[1], "--address", head.head, "--name", "two")
        other = RunningNode(runtime_dir, *second, within=net.within("b"))
        stack.callback(other.stop)
        env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
        words = [*net.within("a"), sys.executable, "-c", OVER_THERE, head.head, hosts[0], str(runtime_dir), how]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        ours, theirs, places, right = json.loads(done.stdout)
        assert right
        assert (ours, theirs) == ([True, False], [False, True])
        assert sorted(places) == hosts
    sweep_sessions(runtime_dir, runtime_dir.parent / "spill")
