"""Attacks on the links between nodes: by a stranger, by a program at the head's port, and by a node with the token."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from fastrt.cluster.head import Membership
from fastrt.cluster.membership import JOIN
from fastrt.net.grpc import streams
from fastrt.net.grpc.auth import read_token
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.streams import Access
from fastrt.node.daemon import sweep_sessions
from fastrt.runtime.nodes import nodes_at
from fastrt.versions import own_versions
from support.cluster import START, RunningNode

PATIENCE_S = 20.0
NODE = message_set("node")
Report = NODE.message("fastrt.node.Report")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="frt-"))
    yield path
    sweep_sessions(path / "rt", path / "spill")
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[RunningNode]:
    """A head with its node, for all tests here."""
    (folder / "rt").mkdir(mode=0o700)
    node = RunningNode(folder / "rt", "--head", "--port", "0", "--num-workers", "1", "--name", "one")
    yield node
    node.stop()


@pytest.fixture
def ours(head: RunningNode) -> Identity:
    return Identity.from_token(read_token(head.note.token_file))


@contextlib.contextmanager
def recorder(answer: bytes = b"", port: int = 0) -> Iterator[tuple[str, bytearray]]:
    """A program that took a port first: it records what comes, and answers with some bytes."""
    got = bytearray()
    with socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            while True:
                try:
                    sock = listener.accept()[0]
                except OSError:
                    return
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(1.0)
                    while data := sock.recv(1 << 16):
                        got.extend(data)
                        sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield "{}:{}".format(*listener.getsockname()), got
        listener.shutdown(socket.SHUT_RDWR)


def secrets_of(token: str) -> list[bytes]:
    """The secret and keys made of it, as bytes and as text."""
    identity = Identity.from_token(token)
    raw = [bytes.fromhex(token[-64:]), *(identity.key(purpose) for purpose in ("bearer", "native stream"))]
    return [*raw, *(key.hex().encode() for key in raw)]


def start_fails(folder: Path, *options: str, **env: str) -> str:
    words = {"FASTRT_RUNTIME_DIR": str(folder / "rt2"), "FASTRT_SPILL_DIR": str(folder / "spill"), **env}
    words |= {"FASTRT_OBJECT_STORE_MEMORY": "64MiB", "FASTRT_NUM_WORKERS": "1", "FASTRT_START_TIMEOUT_S": "10"}
    (folder / "rt2").mkdir(mode=0o700, exist_ok=True)
    found = subprocess.run([*START, *options], env={**os.environ, **words}, text=True, capture_output=True, timeout=60)
    assert found.returncode != 0, found.stdout
    return found.stderr


@pytest.mark.parametrize("answer", [b"\0\0\0\x04\0\0\0\0\0", pytest.param(b"", marks=pytest.mark.long)])
def test_program_at_the_heads_port_learns_nothing_and_is_not_believed(folder: Path, answer: bytes) -> None:
    token = new_token()
    with recorder(answer) as (address, got):
        said = start_fails(folder, "--address", address, FASTRT_TOKEN=token)
    assert f"the process at {address} is not part of this cluster" in said
    assert got.startswith(b"\x16\x03\x01")  # a TLS greeting, and only that
    assert not [key for key in secrets_of(token) if key in got]


def test_program_with_another_clusters_token_at_the_heads_port_is_not_believed(folder: Path, head: RunningNode) -> None:
    said = start_fails(folder, "--address", head.head, FASTRT_TOKEN=new_token())
    assert f"cannot join {head.head}: the process at {head.head} is not part of this cluster" in said
    assert "another cluster's token" in said


@pytest.mark.long
def test_token_on_a_command_line_is_not_shown_for_long(folder: Path, head: RunningNode) -> None:
    token = read_token(head.note.token_file)
    node = RunningNode(folder / "rt", "--address", head.head, "--num-workers", "0", "--token", token)
    try:
        process = psutil.Process(node.process.pid)
        everything = [process, *process.children(recursive=True)]
        lines = [one.cmdline() for one in everything]
        assert token[-64:] not in str(lines)
        inherited = [Path(f"/proc/{one.pid}/environ").read_text() for one in everything[1:]]
        assert token[-64:] not in str(inherited)
    finally:
        node.stop()


# ---- strangers at the doors of a node ----


def doors(head: RunningNode) -> list[str]:
    return [head.head, head.note.address]


def spoken(address: str, context: ssl.SSLContext, name: str) -> bytes:
    """The first byte that a door sends to a client of TLS; none when it refuses."""
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        try:
            with context.wrap_socket(sock, server_hostname=name) as wrapped:
                return wrapped.recv(1)
        except (ssl.SSLError, ConnectionError):
            return b""


def test_stranger_gets_not_one_byte_from_a_door(head: RunningNode, ours: Identity) -> None:
    other = Identity.from_token(new_token())
    other._authority_pem = ours._authority_pem  # it believes the door, which must not believe it
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=ours._authority_pem.decode())
    old = ours.client_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    for address in doors(head):
        assert spoken(address, ours.client_context(), ours.name) == b"\0"
        for what, context in (("other token", other.client_context()), ("no certificate", bare), ("TLS 1.2", old)):
            assert spoken(address, context, ours.name) == b"", (address, what)


def test_expired_certificate_is_refused_at_a_door(head: RunningNode, ours: Identity) -> None:
    import datetime

    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from fastrt.net.grpc import identity as module

    key: Any = load_pem_private_key(ours._key_pem, None)
    past = (datetime.datetime(2020, 1, 2), datetime.datetime(2020, 1, 3))
    ours._certificate_pem = module._pem(ours._sign(ours.name, key, *past))
    for address in doors(head):
        assert spoken(address, ours.client_context(), ours.name) == b""


def test_plain_text_gets_not_one_answer_from_a_door(head: RunningNode) -> None:
    for address in doors(head):
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- between: relays and replays ----


@contextlib.contextmanager
def relay(to: str, change: Callable[[bytes], bytes] = bytes) -> Iterator[tuple[str, bytearray]]:
    """A program that passes everything on to a door; yields its address, and what callers sent."""
    sent = bytearray()

    def copy(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    data = data if sent else change(data)
                    sent.extend(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def serve() -> None:
            while True:
                try:
                    sock = stack.enter_context(listener.accept()[0])
                except OSError:
                    return
                host, _, port = to.rpartition(":")
                onward = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
                threading.Thread(target=copy, args=(sock, onward, True), daemon=True).start()
                threading.Thread(target=copy, args=(onward, sock, False), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield "{}:{}".format(*listener.getsockname()), sent
        listener.shutdown(socket.SHUT_RDWR)


def test_relay_to_the_head_reads_nothing_and_its_recording_is_worth_nothing(head: RunningNode, ours: Identity) -> None:
    token = read_token(head.note.token_file)
    with relay(head.head) as (address, sent):
        assert spoken(address, ours.client_context(), ours.name) == b"\0"
    assert not [key for key in secrets_of(token) if key in sent]
    host, _, port = head.head.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        sock.sendall(sent)
        came = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                came += data
    assert len(came) < 4096  # a hello of TLS at most, and an alert
    assert spoken(head.head, ours.client_context(), ours.name) == b"\0"


def test_downgrade_in_between_is_noticed(head: RunningNode, ours: Identity) -> None:
    """The relay takes the offer of TLS 1.3 out of the client's hello."""

    def strip(hello: bytes) -> bytes:
        at = hello.index(b"\x00\x2b\x00")  # supported_versions becomes an extension that no server knows
        return hello[:at] + b"\xfa\xfa" + hello[at + 2 :]

    with relay(head.head, strip) as (address, _):
        assert "not part of this cluster" in (ours.why_refused(address) or "")


# ---- a node that has the token ----


def good(node: str = "a" * 32, **more: Any) -> Any:
    about = {"node": node, "address": "127.0.0.1:7", "name": "liar", "workers": 1, "versions": own_versions()}
    return Report(**{**about, **more})


def hostile() -> dict[str, list[Any]]:
    """Reports by what is wrong with the last one."""
    a, b = "a" * 32, "b" * 32
    return {
        "another node": [good(a), good(b)],
        "the node itself, then nobody": [good(a), good("")],
        "no id": [good("x" * 32)],
        "a long id": [good("a" * (1 << 20))],
        "no address": [good(address="")],
        "a path": [good(address="unix:/tmp/x")],
        "two addresses": [good(address="127.0.0.1:7,127.0.0.1:8")],
        "port 0": [good(address="127.0.0.1:0")],
        "port 99999": [good(address="127.0.0.1:99999")],
        "a line break": [good(address="127.0.0.1:7\n")],
        "no IPv6": [good(address="[::g]:7")],
        "a native address that is none": [good(native="nowhere")],
        "a long name": [good(name="x" * 1000)],
        "a name with escapes": [good(name="\x1b[2J")],
        "many workers": [good(workers=1 << 31)],
        "many idle": [good(idle=(1 << 32) - 1)],
        "a long queue": [good(queued=(1 << 64) - 1)],
        "huge amounts": [good(total={"CPU": (1 << 64) - 1})],
        "huge free amounts": [good(free={"CPU": 1 << 60})],
        "a resource without a name": [good(total={"": 1})],
        "versions with escapes": [good(versions={"python": "\x1b[2J"})],
        "versions of other things": [good(versions={"x" * 100: "1"})],
        "many resources": [good(total={str(k): 1 for k in range(20_000)})],
    }


async def tell(address: str, access: Access, reports: list[Any]) -> tuple[Any, str]:
    """Send reports as a node would; how the stream ends."""
    channel, call = streams.open_stream(address, access, NODE, JOIN)
    try:
        stream = call()
        for report in reports:
            await stream.write(report)
        async for _ in stream:
            pass
        return None, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    finally:
        await channel.close()


def test_hostile_reports_close_their_own_stream_only(head: RunningNode, ours: Identity) -> None:
    uplink, keeper = head.child("fastrt.runtime.uplink"), head.child("fastrt.cluster.head")
    assert uplink is not None
    assert keeper is not None

    async def run() -> None:
        for what, reports in hostile().items():
            code, words = await asyncio.wait_for(tell(head.head, Access(ours), reports), PATIENCE_S)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (what, code, words)
            assert words.startswith("the head refuses "), what
        taken = good(head.note.socket_path.split("/")[-2])
        code, words = await asyncio.wait_for(tell(head.head, Access(ours), [taken]), PATIENCE_S)
        assert code is grpc.StatusCode.ALREADY_EXISTS, words
        assert "is a member already" in words

    asyncio.run(run())
    assert uplink.is_running()
    assert keeper.is_running()
    assert head.child("fastrt.runtime.uplink") == uplink


def test_report_of_a_million_resources_is_not_even_parsed(head: RunningNode, ours: Identity) -> None:
    report = good(total={f"{k:032}": 1 for k in range(300_000)})

    async def run() -> None:
        code, _ = await asyncio.wait_for(tell(head.head, Access(ours), [report]), PATIENCE_S)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


@contextlib.contextmanager
def serving(access: Access, join: Any, wait_until: Callable[..., Any]) -> Iterator[str]:
    """A head in this process, with `join` for `Head.Join`; yields its address."""
    done = threading.Event()
    address: list[str] = []

    async def serve() -> None:
        stop = asyncio.Event()
        server, where = await streams.serve("127.0.0.1:0", access, NODE, {JOIN: join}, stop)
        address.append(where)
        await asyncio.to_thread(done.wait)
        stop.set()
        await streams.stop_server(server, 1)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        wait_until(lambda: address, "the head")
        yield address[0]
    finally:
        done.set()
        thread.join()


@pytest.mark.long
def test_program_that_takes_the_port_of_a_dead_head_is_not_believed(
    folder: Path, wait_until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = new_token()
    monkeypatch.setenv("FASTRT_TOKEN", token)
    with contextlib.ExitStack() as stack:
        with serving(Access(Identity.from_token(token)), Membership().join, wait_until) as address:
            node = RunningNode(folder / "rt", "--address", address, "--num-workers", "1")
            stack.callback(node.stop)
        uplink = node.child("fastrt.runtime.uplink")
        _, got = stack.enter_context(recorder(b"HTTP/1.1 200 OK\r\n\r\n", int(address.rpartition(":")[2])))
        assert node.process.stderr is not None
        said = node.process.stderr.readline()
        assert node.child("fastrt.runtime.uplink") == uplink
    why = f"the process at {address} is not part of this cluster: it does not speak TLS"
    assert said == f"fastrt: the head cannot be reached: {why}\n"
    assert got.startswith(b"\x16\x03\x01")
    assert not [key for key in secrets_of(token) if key in got]


def test_hostile_head_cannot_end_an_uplink(
    folder: Path, wait_until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with the token passes on reports that no head should: the nodes leave them out, and go on."""
    token = new_token()
    monkeypatch.setenv("FASTRT_TOKEN", token)
    View = NODE.message("fastrt.node.View")

    async def join(reports: AsyncIterator[Any], context: Any) -> None:
        async for report in reports:
            twice = [good("c" * 32, total={"x": 1}), good("c" * 32, total={"y": 2})]
            wrong = [one for each in hostile().values() for one in each if len(one.total) < 1000]
            await context.write(View(cluster="x", node=[report, *twice, *wrong]))

    with serving(Access(Identity.from_token(token)), join, wait_until) as address:
        node = RunningNode(folder / "rt", "--address", address, "--num-workers", "1")
        try:
            uplink = node.child("fastrt.runtime.uplink")
            wait_until(lambda: len(nodes_at(node.note.socket_path)) >= 3, "the sound reports")
            assert node.child("fastrt.runtime.uplink") == uplink
        finally:
            _, said = node.stop()
    assert "an invalid report from the head is ignored" in said
    assert "Traceback" not in said
