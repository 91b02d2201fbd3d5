"""A cluster as users have it: servers that are processes, workers in others, membership, kills at any time."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastrt
from fastrt import ps
from fastrt.durable import StateDirectoryError
from fastrt.errors import ConfigError, ForkedRuntimeError, NotInitializedError
from fastrt.membership import ClusterOptions, ClusterScheduler, Role
from fastrt.membership.http import request
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of

F = np.float32

# Let grpc open what it keeps open for good, before the first test is watched for what it leaves.
with ClusterScheduler(ClusterOptions(grpc_address="127.0.0.1:0", allow_anonymous=True)):
    pass

WORKER = """
import sys
import numpy as np
from fastrt import ps
with ps.connect(sys.argv[1], sys.argv[2]) as cluster:
    table = cluster.table("w", (300, 1000), optimizer=ps.SGD(lr=1.0))
    rows = cluster.embedding("e", 8, init=0.0, optimizer=ps.SGD(lr=1.0))
    print("rank", cluster.rank, flush=True)
    for step in range(int(sys.argv[3])):
        table.push(np.ones((300, 1000), np.float32))
        rows.push(np.arange(100 * step, 100 * step + 1000), np.ones((1000, 8), np.float32))
        if step % 10 == 0:
            table.pull()
    cluster.barrier()
"""


class Other:
    """A worker that is another process."""

    def __init__(self, cluster: ps.Cluster, steps: int) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, cluster.address, cluster.token, str(steps)], stdout=subprocess.PIPE, env=env
        )

    def finish(self) -> None:
        out, _ = self.process.communicate(timeout=50)
        assert self.process.returncode == 0, out


def servers(cluster: ps.Cluster) -> Any:
    return cluster._head.servers  # type: ignore[union-attr]


def test_server_killed_during_pushes_loses_none_and_repeats_none(wait_until) -> None:
    """And what a cluster says about itself."""
    with ps.start(1, http_port=0, host="127.0.0.2") as cluster:
        events: list[Any] = []
        cluster.on_event(events.append)
        table = cluster.table("w", (300, 1000), optimizer=ps.SGD(lr=1.0))
        rows = cluster.embedding("e", 8, init=0.0, optimizer=ps.SGD(lr=1.0))
        assert table is cluster.table("w", (300, 1000), optimizer=ps.SGD(lr=1.0))
        wait_until(lambda: cluster.state() == "READY", "all servers in the membership", 30)
        assert sorted((view.role, view.rank) for view in cluster.nodes()) == [
            (Role.SERVER, 0), (Role.WORKER, 0),
        ]  # fmt: skip
        before = servers(cluster)[0].pid
        pushed = 0
        while servers(cluster)[0].pid == before or pushed < 30:
            table.push(np.ones((300, 1000), F))
            rows.push(np.arange(100), np.ones((100, 8), F))
            pushed += 1
            if pushed == 10:  # and within pushes from now on
                killer = threading.Timer(0.003, os.kill, (before, signal.SIGKILL))
                killer.start()
        killer.join()
        assert (table.pull() == -pushed).all()
        assert (rows.pull(np.arange(100)) == -pushed).all()
        cluster.broadcast_event(7)
        cluster.barrier()
        wait_until(lambda: 7 in events, "the event")
        assert "cluster_state" in manage(cluster, "/state")[1]
        assert all(view.host == "127.0.0.2" for view in cluster.nodes() if view.role is Role.SERVER)
        copy = pickle.loads(pickle.dumps(cluster))
        assert pickle.loads(pickle.dumps(cluster)) is copy
        with copy, pytest.raises(ConfigError, match="process that started"):
            copy.scale(2)
        with pytest.raises(ValueError, match="shard is 0"):
            cluster.table("x", (1,), shard=0)
        with pytest.raises(TypeError, match="float32, not float64"):
            cluster.table("x", (1,), "f8")
        with pytest.raises(ps.TableMismatchError, match="exists with another definition: optimizer"):
            cluster.table("w", (300, 1000), optimizer=ps.Adam())
        with pytest.raises(ConfigError, match="pass a folder"):
            cluster.checkpoint()
        child = os.fork()
        if child == 0:
            try:
                table.pull()
            except ForkedRuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(NotInitializedError, match="closed"):
        table.pull()


@pytest.mark.long
def test_two_workers_train_while_servers_are_killed_and_come_and_go(wait_until) -> None:
    """Every push of both is applied once: the servers are killed in the middle of pushes, and their number changes."""
    steps = 60
    with ps.start(2, "async", num_workers=2) as cluster:
        events: list[Any] = []
        other = Other(cluster, steps)
        cluster.on_event(events.append)
        table = cluster.table("w", (300, 1000), optimizer=ps.SGD(lr=1.0))
        rows = cluster.embedding("e", 8, init=0.0, optimizer=ps.SGD(lr=1.0))

        def disturb() -> None:
            for k in range(3):
                server = servers(cluster)[k % 2]
                before = server.pid
                os.kill(before, signal.SIGKILL)
                wait_until(lambda before=before, server=server: server.pid != before, "another process", 20)
            cluster.scale(3)
            os.kill(servers(cluster)[2].pid, signal.SIGKILL)
            cluster.scale(1)

        with ThreadPoolExecutor(1) as thread:
            disturbing = thread.submit(disturb)
            mine = 0
            while mine < steps or not disturbing.done():
                table.push(np.ones((300, 1000), F))
                rows.push(np.arange(100), np.ones((100, 8), F))
                mine += 1
            disturbing.result()  # its error, if it failed
        cluster.barrier()
        other.finish()
        assert (table.pull() == -(mine + steps)).all()
        expected = np.zeros(100 * steps + 1000)
        for step in range(steps):
            expected[100 * step : 100 * step + 1000] -= 1
        expected[:100] -= mine
        found = rows.pull(np.arange(len(expected)))
        assert np.array_equal(found, np.repeat(expected[:, None], 8, axis=1))
        wait_until(lambda: ps.MemberEvent.SCALE_OUT_DONE in events, "the event")
        assert len([view for view in cluster.nodes() if view.role is Role.SERVER and view.alive]) == 1


@pytest.mark.long  # the membership misses a server after seconds
def test_scaling_waits_for_a_server_that_is_lost_while_parts_move(wait_until, monkeypatch) -> None:
    with ps.start(2) as cluster:
        table = cluster.table("w", (30, 10), optimizer=ps.SGD(lr=1.0), shard=6)
        table.push(np.ones((30, 10), F))
        wait_until(lambda: cluster.state() == "READY", "all servers in the membership", 30)
        move_to = cluster._head.move_to  # type: ignore[union-attr]

        def move_and_lose(indexes: Any) -> None:
            move_to(indexes)
            if len(indexes) == 1:
                os.kill(servers(cluster)[1].pid, signal.SIGKILL)
                wait_until(lambda: cluster.state() != "READY", "the membership to miss it", 30)

        monkeypatch.setattr(cluster._head, "move_to", move_and_lose)
        cluster.scale(1)
        assert list(servers(cluster)) in ([0], [1])
        assert (table.pull() == -1).all()


def manage(cluster: ps.Cluster, path: str, body: Any = None) -> tuple[int, Any]:
    """A request over HTTP: status and answer."""
    address = cluster._head.scheduler.http_address  # type: ignore[union-attr]
    data = None if body is None else json.dumps(body).encode()
    return request(address, trust_of(cluster.token), "GET" if body is None else "POST", path, data)


def test_scaling_over_http_moves_the_tables_under_load(wait_until) -> None:
    """No push is lost and none made twice; what cannot be is refused, also while another request is carried out."""
    with ps.start(1, "async", http_port=0) as cluster:
        table = cluster.table("w", (300, 1000), optimizer=ps.SGD(lr=1.0), shard=6)
        rows = cluster.embedding("e", 8, init=0.0, optimizer=ps.SGD(lr=1.0))
        table.push(np.ones((300, 1000), F))
        rows.push(np.arange(100), np.ones((100, 8), F))
        wait_until(lambda: cluster.state() == "READY", "all servers in the membership", 30)
        ended, pushed = threading.Event(), [1]

        def push() -> None:
            while not ended.is_set():
                table.push(np.ones((300, 1000), F))
                rows.push(np.arange(100), np.ones((100, 8), F))
                pushed[0] += 1

        def scaled(path: str, body: Any, servers: int) -> None:
            with cluster._head.lock:  # type: ignore[union-attr]  # it begins, and does not end yet
                assert manage(cluster, path, body)[0] == 200
                status, answer = manage(cluster, path, body)
            assert (status, answer["error_message"][:25]) == (400, "The cluster is not ready.")
            is_ready = {"message": "Get cluster state successful.", "cluster_state": "CLUSTER_READY"}
            wait_until(lambda: manage(cluster, "/state")[1] == is_ready, "the end of scaling", 40)
            there = [one for one in manage(cluster, "/nodes")[1]["node_ids"] if one["role"] == "SERVER"]
            tables = cluster._head.tables.values()  # type: ignore[union-attr]
            owners = {owner for _, which in tables for owner in which}
            assert len(there) == len(owners) == servers

        pusher = threading.Thread(target=push)
        pusher.start()
        try:
            scaled("/scaleout", {"worker_num": 0, "server_num": 1}, 2)
            for path, body, words in (
                ("/scaleout", {"worker_num": 1, "server_num": 0}, "number of workers"),
                ("/scaleout", {"worker_num": 0, "server_num": 300}, "there can be 1 to 256"),
                ("/scalein", {"node_ids": []}, "are empty"),
                ("/scalein", {"node_ids": ["server-7"]}, "No server has it"),
                ("/scalein", {"node_ids": ["server-0"]}, "leads, and cannot leave"),
                ("/newInstance", {}, "no federated-learning instances"),
                ("/enableFLS", {}, "no federated-learning instances"),
            ):
                status, answer = manage(cluster, path, body)
                assert (status, words in answer["error_message"]) == (400, True), answer
            held = manage(cluster, "/queryInstance", {})[1]["result"]
            assert [json.loads(held[rank])["tables"]["w"]["parts"] for rank in "01"] == [3, 3]
            scaled("/scalein", {"node_ids": ["server-1"]}, 1)
        finally:
            ended.set()
            pusher.join()
        assert (table.pull() == -pushed[0]).all()
        assert (rows.pull(np.arange(100)) == -pushed[0]).all()


@pytest.mark.long
def test_scaling_that_fails_is_taken_back_at_once_and_can_be_tried_again(wait_until) -> None:
    with ps.start(1) as cluster:
        table = cluster.table("w", (4000,), optimizer=ps.SGD(lr=1.0), shard=4)
        table.push(np.ones(4000, F))
        wait_until(lambda: cluster.state() == "READY", "all servers in the membership", 30)
        with pytest.raises(ps.TableTimeoutError, match="has 1 of 2 servers"):
            cluster.scale(2, timeout=0)
        assert (cluster.state(), len(servers(cluster))) == ("READY", 1)
        table.push(np.ones(4000, F))
        cluster.scale(2)
        assert (cluster.state(), len(servers(cluster))) == ("READY", 2)
        assert (table.pull() == -2).all()


@pytest.mark.long
def test_cluster_is_closed_while_it_is_scaled(wait_until) -> None:
    with ps.start(1, http_port=0) as cluster:
        cluster.table("w", (4000,), shard=4).push(np.ones(4000, F))
        wait_until(lambda: cluster.state() == "READY", "all servers in the membership", 30)
        assert manage(cluster, "/scaleout", {"worker_num": 0, "server_num": 2})[0] == 200
        wait_until(lambda: len(servers(cluster)) == 3, "the new servers", 30)
    assert cluster.closed


FOLDER = """
import sys
import numpy as np
from fastrt import ps
cluster = ps.start(2, checkpoint_dir=sys.argv[1], durability="power")
table = cluster.table("w", (2048,), init=np.arange(2048, dtype=np.float32), optimizer=ps.SGD(lr=1.0), shard=2)
rows = cluster.embedding("e", 3, rows=50, init=0.0, optimizer=ps.SGD(lr=1.0))
rows.push(np.arange(50), np.ones((50, 3), np.float32))
cluster.scale(3)
table.push(np.ones(2048, np.float32))
print("pushed", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_cluster_of_a_folder_goes_on_when_all_its_processes_were_killed_and_restores_checkpoints(
    tmp_path: Path, wait_until: Any
) -> None:
    folder = tmp_path / "c"
    env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
    words = [sys.executable, "-c", FOLDER, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"pushed\n"
        with pytest.raises(StateDirectoryError, match="in use by another process"):
            ps.start(3, checkpoint_dir=folder)
        pids = [int(pid) for pid in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
        for pid in (first.pid, *pids):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the end of the servers")
    with pytest.raises(ConfigError, match="num_servers 3, num_workers 1"):
        ps.start(2, checkpoint_dir=folder)
    with ps.start(3, checkpoint_dir=folder, durability="power") as cluster:
        table = cluster.table("w", (2048,), init=np.zeros(2048, F), optimizer=ps.SGD(lr=1.0), shard=2)
        rows = cluster.embedding("e", 3, rows=50, init=0.0, optimizer=ps.SGD(lr=1.0))
        assert np.array_equal(table.pull(), np.arange(2048) - 1)
        assert (rows.pull(np.arange(50)) == -1).all()
        path = cluster.checkpoint()
        table.push(np.ones(2048, F))
        os.kill(servers(cluster)[0].pid, signal.SIGKILL)
        assert np.array_equal(table.pull(), np.arange(2048) - 2)
    with ps.restore(path, 1) as cluster:
        table = cluster.table("w", (2048,), init=np.zeros(2048, F), optimizer=ps.SGD(lr=1.0), shard=2)
        assert np.array_equal(table.pull(), np.arange(2048) - 1)
        rows = cluster.embedding("e", 3, rows=50, init=0.0, optimizer=ps.SGD(lr=1.0))
        assert (rows.pull(np.arange(50)) == -1).all()


@pytest.mark.long
def test_killed_server_without_a_log_ends_the_cluster(wait_until) -> None:
    with ps.start(1, durability="none") as cluster:
        table = cluster.table("w", (4,))
        table.push(np.ones(4, F))
        os.kill(servers(cluster)[0].pid, signal.SIGKILL)

        def push() -> None:
            while True:
                table.push(np.ones(4, F))

        with pytest.raises(ps.ServerLostError, match="durability 'none'"):
            push()


@pytest.mark.long
def test_actors_that_are_sent_the_cluster_are_its_workers(runtime_dir: Path) -> None:
    class Trainer:
        def __init__(self, cluster: ps.Cluster) -> None:
            self.cluster = cluster
            self.table = cluster.table("w", (4,), optimizer=ps.SGD(lr=1.0))

        def step(self, cluster: ps.Cluster) -> float:
            assert cluster is self.cluster
            self.table.push(np.full(4, 1 + cluster.rank, F))
            return float(self.table.pull().sum())

    actor = fastrt.remote(Trainer)
    with ps.start(1, num_workers=2) as cluster, fastrt.init(2, "64MiB", runtime_dir=runtime_dir):
        actors = [actor.remote(cluster) for _ in range(2)]
        for count in range(1, 4):
            assert fastrt.get([one.step.remote(cluster) for one in actors], timeout=40) == [-6.0 * count] * 2
        assert cluster.state() == "READY"


STARTER = """
import sys
from fastrt import ps
cluster = ps.start(1)
print(*[server.pid for server in cluster._head.servers.values()], flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_servers_end_with_the_process_that_started_them(wait_until) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    with starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 1
        starter.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the end of the servers")


def test_options_that_make_no_sense_are_refused() -> None:
    for options, words in (
        ({"num_servers": 0}, "num_servers is 0"),
        ({"num_servers": 1, "mode": "fast"}, "modes are sync, async, ssp"),
        ({"num_servers": 1, "durability": "power"}, "needs a checkpoint_dir"),
        ({"num_servers": 1, "staleness": 2}, "staleness needs mode"),
        ({"num_servers": 1, "num_workers": True}, "num_workers is True"),
    ):
        with pytest.raises(ConfigError, match=words):
            ps.start(**options)  # type: ignore[arg-type]
    with pytest.raises(NotInitializedError):
        ps.start(1, scheduling="spread")
    with pytest.raises(ConfigError, match="token"):
        ps.connect("127.0.0.1:1")
    with pytest.raises(ps.ServerLostError, match="no cluster answers"):
        ps.connect("127.0.0.1:1", new_token())
    with pytest.raises(ConfigError, match="not a cluster's token"):
        ps.connect("127.0.0.1:1", "x")
    for bad in (lambda: ps.SGD(lr=-1), lambda: ps.Adam(beta1=1.0), lambda: ps.FTRL(lr=0), lambda: ps.Normal("x")):
        with pytest.raises(ValueError, match="must be"):
            bad()
