"""Another user of the machine, without the token, at every door of a parameter-server cluster."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fastrt import ps
from fastrt.membership import ClusterOptions, ClusterScheduler, MemberUnreachableError, Role, Settings, wire
from fastrt.membership.framing import Frame, Kind, Parser
from fastrt.membership.http import request
from fastrt.membership.wire import NO_RANK, Command, request_frame
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of
from fastrt.net.grpc.visitors import VISITORS_MAX
from fastrt.ps.wire import BrokenWireError, dial

F = np.float32
STRANGER = 61_234  # a user that has no name, no files and no processes

# Each attacker reads one line of JSON, and writes one when it is done; then it stays until its input ends.
PREPARE = """
import encodings.idna, json, os, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgroups([])
os.setresgid(STRANGER, STRANGER, STRANGER)
os.setresuid(STRANGER, STRANGER, STRANGER)
given = json.loads(sys.stdin.readline())
def to(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 20)
def say(what):
    print(json.dumps(what), flush=True)
"""
# Sends each frame over a connection of its own, and says what was answered.
SENDS = """
kept, answers = [], []
for address, data in given:
    kept.append(to(address))
    kept[-1].sendall(bytes.fromhex(data))
    answer = b""
    try:
        while piece := kept[-1].recv(1 << 16):
            answer += piece
            kept[-1].settimeout(0.2)
    except OSError:
        pass
    answers.append(answer.hex())
say(answers)
sys.stdin.readline()
"""
# Listens where a process of the cluster is expected, answers, and says what it was sent.
LISTENS = """
if given["unix"]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0" + given["unix"])
else:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
listener.listen()
listener.settimeout(20)
say(None if given["unix"] else "127.0.0.1:%d" % listener.getsockname()[1])
sock, _ = listener.accept()
sock.settimeout(20)
heard = b""
try:
    sock.sendall(bytes.fromhex(given["greets"]))
    while piece := sock.recv(1 << 16):
        heard += piece
except OSError:
    pass
say(heard.hex())
sys.stdin.readline()
"""
# Connects many times, and says nothing.
SILENT = """
kept = [to(address) for _ in range(given["times"]) for address in given["addresses"]]
say(len(kept))
sys.stdin.readline()
"""


class Attacker:
    """A process of another user that runs one of the scripts above."""

    def __init__(self, script: str, given: Any) -> None:
        # It takes the other user's identity itself, since that user may not be able to read this interpreter.
        command = [sys.executable, "-I", "-c", f"STRANGER = {STRANGER}\n{PREPARE}{script}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()

    def says(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def attack() -> Iterator[Callable[..., Attacker]]:
    """Start attackers; they end with the test."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    started: list[Attacker] = []

    def start(script: str, given: Any) -> Attacker:
        started.append(Attacker(script, given))
        return started[-1]

    yield start
    for one in started:
        one.process.communicate("\n", timeout=60)


@pytest.fixture(scope="module")
def started() -> Iterator[ps.Cluster]:
    with ps.start(1, http_port=0) as cluster:
        cluster.table("w", (10,), optimizer=ps.SGD(lr=1.0)).push(np.zeros(10, F))
        yield cluster


def scheduler_of(cluster: ps.Cluster) -> ClusterScheduler:
    return cluster._need_head().scheduler


def doors(cluster: ps.Cluster) -> dict[str, str]:
    """Every TCP port of a cluster."""
    head = cluster._need_head()
    found = {"head": head.address, "scheduler": head.scheduler.address, "http": head.scheduler.http_address}
    found |= {f"server {index}": server.address for index, server in head.servers.items()}
    for view in cluster.nodes():
        found[f"port of {view.role.name} {view.rank}"] = f"{view.host}:{view.port}"
    return found


def frame(command: int, data: bytes, kind: int = Kind.PROTOBUF, role: Role = Role.WORKER) -> str:
    return request_frame(command, 1, data, role, None, kind).pack().hex()


def registration(name: str, host: str, port: int) -> str:
    message = wire.RegisterMessage(ip=host, port=port, node_id=name, role=int(Role.WORKER))
    return frame(Command.REGISTER, message.SerializeToString())


def frames(answer: str) -> list[Frame]:
    """The cluster's frames in an answer; a TLS alert is none."""
    data = bytes.fromhex(answer)
    return [] if data[:2] == b"\x15\x03" else list(Parser().feed(data))


def test_finish_for_every_member_ends_nothing(attack: Any, started: Any, wait_until: Any) -> None:
    wait_until(lambda: started.state() == "READY", "all members")
    ids = [view.member_id for view in started.nodes()]
    orders = [frame(Command.FINISH, name.encode(), Kind.RAW) for name in ids]
    orders.append(frame(Command.SEND_EVENT, wire.EventMessage(event=66, node_id=ids[0]).SerializeToString()))
    orders.append(frame(Command.SCALE_OUT_DONE, wire.ScaleOutDone(node_id=ids[0]).SerializeToString()))
    orders.append(frame(Command.HEARTBEAT, wire.HeartbeatMessage(node_id=ids[0]).SerializeToString()))
    address = scheduler_of(started).address
    assert not any(map(frames, attack(SENDS, [(address, order) for order in orders]).says()))
    assert started.state() == "READY"
    assert not any(view.finished for view in started.nodes())
    started.table("w", (10,), optimizer=ps.SGD(lr=1.0)).push(np.zeros(10, F))


def test_metadata_to_a_member_changes_no_rank(attack: Any, started: Any) -> None:
    assert started.rank == 0
    told = wire.SendMetadata(worker_num=9, server_num=9, rank_id=5).SerializeToString()
    orders = [frame(Command.SEND_METADATA, told, role=Role.SCHEDULER), frame(Command.FINISH, b"", role=Role.SCHEDULER)]
    ports = [f"{view.host}:{view.port}" for view in started.nodes()]
    assert not any(map(frames, attack(SENDS, [(port, order) for port in ports for order in orders]).says()))
    assert started._session.member.rank == 0
    assert started.state() == "READY"


def test_ranks_are_left_for_the_members_and_scheduler_connects_nowhere_for_a_stranger(attack: Any) -> None:
    with ps.start(1) as cluster, socket.create_server(("127.0.0.1", 0)) as inside:
        port = inside.getsockname()[1]
        address = scheduler_of(cluster).address
        strangers = [registration(f"stranger-{i}", "127.0.0.1", port) for i in range(3)]
        assert not any(map(frames, attack(SENDS, [(address, one) for one in strangers]).says()))
        assert cluster.rank == 0
        assert not [view for view in cluster.nodes() if view.member_id.startswith("stranger")]
        inside.settimeout(0.2)
        with pytest.raises(TimeoutError):
            inside.accept()


@pytest.mark.parametrize(
    "host",
    ["192.0.2.1", *(pytest.param(one, marks=pytest.mark.long) for one in ("10.0.0.1", "169.254.169.254")),
     "::ffff:192.0.2.1"],
)  # fmt: skip
def test_anonymous_member_is_called_back_on_its_own_machine_only(attack: Any, host: str) -> None:
    options = ClusterOptions(settings=Settings(1, 0), allow_anonymous=True)
    with ClusterScheduler(options) as scheduler:
        (answer,) = attack(SENDS, [(scheduler.address, registration("far", host, 80))]).says()
        refused = wire.RegisterResp.FromString(frames(answer)[0].data)
        assert refused.rank_id == NO_RANK
        assert "machine that it connects from" in refused.reason
        assert not scheduler.overview().members


def test_anonymous_member_cannot_speak_for_another(attack: Any) -> None:
    options = ClusterOptions(settings=Settings(2, 0), allow_anonymous=True)
    with ClusterScheduler(options) as scheduler:
        joins = [(scheduler.address, registration(name, "127.0.0.1", 9)) for name in ("a", "b")]
        assert len(attack(SENDS, joins).says()) == 2
        ends = [(scheduler.address, frame(Command.FINISH, name, Kind.RAW)) for name in (b"a", b"b")]
        assert attack(SENDS, ends).says() == ["", ""]
        assert not any(view.finished for view in scheduler.overview().members)


@pytest.mark.parametrize(
    "greets",
    [
        b"fastrtP1".hex() + "00" * 96,
        pytest.param("", marks=pytest.mark.long),
        pytest.param("00" * 200, marks=pytest.mark.long),
    ],
)
def test_process_at_the_port_of_the_head_learns_nothing(attack: Any, monkeypatch: Any, greets: str) -> None:
    monkeypatch.setattr("fastrt.ps.client._DIAL_S", 1.0)
    token = new_token()
    attacker = attack(LISTENS, {"unix": None, "greets": greets})
    with pytest.raises(ps.ServerLostError, match="no process of this cluster answers"):
        ps.connect(attacker.says(), token)
    assert hides(attacker.says(), token)


def test_process_at_the_port_of_http_or_the_scheduler_learns_nothing(attack: Any) -> None:
    token = new_token()
    attacker = attack(LISTENS, {"unix": None, "greets": b"HTTP/1.0 200 OK\r\n\r\n{}".hex()})
    with pytest.raises(MemberUnreachableError):
        request(attacker.says(), trust_of(token), "POST", "/scalein", b'{"node_ids": ["server-1"]}')
    heard = attacker.says()
    assert hides(heard, token)
    assert b"scalein" not in bytes.fromhex(heard)


def test_process_at_the_unix_socket_of_a_server_is_not_spoken_to(attack: Any) -> None:
    token, name = new_token(), f"fastrt-test-{secrets.token_hex(8)}"
    attacker = attack(LISTENS, {"unix": name, "greets": ""})
    attacker.says()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(BrokenWireError):
        dial(name, nobody, trust_of(token), 5.0)
    assert attacker.says() == ""


def hides(heard: str, token: str) -> bool:
    data = bytes.fromhex(heard)
    return (
        bool(data) and token.encode() not in data and bytes.fromhex(token[-64:]) not in data and b"Bearer" not in data
    )


def test_thousand_silent_connections_take_neither_the_doors_nor_the_descriptors(attack: Any, started: Any) -> None:
    """They stay while the user's own program, which started the servers, goes on."""
    places = doors(started)
    assert {"head", "scheduler", "http", "server 0"} < set(places)
    before = len(os.listdir("/proc/self/fd"))
    given = {"addresses": sorted(set(places.values())), "times": 1 + 1024 // len(set(places.values()))}
    assert attack(SILENT, given).says() > 1024
    # Two descriptors for each of a threaded listener's visitors; head, HTTP, scheduler and this member's port are here.
    assert len(os.listdir("/proc/self/fd")) < before + 8 * VISITORS_MAX
    with contextlib.closing(ps.connect(started.address, started.token)) as other:
        assert other.nodes
    assert request(places["http"], trust_of(started.token), "GET", "/state")[0] == 200
    started.table("w", (10,), optimizer=ps.SGD(lr=1.0)).push(np.zeros(10, F))
    for server in started._need_head().servers.values():
        with contextlib.closing(dial(None, server.address, trust_of(started.token), 10.0)):
            pass


# Serves with no descriptor left, says how much of a core that took in half a second, and gets them back.
STARVED = """
import os, resource, sys, threading, time
import numpy as np
from fastrt import ps
with ps.start(1, http_port=0) as cluster:
    table = cluster.table("w", (10,), optimizer=ps.SGD(lr=1.0))
    table.push(np.zeros(10, np.float32))
    head = cluster._need_head()
    print(cluster.token, head.address, head.scheduler.address, head.scheduler.http_address, flush=True)
    sys.stdin.readline()
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        print("starved", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    table.push(np.zeros(10, np.float32))  # over connections that are there
    threading.Event().wait(0.5)
    print(time.process_time() - before, flush=True)
    while taken:
        os.close(taken.pop())
    print("fed", flush=True)
    sys.stdin.readline()
"""


def test_doors_without_descriptors_turn_strangers_away_and_open_again(attack: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def go_on() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        token, *places = process.stdout.readline().split()
        assert go_on() == "starved"
        assert attack(SILENT, {"addresses": places, "times": 20}).says() == 60
        assert float(go_on()) < 0.4, "a listener spins"
        assert process.stdout.readline().strip() == "fed"
        ps.connect(places[0], token).close()
        assert request(places[2], trust_of(token), "GET", "/state")[0] == 200
        process.stdin.write("\n")
