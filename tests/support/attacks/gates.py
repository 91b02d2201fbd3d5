"""The doors of a cluster, one small class for each kind: where it listens, and how right and wrong clients speak there.

A cell of the matrix that cannot exist is a reason in `impossible`, by the name of the attack.
"""

import os
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil

from fastrt.net.grpc.auth import read_token
from fastrt.runtime.nodes import nodes_at
from fastrt.store import join, messages
from support.attacks import speak
from support.attacks.scene import MAIN, Scene

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
BRACKETS = b"[" * 4000
NO_FOLDER = "a TCP port lies in no folder"
DIAL_S = 0.7  # for a right client at an address where another process listens
ABSTRACT = "an abstract name lies in no folder"


def nested(depth: int) -> bytes:
    """A protobuf message whose first field is such a message, so deep."""
    body = b""
    for _ in range(depth):
        size, prefix = len(body), b""
        while True:
            prefix += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
            size >>= 7
            if not size:
                break
        body = b"\n" + prefix + body
    return body


class Door:
    """One way in.

    Attributes:
        name: in the table.
        opening: what a client says first, without a secret.
        oversized: announces, or is, more than can be.
        nested: as deep as a reader could not go.
        impossible: attacks that there cannot be, and why.
        kind: of the socket: 1 for a stream, 5 for SOCK_SEQPACKET.
    """

    name = ""
    opening = b""
    oversized = b""
    nested = BRACKETS + b"\n"
    impossible: ClassVar[dict[str, str]] = {"squatted folder": NO_FOLDER}
    kind = 1

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    @property
    def address(self) -> str:
        """`host:port`, "@abstract" or a path."""
        raise NotImplementedError

    @property
    def secret(self) -> str:
        """The right one."""
        return read_token(self.scene.token_file)

    def right(self) -> None:
        """What a right client does; fails unless it succeeds."""
        raise NotImplementedError

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Try to be let in. Raises RefusedError."""
        raise NotImplementedError

    def dial(self, address: str) -> None:
        """Have a right client go to this address, whatever comes of it."""
        try:
            self.enter(address, self.secret, DIAL_S)
        except speak.RefusedError:
            pass

    def squat_at(self) -> str:
        """The abstract name or path at which another user waits for a right client; empty for any TCP port."""
        return ""

    def check_replay(self, said: list[bytes], answered: list[bytes], heard: bytes) -> None:
        """Fail if a replay was answered as the right client was."""
        assert len(heard) < 4096, heard
        tail = b"".join(answered)[-24:]
        assert not tail or tail not in heard, f"{self.name} answers a replay as it answered the right client"

    def squatted_folder(self, uid: int | None) -> str:
        """Another user has made the folder of this door. Fails unless that is refused."""
        raise NotImplementedError

    def process(self) -> psutil.Process:
        """That listens."""
        port = int(self.address.rpartition(":")[2])
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None:
                return psutil.Process(one.pid)
        raise AssertionError(f"{self.name}: no process listens at {self.address}")

    def begin(self) -> None:
        """Have it listen, where it does not always."""

    def end(self) -> None:
        """Have it listen no more."""


class Grpc(Door):
    """A gRPC service."""

    opening = HTTP2
    oversized = HTTP2 + b"\xff\xff\xff\1\4\0\0\0\1"
    method = ""
    programs = False  # whether programs in other languages use it, with certificates of their own

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Call the service's method with this secret."""
        return speak.call(address, self.method, secret, self.programs, timeout_s=timeout_s)

    @property
    def nested(self) -> bytes:  # type: ignore[override]
        """A message in a frame, without the call's headers."""
        return HTTP2 + b"\0\xff\xff\0\1\0\0\0\1" + nested(3000)


class Head(Grpc):
    """The head's membership service."""

    name, method = "head gRPC", "/fastrt.node.Head/Join"

    @property
    def address(self) -> str:
        """Host and port of the head."""
        return self.scene.head

    def right(self) -> None:
        """Run a task, and check that both nodes are members."""
        assert self.scene.node_note
        assert self.scene.driver.do() == 2 << 18
        nodes = nodes_at(self.scene.head_note.socket_path)
        assert len(nodes) == 2, nodes

    def dial(self, address: str) -> None:
        """Start a node that takes this address for its head."""
        words = ["start", "--address", address, "--num-workers", "0", "--token-file", str(self.scene.token_file)]
        environment = {**os.environ, **self.scene.environment}
        nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*MAIN, *words], env=environment, **nowhere) as one:
            try:
                one.wait(2.5)
            except subprocess.TimeoutExpired:
                one.kill()  # all that it has started ends with it


class Uplink(Head):
    """A node's service for other nodes."""

    name, method = "uplink gRPC", "/fastrt.node.Node/Exchange"

    @property
    def address(self) -> str:
        """Host and port of the second node's uplink."""
        return str(self.scene.node_note.address)

    def dial(self, address: str) -> None:
        """Call by a stub alone: nodes dial heads and other nodes by the same function."""
        Grpc.dial(self, address)


class Native(Head):
    """A node's stream for large values."""

    name = "native stream"
    opening = b""
    oversized = b"\xff" * 64

    @property
    def nested(self) -> bytes:  # type: ignore[override]
        """Opening brackets alone, as deeply nested JSON begins."""
        return BRACKETS

    @property
    def address(self) -> str:
        """Host and port at which the uplink's process listens besides its own service."""
        uplink = str(self.scene.node_note.address)
        for process in self.scene.processes():
            found = [
                f"127.0.0.1:{one.laddr.port}"
                for one in process.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            ]
            if uplink in found:
                return next(one for one in found if one != uplink)
        raise AssertionError("the uplink has no native stream")

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Connect to the stream, and prove this secret."""
        return speak.native(address, secret, timeout_s)

    def dial(self, address: str) -> None:
        """Connect with the right secret; no node is started for it."""
        Door.dial(self, address)


class Scheduler(Grpc):
    """The scheduler for programs in any language."""

    name, method, programs = "scheduler gRPC", "/Scheduler/SchedulerInfo", True

    @property
    def address(self) -> str:
        """Host and port of the scheduler."""
        return self.scene.scheduler

    def right(self) -> None:
        """Ask for the scheduler's state with the right secret."""
        assert speak.call(self.address, self.method, self.secret, True)[-1] == b"OK"


class Store(Scheduler):
    """A node's object store, for the scheduler's clients."""

    name, method = "object store gRPC", "/ObjStore/ObjStoreInfo"

    @property
    def address(self) -> str:
        """Host and port of the node's object store."""
        return self.scene.store


class Coordinator(Grpc):
    """The coordinator, which JAX's clients use without a secret."""

    name, method = "coordinator gRPC", "/tensorflow.CoordinationService/GetKeyValueDir"
    _open = "JAX's clients carry no secret: the port is open on loopback, and holds keys and barriers, no code"
    impossible: ClassVar[dict[str, str]] = {
        "squatted folder": NO_FOLDER,
        "no secret": _open,
        "wrong secret": _open,
        "right secret replayed": _open,
    }

    @property
    def address(self) -> str:
        """Host and port of the coordinator."""
        return self.scene.coordinator

    @property
    def secret(self) -> str:
        """The cluster's secret, which must not be found at this door either."""
        return read_token(self.scene.token_file)

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Call without a secret, as JAX's clients do."""
        return speak.call(address, self.method, None, timeout_s=timeout_s)

    def right(self) -> None:
        """Call without a secret."""
        assert speak.call(self.address, self.method, None)


class PsGrpc(Grpc):
    """Messages of parameter servers over gRPC."""

    name, method = "ps scheduler gRPC", "/fastrt.ps.Cluster/Exchange"

    @property
    def address(self) -> str:
        """Host and port of the gRPC service, as its process says them."""
        return self.scene.ps.find(r"gRPC on ([\d.:]+)")

    @property
    def secret(self) -> str:
        """The secret of the parameter servers' scheduler."""
        return read_token(self.scene.ps_token_file)

    def right(self) -> None:
        """Call the service with the right secret."""
        assert speak.call(self.address, self.method, self.secret)


class PsFrames(Door):
    """Frames of MindSpore's members."""

    name = "ps scheduler frames"
    opening = struct.pack("<IIQ", 1, 16, 32)
    oversized = struct.pack("<IIQ", 1, 4096, (1 << 32) - 2)
    nested = struct.pack("<IIQ", 1, 4000, 8000) + nested(1500).ljust(8000, b"\0")

    @property
    def address(self) -> str:
        """Host and port for members, as the scheduler's process says them."""
        return self.scene.ps.find(r"servers on ([\d.:]+)")

    @property
    def secret(self) -> str:
        """The secret of the parameter servers' scheduler."""
        return read_token(self.scene.ps_token_file)

    def right(self) -> None:
        """Speak to the scheduler as a member does."""
        speak.members(self.address, self.secret)

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Speak to the scheduler as a member with this secret."""
        return speak.members(address, secret, timeout_s)


class PsHttp(PsGrpc):
    """Management of parameter servers."""

    name = "ps HTTP"
    opening = b"POST /scalein HTTP/1.1\r\nHost: x\r\n"
    oversized = b"POST /scalein HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"

    @property
    def nested(self) -> bytes:  # type: ignore[override]
        """A request whose JSON is brackets in brackets."""
        return b"POST /scalein HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(BRACKETS), BRACKETS)

    @property
    def address(self) -> str:
        """Host and port of the HTTP service, as the scheduler's process says them."""
        return self.scene.ps.find(r"HTTP on ([\d.:]+)")

    def right(self) -> None:
        """Ask for the cluster's state with the right secret."""
        assert b"cluster_state" in speak.http(self.address, self.secret)

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Send a request with this secret."""
        return speak.http(address, secret, timeout_s)


class PsServer(Door):
    """A parameter server over TCP."""

    name = "ps server TCP"
    opening = struct.pack("<4sIQ", b"frps", 60, 0)
    oversized = struct.pack("<4sIQ", b"frps", 0xFFFFFFFF, 1 << 60)
    nested = struct.pack("<4sIQ", b"frps", 4000, 0) + BRACKETS

    @property
    def address(self) -> str:
        """Host and port of the first parameter server."""
        return str(self.scene.servers.ready["address"])

    @property
    def secret(self) -> str:
        """The secret of the cluster of parameter servers."""
        return str(self.scene.servers.ready["token"])

    def right(self) -> None:
        """Use a table as a worker of the cluster."""
        assert self.scene.servers.do() == 0.0

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Connect: as a worker with the right secret, else by a bare connection with this one."""
        if secret == self.secret:
            return speak.parameter_server(None, address, secret, timeout_s)
        return speak.parameters(address, secret)


class PsUnix(PsServer):
    """A parameter server over its abstract Unix socket."""

    name = "ps server Unix socket"
    impossible: ClassVar[dict[str, str]] = {
        "squatted folder": ABSTRACT,
        "no secret": "the kernel names the peer's user before a byte is read: see 'other uid'",
        "wrong secret": "the kernel names the peer's user before a byte is read: see 'other uid'",
        "right secret replayed": "the kernel names the peer's user before a byte is read: see 'other uid'",
    }

    @property
    def address(self) -> str:
        """The abstract name at which a parameter server listens."""
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@fastrt-ps-" in line]
        return next(name for name in names)

    def squat_at(self) -> str:
        """An abstract name, which any user can take."""
        return "@fastrt-ps-squatted"

    def process(self) -> psutil.Process:
        """The process that started the servers."""
        return psutil.Process(self.scene.servers.process.pid)

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Connect to this name as a worker with the right secret."""
        return speak.parameter_server(address.removeprefix("@"), "127.0.0.1:1", self.secret, timeout_s)


class Daemon(Door):
    """The daemon's Unix socket in the runtime folder."""

    name = "daemon Unix socket"
    nested = BRACKETS + b"\n"
    opening = b'{"op": "join", '
    oversized = b'{"op": "'
    _uid = "the kernel names the peer's user before a byte is read: see 'other uid'"
    impossible: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("no secret", "wrong secret", "right secret replayed"), _uid),
        "squatted folder": "its folder is the runtime folder, which has a row of its own",
    }

    @property
    def address(self) -> str:
        """The path of the head's socket."""
        return str(self.scene.head_note.socket_path)

    def squat_at(self) -> str:
        """A path in a folder where every user may listen."""
        folder = self.scene.folder / "squatted"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        return str(folder / "node.sock")

    def process(self) -> psutil.Process:
        """The daemon, a child of the head's process."""
        head = psutil.Process(self.scene.head_note.pid)
        return next(p for p in head.children() if "daemon" in " ".join(p.cmdline()) or "fastrt.node" in p.cmdline())

    def right(self) -> None:
        """Ask the daemon for the nodes."""
        assert nodes_at(self.address)

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Ask the daemon at this path for the nodes."""
        try:
            return join.inquire(address, messages.ListNodes(), messages.NodeList, timeout_s)
        except Exception as error:
            raise speak.RefusedError(str(error)) from None


class Group(Door):
    """Where the ranks of a group meet. Each cell has a group of its own, of which rank 0 has come."""

    name = "collective TCP"
    opening = b'{"place": '
    impossible: ClassVar[dict[str, str]] = {
        "squatted folder": NO_FOLDER,
        "squatted port": "ranks dial only addresses from an invitation that a holder of the secret has signed",
        "right secret replayed": "a group meets once; tests/attacks/test_collective.py replays an invitation",
    }
    oversized = b'{"place": "'
    _group = ""

    def begin(self) -> None:
        """Have rank 0 of a new group listen."""
        self._group = self.scene.next_group()
        self._before = self._names()
        self.scene.ranks[0].start(name=self._group, rank=0, address=self._coordinator)
        self._address = wait_for(self._found, f"{self.name}: rank 0 to listen")

    def right(self) -> None:
        """Let the other rank come and both add; then begin another group for what follows."""
        self.scene.ranks[1].start(name=self._group, rank=1, address=self._coordinator)
        assert [rank.result() for rank in self.scene.ranks] == [8.0, 8.0]
        self._group = ""
        self.begin()

    def end(self) -> None:
        """Let the other rank come, so that both end."""
        if self._group:
            self.scene.ranks[1].start(name=self._group, rank=1, address=self._coordinator)
            assert [rank.result() for rank in self.scene.ranks] == [8.0, 8.0]
            self._group = ""

    @property
    def address(self) -> str:
        """Host and port at which rank 0 listens."""
        return self._address

    @property
    def _coordinator(self) -> str | None:
        return self.scene.coordinator

    def process(self) -> psutil.Process:
        """The process of rank 0."""
        return psutil.Process(self.scene.ranks[0].process.pid)

    def enter(self, address: str, secret: str | None, timeout_s: float = 2.0) -> Any:
        """Connect as a rank that does not hold the group's secret."""
        return speak.rank(address)

    def _names(self) -> set[str]:
        process = self.process()
        return {
            f"127.0.0.1:{one.laddr.port}" for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN
        }

    def _found(self) -> str | None:
        return next(iter(self._names() - self._before), None)


class LocalGroup(Group):
    """Where the ranks of one machine meet: an abstract Unix socket."""

    name, kind = "collective abstract socket", 5
    _uid = "the kernel names the peer's user before a byte is read: see 'other uid'"
    impossible: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("no secret", "wrong secret", "right secret replayed"), _uid),
        "squatted folder": ABSTRACT,
        "squatted port": "ranks ask the kernel for the user of a listener before they send a byte",
    }

    @property
    def _coordinator(self) -> str | None:
        return None

    def _names(self) -> set[str]:
        lines = Path("/proc/net/unix").read_text().splitlines()
        return {line.split()[-1] for line in lines if "@fastrt-group-" in line}


def wait_for(find: Callable[[], Any], what: str) -> Any:
    """Wait until something is found."""
    pause = threading.Event()
    for _ in range(2000):
        if (found := find()) is not None:
            return found
        pause.wait(0.005)
    raise AssertionError(f"waited in vain for {what}")


DOORS: list[type[Door]] = [
    Head, Uplink, Native, Scheduler, Store, Coordinator, PsFrames, PsGrpc, PsHttp, PsServer, PsUnix, Group, LocalGroup,
    Daemon,
]  # fmt: skip
