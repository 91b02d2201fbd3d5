"""Schedulers and members in this process, and connections made by hand."""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastrt.membership import ClusterMember, ClusterOptions, ClusterScheduler, MemberOptions, Role, Settings
from fastrt.membership.framing import Frame, Kind, Parser
from fastrt.membership.wire import Meta, request_frame


def warm_up() -> None:
    """Let grpc open what it keeps open for good, before the first test is watched for what it leaves."""
    with ClusterScheduler(ClusterOptions(grpc_address="127.0.0.1:0", allow_anonymous=True)):
        pass


warm_up()


class Raw:
    """A TCP connection on which frames are sent and read by hand."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self._parser = Parser()
        self._frames: list[Frame] = []

    def request(self, command: int, data: bytes, number: int = 1, **more: Any) -> None:
        self.socket.sendall(request_frame(command, number, data, more.pop("role", Role.WORKER), **more).pack())

    def read(self) -> tuple[Any, Frame] | None:
        """The next frame with its meta; None at the end of the connection."""
        while not self._frames:
            try:
                piece = self.socket.recv(1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return None
            self._frames += list(self._parser.feed(piece))
        frame = self._frames.pop(0)
        return Meta.FromString(frame.meta), frame

    def reset(self) -> None:
        """End the connection as the kernel does for a process that dies with unread data."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Listener:
    """A member's own port, by hand: `accept` waits for the scheduler's connection."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.settimeout(20)
        self.port: int = self.socket.getsockname()[1]
        self.accepted: list[Raw] = []

    def accept(self) -> Raw:
        made = Raw.__new__(Raw)
        made.socket, _ = self.socket.accept()
        made.socket.settimeout(20)
        made._parser, made._frames = Parser(), []
        self.accepted.append(made)
        return made

    def acknowledge(self, raw: Raw) -> tuple[Any, Frame]:
        """Read a request and give it back, as members do."""
        came = raw.read()
        assert came is not None
        raw.socket.sendall(Frame(Kind.RAW, came[1].meta, came[1].data).pack())
        return came


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.fixture
def serve(stack: contextlib.ExitStack) -> Callable[..., ClusterScheduler]:
    """Start schedulers; stopped at the test's end, and sound then. By default they speak the foreign dialect."""

    def start(workers: int = 1, servers: int = 1, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        made = Settings(workers, servers, **(settings or {}))
        options.setdefault("allow_anonymous", True)
        service = ClusterScheduler(ClusterOptions(settings=made, **options))
        stack.enter_context(service)
        stack.callback(lambda: service._state.check_invariants())
        return service

    return start


@pytest.fixture
def join(stack: contextlib.ExitStack) -> Callable[..., ClusterMember]:
    """Start members; closed at the test's end."""

    def start(address: str, role: Role = Role.WORKER, **options: Any) -> ClusterMember:
        options.setdefault("heartbeat_s", 0.2)
        return stack.enter_context(ClusterMember(role, MemberOptions(address, **options)))

    return start


@pytest.fixture
def raw(stack: contextlib.ExitStack) -> Callable[[str], Raw]:
    """Connections by hand."""

    def to(address: str) -> Raw:
        made = Raw(address)
        stack.callback(made.socket.close)
        return made

    return to


@pytest.fixture
def listener(stack: contextlib.ExitStack) -> Callable[[], Listener]:
    """Ports by hand."""

    def make() -> Listener:
        made = Listener()
        stack.callback(lambda: [one.socket.close() for one in made.accepted])
        stack.callback(made.socket.close)
        return made

    return make
