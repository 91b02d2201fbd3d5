"""Hostile peers at the doors of gRPC: silent ones, floods, and those that do not read their answers."""

import contextlib
import os
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt._core.transfer import connections
from fastrt.coordination import Coordinator, CoordinatorOptions, Front
from fastrt.net.grpc.aio_server import AioServer
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.door import Connection, Door, Limits
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.queue_server import QueueServer

HOSTILE = Path(__file__).resolve().parents[2] / "bench/hostile.py"
METHODS = ["/t.S/Echo", "/t.S/Wait", "/t.S/Large", "/t.S/Hold"]
LARGE = 8 << 20
PATIENCE_S = 20.0
_OTHER_FLOODS = ["headers", "continuation", "pings", "settings-flood", "drip"]
_BOTH = pytest.mark.parametrize("serve", [QueueServer, AioServer], indirect=True)
_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)[:3] + b"\x04" + bytes(5)


class Service:
    """Echoes, waits, and answers with 8 MiB; every call but those that `refused` names is taken."""

    def __init__(self, kind: Any, limits: Limits, authorize: Any = None, credentials: Any = None) -> None:
        self.waiting: list[int] = []
        self.is_held, self.go_on = threading.Event(), threading.Event()
        self.server = kind(self, METHODS, authorize=authorize, limits=limits)
        self.port = self.server.bind("127.0.0.1:0", credentials)
        self.address = f"127.0.0.1:{self.port}"
        self.server.start()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        if method == "/t.S/Hold":  # the server's thread does nothing meanwhile
            self.is_held.set()
            self.go_on.wait(PATIENCE_S)
        if method == "/t.S/Wait":
            self.waiting.append(call)
        else:
            self.server.finish(call, body=bytes(LARGE) if method == "/t.S/Large" else body)

    def on_cancel(self, call: int) -> None:
        self.waiting.remove(call)

    def on_idle(self) -> float | None:
        return None

    def on_stop(self) -> None:
        pass


@pytest.fixture(params=[QueueServer, pytest.param(AioServer, marks=pytest.mark.long)])
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Service]]:
    """A service of either kind of server, with bounds made small."""
    with contextlib.ExitStack() as stack:

        def start(authorize: Any = None, credentials: Any = None, **bounds: Any) -> Service:
            service = Service(request.param, replace(Limits(), **bounds), authorize, credentials)
            stack.callback(service.server.stop)
            return service

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    """Plain connections to a service, which end with the test."""
    with contextlib.ExitStack() as stack:

        def one(service: Any, said: bytes = b"") -> socket.socket:
            host, _, port = service.address.rpartition(":")
            sock = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            sock.sendall(said)
            return sock

        yield one


@pytest.fixture
def channel() -> Iterator[Callable[..., grpc.Channel]]:
    """Channels to a service, in the clear or as a member of the cluster, each with a connection of its own."""
    with contextlib.ExitStack() as stack:

        def one(address: str, identity: Identity | None = None) -> grpc.Channel:
            if identity is None:
                return stack.enter_context(grpc.insecure_channel(address))
            options = [("grpc.use_local_subchannel_pool", 1), *identity.channel_options()]
            return stack.enter_context(grpc.secure_channel(address, identity.channel_credentials(), options))

        yield one


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side has ended a connection."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def echo(channel: grpc.Channel) -> bytes:
    return bytes(channel.unary_unary("/t.S/Echo")(b"ok", timeout=PATIENCE_S))


@contextlib.contextmanager
def attack(kind: str, address: str, count: int, *more: object) -> Iterator[None]:
    """An attack by a process of its own, once all its connections were opened."""
    words = [sys.executable, str(HOSTILE), kind, address, str(count), "60", *map(str, more)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


def received(port: int) -> int:
    """Bytes that the connections of a port of this process have received."""
    return sum(found[-1] for found in connections.find(port, 1 << 16) or [])


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@_BOTH
def test_connection_without_a_first_byte_takes_no_descriptor(serve: Any, connect: Any, channel: Any) -> None:
    service = serve()
    for _ in range(20):
        connect(service)
    known = channel(service.address)
    assert echo(known) == b"ok"  # it came later than the silent ones
    assert len(connections.find(service.port, 1 << 16) or []) == 1


@pytest.mark.parametrize("said", [_SETTINGS[:24], _SETTINGS], ids=["preface", "settings"])
def test_silent_connection_is_ended(serve: Any, connect: Any, channel: Any, wait_until: Any, said: bytes) -> None:
    service = serve(greeting_s=0.3)
    known = channel(service.address)
    assert echo(known) == b"ok"
    silent = [connect(service, said) for _ in range(20)]
    wait_until(lambda: all(map(is_hung_up, silent)), "silent connections to be ended")
    assert echo(known) == b"ok"


@pytest.mark.parametrize(("age_s", "count"), [(9.0, 600), (11.0, 100)], ids=["no place", "no greeting"])
def test_silent_connections_are_ended_a_few_at_a_time(age_s: float, count: int) -> None:
    door = Door(Limits())
    every = [Connection(peer, 0.0) for peer in range(count)]
    for turn in range(1, 4):
        door._judge_silent(every, age_s)
        assert [each.peer for each in every if each.doomed] == list(range(8 * turn))


def test_connection_that_made_a_call_may_be_silent(serve: Any, connect: Any, wait_until: Any) -> None:
    service = serve(greeting_s=0.3)
    with grpc.insecure_channel(service.address) as known:
        changes: list[grpc.ChannelConnectivity] = []
        assert echo(known) == b"ok"
        known.subscribe(changes.append)
        # As long as it takes to end one that made no call.
        silent = connect(service, _SETTINGS)
        wait_until(lambda: is_hung_up(silent), "the silent connection to be ended")
        assert grpc.ChannelConnectivity.IDLE not in changes


def test_call_that_was_refused_proves_nothing(serve: Any, channel: Any, wait_until: Any) -> None:
    service = serve(lambda method, metadata: "no token", greeting_s=0.3)
    stranger = channel(service.address)
    changes: list[grpc.ChannelConnectivity] = []
    with pytest.raises(grpc.RpcError) as failed:
        echo(stranger)
    assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    stranger.subscribe(changes.append)
    wait_until(lambda: grpc.ChannelConnectivity.IDLE in changes, "the stranger's connection to be ended")


@_BOTH
def test_half_done_tls_handshakes_beyond_the_places_are_ended_soon(
    serve: Any, connect: Any, channel: Any, wait_until: Any
) -> None:
    identity = Identity.from_token(new_token())
    service = serve(credentials=identity.server_credentials(), unproven=8, greeting_s=100.0)
    known = channel(service.address, identity)
    assert echo(known) == b"ok"
    strangers = [connect(service, _client_hello()) for _ in range(40)]
    began = time.monotonic()
    wait_until(lambda: sum(map(is_hung_up, strangers)) >= 32, "those without a place to be ended")
    assert time.monotonic() - began < 60.0  # without a limit of places, the greeting's 100 s
    assert sum(map(is_hung_up, strangers)) == 32
    assert echo(known) == b"ok"
    assert echo(channel(service.address, identity)) == b"ok"


def _client_hello() -> bytes:
    """The first message of a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


@_BOTH
def test_connection_is_ended_after_many_refused_calls_and_not_after_a_few(
    serve: Any, connect: Any, wait_until: Any
) -> None:
    service = serve()
    # With its acknowledgement, without which the core takes 512 calls.
    stranger = connect(service, _SETTINGS + _frame(4, 1, 0, b""))

    def make(first: int, calls: int) -> None:
        numbers = range(2 * first + 1, 2 * (first + calls) + 1, 2)
        stranger.setblocking(True)
        stranger.sendall(b"".join(_headers(n, b"/t.S/None") + _frame(0, 1, n, bytes(5)) for n in numbers))

    def has_refused(calls: int) -> bool:
        return [each.rejected for each in service.server._door._connections.values()] == [calls]

    for made in range(0, 1000, 100):  # a peer that is ended comes again, with as many as it has ready
        make(made, 100)
        wait_until(lambda made=made: has_refused(made + 100), "the calls to be refused")
        assert not is_hung_up(stranger)
    make(1000, 100)
    wait_until(lambda: is_hung_up(stranger), "the stranger to be ended")


@pytest.mark.parametrize("serve", [QueueServer], indirect=True)  # the other one cannot end a call without an answer
def test_refused_calls_beyond_a_few_in_a_row_are_reset_without_an_answer(serve: Any, channel: Any) -> None:
    known = channel(serve().address)
    assert echo(known) == b"ok"
    codes = [known.unary_unary("/t.S/None").future(b"", timeout=PATIENCE_S).exception().code() for _ in range(18)]
    assert codes == [*[grpc.StatusCode.UNIMPLEMENTED] * 16, *[grpc.StatusCode.CANCELLED] * 2]
    assert echo(known) == b"ok"  # over the same connection, and a call that is accepted ends the row
    with pytest.raises(grpc.RpcError) as failed:
        known.unary_unary("/t.S/None")(b"", timeout=PATIENCE_S)
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


@_BOTH
def test_program_keeps_descriptors_under_a_flood_of_connections(serve: Any, channel: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    service = serve(connections=64, unproven=16)
    known = channel(service.address)
    assert echo(known) == b"ok"
    with attack("settings", service.address, 500):
        assert len(os.listdir("/proc/self/fd")) < 250
        assert [echo(known) for _ in range(20)] == [b"ok"] * 20
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]


@pytest.mark.parametrize(
    "kind",
    ["reset", "streams", *(pytest.param(k, marks=pytest.mark.long) for k in _OTHER_FLOODS)],
)
def test_flood_cancels_no_call_of_others_and_costs_little(serve: Any, channel: Any, wait_until: Any, kind: str) -> None:
    service = serve()
    known = channel(service.address)
    waiting = known.unary_unary("/t.S/Wait").future(b"", timeout=60)
    wait_until(lambda: service.waiting, "the call to wait")
    before = resident()
    with attack(kind, service.address, 4, "/t.S/None", 2_000_000):
        assert [echo(known) for _ in range(20)] == [b"ok"] * 20
        assert resident() - before < 128 << 20
    service.server.finish(service.waiting[0], body=b"answered")
    assert waiting.result(PATIENCE_S) == b"answered"


@pytest.mark.parametrize("kind", ["reset", "streams"])
def test_few_connections_cannot_fill_the_queue_of_a_busy_server(
    serve: Any, channel: Any, wait_until: Any, kind: str
) -> None:
    service = serve()
    known = channel(service.address)
    held = known.unary_unary("/t.S/Hold").future(b"", timeout=PATIENCE_S)
    assert service.is_held.wait(PATIENCE_S)
    with attack(kind, service.address, 8, "/t.S/None", 2_000_000):
        known_too = [known.unary_unary("/t.S/Echo").future(b"ok", timeout=PATIENCE_S) for _ in range(20)]
        wait_until(lambda: received(service.port) >= 8 * 50_000, "the floods to be received")
        late = known.unary_unary("/t.S/Echo").future(b"ok", timeout=PATIENCE_S)
        service.go_on.set()
        assert [call.result() for call in [*known_too, late]] == [b"ok"] * 21
    assert held.exception() is None


@_BOTH
def test_answers_that_are_not_read_are_refused_beyond_a_bound(serve: Any, channel: Any) -> None:
    service = serve(answer_bytes=3 * LARGE)
    known = channel(service.address)
    before = resident()
    with attack("unread", service.address, 1, "/t.S/Large", 20_000):
        assert echo(known) == b"ok"
        assert resident() - before < 12 * LARGE


def test_peer_that_reads_nothing_is_ended(serve: Any, connect: Any, wait_until: Any) -> None:
    from_here = _unread_call()
    service = serve(stall_s=0.5)
    sock = connect(service, from_here)
    wait_until(lambda: is_hung_up(sock), "the peer that reads nothing to be ended")


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _headers(stream: int, path: bytes) -> bytes:
    """The beginning of a call."""

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    block = b"\x83\x86\x01" + text(b"localhost") + b"\x04" + text(path)
    block += b"\0" + text(b"te") + text(b"trailers") + b"\0" + text(b"content-type") + text(b"application/grpc")
    return _frame(1, 4, stream, block)


def _unread_call() -> bytes:
    """One call for a large answer, of which no byte may be sent."""
    none = struct.pack(">HI", 4, 0)
    return _SETTINGS[:24] + _frame(4, 0, 0, none) + _headers(1, b"/t.S/Large") + _frame(0, 1, 1, bytes(5))


@pytest.mark.parametrize("serve", [QueueServer], indirect=True)  # the other one takes a call only when it is whole
def test_stranger_that_begins_many_requests_is_ended_while_strangers_are_many(
    serve: Any, connect: Any, channel: Any, wait_until: Any
) -> None:
    service = serve()
    known = channel(service.address)
    assert echo(known) == b"ok"
    begun = _SETTINGS + b"".join(_headers(number, b"/t.S/Echo") for number in range(1, 81, 2))
    alone = connect(service, begun)
    wait_until(lambda: service.server._door.reading == 40, "the requests to begin")
    assert echo(known) == b"ok"
    assert not is_hung_up(alone)
    for _ in range(80):
        connect(service, _SETTINGS)
    wait_until(lambda: service.server._door._is_crowded, "the door to see many strangers")
    another = connect(service, begun)
    wait_until(lambda: is_hung_up(another), "the stranger to be ended")
    assert echo(known) == b"ok"


@_BOTH
def test_calls_beyond_the_bound_are_refused_in_words(serve: Any, channel: Any, wait_until: Any) -> None:
    service = serve(pending=3)
    known = channel(service.address)
    waiting = [known.unary_unary("/t.S/Wait").future(b"", timeout=60) for _ in range(3)]
    wait_until(lambda: len(service.waiting) == 3, "the calls to wait")
    with pytest.raises(grpc.RpcError) as failed:
        known.unary_unary("/t.S/Wait")(b"", timeout=PATIENCE_S)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3 calls wait" in failed.value.details()
    for call in list(service.waiting):
        service.server.finish(call)
    assert [each.result(PATIENCE_S) for each in waiting] == [b""] * 3


def test_reflection_is_not_answered_faster_than_it_is_read() -> None:
    with Coordinator(CoordinatorOptions()) as service:
        before = resident()
        with attack("reflection", service.address, 1, "/", 4_000_000), grpc.insecure_channel(service.address) as known:
            check = known.unary_unary("/grpc.health.v1.Health/Check")
            assert [check(b"", timeout=PATIENCE_S) for _ in range(20)]
            assert resident() - before < 96 << 20


@pytest.fixture(params=[False, True], ids=["coordinator", "front"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Coordinator | Front]:
    """A coordination service with room for few keys."""
    options = CoordinatorOptions(keys_bytes_max=1000, keys_max=5, state_dir=tmp_path if request.param else None)
    with (Front if request.param else Coordinator)(options) as service:
        yield service


def _coordination(channel: grpc.Channel) -> Callable[..., Any]:
    set_ = message_set("coordination_tensorflow")
    service = "tensorflow.CoordinationService"

    def call(method: str, **fields: Any) -> Any:
        request, response = set_.methods(service)[method]
        unary = channel.unary_unary(f"/{service}/{method}", request.SerializeToString, response.FromString)
        return unary(request(**fields), timeout=PATIENCE_S)

    return call


def test_key_without_room_is_refused_and_deleting_makes_room(small: Any, channel: Any) -> None:
    call = _coordination(channel(small.address))
    call("InsertKeyValue", kv={"key": "a", "value": bytes(600)})
    with pytest.raises(grpc.RpcError) as failed:
        call("InsertKeyValue", kv={"key": "b", "value": bytes(600)})
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "keys_bytes_max" in failed.value.details()
    call("DeleteKeyValue", key="a", is_directory=False)
    call("InsertKeyValue", kv={"key": "b", "value": bytes(600)})


def test_key_beyond_the_number_of_keys_is_refused(small: Any, channel: Any) -> None:
    call = _coordination(channel(small.address))
    for n in range(5):
        call("InsertKeyValue", kv={"key": f"k{n}", "value": b"v"})
    with pytest.raises(grpc.RpcError) as failed:
        call("InsertKeyValue", kv={"key": "k5", "value": b"v"})
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "keys_max" in failed.value.details()


# gRPC opens now what it keeps open for good.
for _kind in (QueueServer, AioServer):
    _service = Service(_kind, Limits())
    with grpc.insecure_channel(_service.address) as _channel:
        echo(_channel)
    _service.server.stop()
