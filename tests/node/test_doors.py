"""Every port on which a whole cluster listens, and strangers who knock at all of them.

The ports are asked of the kernel, not of the program: one that is new, and not in `DOORS`, fails.
"""

import contextlib
import re
import socket
import ssl
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from fastrt.net.address import split_address
from fastrt.net.grpc.auth import read_token
from fastrt.net.grpc.channel import bearer
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.scheduler import SchedulerClient
from fastrt.transfer import link, wire

PATIENCE_S = 20.0
MAIN = [sys.executable, "-c", "from fastrt.cli.main import main; main()"]
MODULE = "import fastrt\n\n@fastrt.remote\ndef exported():\n    return 1\n"
HEALTH = "/grpc.health.v1.Health/Check"
SETS = [message_set(name) for name in ("node", "ray", "transfer", "cluster")]
METHODS = [
    f"/{service}/{method}" for set_ in SETS for service in set_.service_names() for method in set_.methods(service)
]
# By process: what its ports speak; a gRPC service by the method that shows it.
DOORS = {
    "head": {"/fastrt.node.Head/Join": 1},
    "uplink": {"/fastrt.node.Node/Exchange": 1, "native": 1},
    "scheduler": {"/Scheduler/SchedulerInfo": 1},
    "coordinator": {"coordinator": 1},
    "bridge": {"/ObjStore/ObjStoreInfo": 1, "/WorkerService/InvokeCall": 1, "native": 1},
    "parameter servers' scheduler": {"sealed": 3},
}


@dataclass(frozen=True)
class Door:
    """A listening port."""

    process: str
    address: str


def doors_of(*pids: int) -> list[Door]:
    """Where these processes and all their children listen."""
    found = []
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            words = " ".join(process.cmdline())
            marks = {
                "fastrt.cluster.head": "head", "fastrt.runtime.uplink": "uplink", "fastrt.runtime.ray_bridge": "bridge",
                "'fastrt-scheduler'": "scheduler", "'fastrt-coordinator'": "coordinator",
                "ps scheduler": "parameter servers' scheduler",
            }  # fmt: skip
            name = next((name for mark, name in marks.items() if mark in words), words)
            for one in process.net_connections("inet"):
                assert one.type is socket.SOCK_STREAM, f"{name} has a socket that is not TCP: {one}"
                if one.status == psutil.CONN_LISTEN:
                    host = one.laddr.ip.removeprefix("::ffff:")
                    assert host == "127.0.0.1", f"{name} listens beyond this machine: {one}"
                    found.append(Door(name, f"{host}:{one.laddr.port}"))
    return found


def knock(address, method, metadata=(), identity=None, timeout_s=PATIENCE_S):
    """Call a method of any kind with an empty request: the status, and what came before it."""
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    if identity is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, identity.channel_credentials(), [*options, *identity.channel_options()])
    with channel:
        call = channel.stream_stream(method)(iter([b""]), timeout=timeout_s, metadata=metadata)
        came = []
        try:
            came += call
        except grpc.RpcError:
            pass
        return call.code(), came


def spoken(door, identity):
    """What a door of the cluster speaks, in the words of DOORS; found with the right identity."""
    proved = next((one for one in identities(identity) if one.why_refused(door.address) is None), None)
    if proved is not None:
        return method_of(door, identity=proved)
    for one in identities(identity):
        with contextlib.suppress(OSError, EOFError, wire.WireError):
            link.dial(door.address, one, False, 4.0).close()
            return "native"
    return method_of(door)


def identities(identity):
    """Of a cluster: its nodes', and that of its services for programs."""
    return identity, identity.for_programs()


def method_of(door, **shown):
    """The method that shows which gRPC service is at a door."""
    for method in [name for names in DOORS.values() for name in names if name.startswith("/")]:
        if knock(door.address, method, timeout_s=4.0, **shown)[0] is not grpc.StatusCode.UNIMPLEMENTED:
            return method
    return "coordinator"


@pytest.fixture
def cluster(start, runtime_dir, tmp_path, monkeypatch):
    """Two nodes with all services, and a function that starts them with options of one's own: (head, node)."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "exported_here.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def begin(*options):
        more = ("--num-workers", "1", "--export", "exported_here", *options)
        served = ("--scheduler-port", "0", "--coordinator-port", "0", "--num-tasks", "1")
        head = start("--head", "--port", "0", *served, *more)
        (address,) = re.findall(r"^scheduler: +(\S+)", head.output, re.M)
        return head, start("--address", head.head, "--scheduler", address, *more), address

    return begin


@pytest.fixture
def parameter_servers(tmp_path):
    """The scheduler of a cluster of parameter servers, as a process with all its ports; and its token's file."""
    token_file = tmp_path / "ps-token"
    words = ["ps", "scheduler", "--address", "127.0.0.1:0", "--num-workers", "1", "--num-servers", "1"]
    words += ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--token-file", str(token_file)]
    with subprocess.Popen([*MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert "HTTP on" in process.stdout.readline()
        yield process.pid, token_file
        process.terminate()


@pytest.mark.long
def test_no_door_of_a_cluster_opens_without_its_token(cluster, parameter_servers, wait_until):
    head, other, scheduler = cluster()
    servers_pid, servers_token = parameter_servers
    identity, servers = (Identity.from_token(read_token(Path(name))) for name in (head.note.token_file, servers_token))
    with SchedulerClient(scheduler, identity=identity.for_programs()) as client:

        def is_complete() -> bool:
            """Whether both nodes' workers are there, and each has exported its function."""
            info = client.info()
            exports = [len(function.workerid) for function in info.function_table.values()]
            return len(info.avail_worker) == 2 and exports == [2]

        wait_until(is_complete, "both nodes' workers and their functions", PATIENCE_S)
        before = client.info()
        found: dict[str, Counter[str]] = {}
        for door in doors_of(head.process.pid, other.process.pid, servers_pid):
            is_servers = door.process.startswith("parameter")
            kind = "sealed" if is_servers else spoken(door, identity)
            found.setdefault(door.process, Counter())[kind] += 1
            if is_servers:
                sealed_to_strangers(door, servers)
            elif kind in ("native", "coordinator"):
                for wrong in (None, "", "0" * 64):
                    get_nothing(door, kind, wrong)
            else:
                open_to_no_stranger(door, kind, identity)
        twice = {name: {kind: 2 * n for kind, n in DOORS[name].items()} for name in ("uplink", "bridge")}
        assert {name: dict(kinds) for name, kinds in found.items()} == {**DOORS, **twice}
        assert client.info() == before


def open_to_no_stranger(door, kind, identity):
    """Strangers get not even an answer to a health check; a program's certificate opens no link between nodes."""
    nodes, programs = identities(identity)
    ours = programs if door.process in ("scheduler", "bridge") else nodes
    wrong = nodes if ours is programs else programs
    for stranger in (None, wrong, *identities(Identity.from_token(new_token()))):
        for method in (HEALTH, kind):
            assert knock(door.address, method, identity=stranger) == (grpc.StatusCode.UNAVAILABLE, []), (door, stranger)
    assert knock(door.address, HEALTH, identity=ours)[0] is not grpc.StatusCode.UNAVAILABLE


def get_nothing(door, kind, token):
    """Try all that there is, with a token that is not this cluster's, or without one."""
    metadata = () if token is None else bearer(token)
    if kind == "native":
        with pytest.raises(wire.WireError, match="does not hold the secret"):
            link.dial(door.address, Identity.from_token(new_token()), False)
    else:
        for method in METHODS:
            assert knock(door.address, method, metadata) == (grpc.StatusCode.UNIMPLEMENTED, []), (door, method)


def sealed_to_strangers(door, servers):
    """The members' TLS handshake succeeds; others get no byte but TLS's own."""
    host, port = split_address(door.address)

    def received(context, words=b""):
        plain = socket.create_connection((host, port), PATIENCE_S)
        with plain, plain if context is None else context.wrap_socket(plain, server_hostname=servers.name) as sock:
            sock.sendall(words)
            return sock.recv(1)

    with socket.create_connection((host, port), PATIENCE_S) as plain:
        servers.client_context().wrap_socket(plain, server_hostname=servers.name).close()
    with pytest.raises(ssl.SSLError):
        received(Identity.from_token(new_token()).client_context())
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # believes everything, and has no certificate
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    for context in (blind, None):
        answer = b""
        with contextlib.suppress(OSError):
            answer = received(context, b"GET /state HTTP/1.1\r\n\r\n")
        assert answer in (b"", b"\x15"), door  # an alert of TLS
