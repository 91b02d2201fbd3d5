"""Attacks on the native stream: other local users, strangers on the network, relays, recordings, downgrades, floods."""

import contextlib
import datetime
import os
import pwd
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fastrt
from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt.net.grpc import identity as identity_module
from fastrt.net.grpc import proof, sealed
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.store.client import Store
from fastrt.transfer import link, wire
from fastrt.transfer import source as source_module
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import Table, TransferError

PATIENCE_S = 20.0
TOKEN = new_token()
SECRET = b"the victim's value" * 1000


class Node:
    """A store of its own; everything that it opens ends with it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.identity = Identity.from_token(TOKEN)
        segment = Segment.create(32 << 20, objects_max=1 << 10, tasks_max=1 << 10)
        stack.callback(segment.unlink)
        client = Client(segment, *admit(segment, os.getpid(), KIND_DRIVER, "test"))
        client.adopt_job(client.job)
        self.table = Table(Store(client, 0.0))
        stack.callback(self.table.clear)

    def source(self, identity: Identity | None = None, **options: Any) -> Source:
        source = Source(self.table, identity or self.identity, **options)
        self._stack.callback(source.close)
        return source

    def pull(
        self, address: str, identity: Identity | None = None, timeout_s: float = PATIENCE_S, **options: Any
    ) -> Any:
        """Pull object 1 and return its value."""
        puller = Puller(self.table, identity or self.identity, timeout_s=timeout_s, **options)
        self._stack.callback(puller.close)
        return self.table.store.get(puller.pull(1, address).result(PATIENCE_S))


@pytest.fixture
def stack(drop_arguments: None) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def here(stack: contextlib.ExitStack) -> Node:
    """The node that has the value."""
    node = Node(stack)
    node.table.add(1, node.table.store.put(SECRET))
    return node


@pytest.fixture
def there(stack: contextlib.ExitStack) -> Node:
    """The victim, a node that wants the value."""
    return Node(stack)


def everything(sock: socket.socket) -> bytes:
    """Read until the peer hangs up."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            received += data
    return received


# ---- another local user ----

RELAY = """
import os, socket, sys, threading
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def pass_on(a, b):
    try:
        while data := a.recv(65536):
            print(data.hex(), flush=True)
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError:
        pass
while True:
    victim, _ = listener.accept()
    target = socket.socket()  # `create_connection` imports what this user may not read
    target.connect(("127.0.0.1", int(sys.argv[2])))
    for pair in ((victim, target), (target, victim)):
        threading.Thread(target=pass_on, args=pair, daemon=True).start()
"""


@contextlib.contextmanager
def relay_of_another_user(port: int) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """A process of another user that passes everything from a port of its own to `port`, and prints what it saw."""
    if os.geteuid() != 0:
        pytest.skip("only root makes processes of another user")
    uid = pwd.getpwnam("nobody").pw_uid
    words = [sys.executable, "-c", textwrap.dedent(RELAY), str(uid), str(port)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            pytest.skip("the interpreter cannot be run by another user here")
        yield int(line), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_relay_of_another_user_on_a_squatted_port_is_refused_and_sees_no_value(here: Node, there: Node) -> None:
    source = here.source()
    with relay_of_another_user(source.port) as (port, process):
        with pytest.raises(TransferError, match="a relay or a port forwarding is between"):
            there.pull(f"127.0.0.1:{port}")
        process.kill()
        seen = bytes.fromhex(process.stdout.read().replace("\n", ""))
    assert TOKEN[-64:].encode() not in seen
    assert bytes.fromhex(TOKEN[-64:]) not in seen
    assert SECRET[:18] not in seen
    assert len(seen) == proof.HELLO_BYTES + proof.REPLY_BYTES
    assert there.pull(source.address) == SECRET


def test_relay_under_tls_passes_sealed_bytes_only(here: Node, there: Node) -> None:
    source = here.source(tls_on_loopback=True)
    with relay_of_another_user(source.port) as (port, process):
        assert there.pull(f"127.0.0.1:{port}", tls_on_loopback=True) == SECRET
        process.kill()
        seen = bytes.fromhex(process.stdout.read().replace("\n", ""))
    assert len(seen) > len(SECRET)
    assert SECRET[:18] not in seen
    assert b"frtD" not in seen


def test_listener_of_a_stranger_gets_neither_secret_nor_trust(there: Node) -> None:
    """A stranger took the port: he answers with noise, or with a proof made of another secret."""
    stranger = Identity.from_token(new_token())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said: list[str] = []

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                try:
                    proof.prove_as_server(sock, stranger.key(link.PURPOSE), link.PURPOSE)
                except (proof.ProofError, OSError) as error:
                    said.append(str(error))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TransferError, match="the server does not hold the secret of this cluster"):
            there.pull(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join(PATIENCE_S)
    assert said  # the victim hung up without a proof of its own


# ---- strangers on the network: TLS ----


def with_dates(identity: Identity, until: datetime.datetime) -> Identity:
    """The same cluster's identity, with a certificate that ends then."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key: Any = load_pem_private_key(identity._key_pem, None)
    made = identity._sign(identity.name, key, datetime.datetime(2020, 1, 2), until)
    identity._certificate_pem = identity_module._pem(made)
    return identity


EXPIRED = datetime.datetime(2020, 6, 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Identity.from_token(new_token()), "another authority has signed its certificate"),
        (lambda: with_dates(Identity.from_token(TOKEN), EXPIRED), "its certificate has expired"),
    ],
    ids=["another cluster", "expired"],
)
def test_source_with_a_wrong_certificate_is_refused_in_words(
    here: Node, there: Node, make: Callable[[], Identity], said: str
) -> None:
    source = here.source(make(), tls_on_loopback=True)
    with pytest.raises(TransferError, match=said):
        there.pull(source.address, tls_on_loopback=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Identity.from_token(new_token()).client_context(), "another cluster's token"),
        (lambda: with_dates(Identity.from_token(TOKEN), EXPIRED).client_context(), "its certificate has expired"),
        (lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "it shows no certificate"),
        (lambda: old_tls(Identity.from_token(TOKEN).client_context()), "does not speak TLS 1.3"),
        (lambda: None, "it does not speak TLS"),
    ],
    ids=["another cluster", "expired", "no certificate", "TLS 1.2", "no TLS"],
)
def test_taker_with_a_wrong_certificate_is_refused_in_words(
    here: Node, caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None], make: Callable[[], Any], said: str
) -> None:
    source = here.source(tls_on_loopback=True)
    context = make()
    with socket.create_connection(("127.0.0.1", source.port), PATIENCE_S) as sock:
        if context is None:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert SECRET[:18] not in everything(sock)
        else:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with contextlib.suppress(ssl.SSLError, ConnectionError), context.wrap_socket(sock) as wrapped:
                assert everything(wrapped) == b""
    wait_until(lambda: said in caplog.text, f"the source to say: {said}")


def old_tls(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def test_clear_taker_at_a_tls_source_is_refused_in_words(here: Node, there: Node) -> None:
    source = here.source(tls_on_loopback=True)
    with pytest.raises(TransferError, match="the server speaks TLS"):
        there.pull(source.address)


def test_tls_taker_at_a_clear_source_is_refused_in_words(
    here: Node, there: Node, caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    source = here.source()
    with pytest.raises(TransferError, match="it does not speak TLS"):
        there.pull(source.address, tls_on_loopback=True)
    wait_until(lambda: "the client speaks TLS, but this link is in the clear" in caplog.text, "the source to say so")


@pytest.mark.parametrize("tls", [False, True])
def test_recorded_connection_gets_nothing(here: Node, there: Node, tls: bool) -> None:
    source = here.source(tls_on_loopback=tls)
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        if not tls:
            stack.enter_context(unbound())

        def record() -> None:
            victim, _ = listener.accept()
            with victim, socket.create_connection(("127.0.0.1", source.port)) as target:
                back = threading.Thread(target=copy, args=(target, victim, bytearray()))
                back.start()
                copy(victim, target, recorded)
                back.join()

        thread = threading.Thread(target=record)
        thread.start()
        made = link.dial(f"127.0.0.1:{listener.getsockname()[1]}", there.identity, False, tls_on_loopback=tls)
        made.send([wire.pack_opening(False), wire.pack_request(wire.Request(1, 1, 0))], PATIENCE_S)
        made.receive([bytearray(wire.HEAD.size)], wire.HEAD.size, PATIENCE_S)
        made.shutdown()
        made.close()
        thread.join(PATIENCE_S)
        with socket.create_connection(("127.0.0.1", source.port), PATIENCE_S) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(recorded)
            received = everything(sock)
    assert len(recorded) > proof.HELLO_BYTES + proof.FINAL_BYTES
    assert SECRET[:18] not in received
    assert len(received) < 4096  # a greeting, and nothing of the value


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Proofs without a binding, so that a recorder can stand between."""
    before = proof.binding_of
    proof.binding_of = lambda sock, server: "any"
    try:
        yield
    finally:
        proof.binding_of = before


def copy(a: socket.socket, b: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := a.recv(1 << 16):
            seen += data
            b.sendall(data)
    with contextlib.suppress(OSError):
        b.shutdown(socket.SHUT_WR)


# ---- sealed records ----


@pytest.fixture
def ends(stack: contextlib.ExitStack) -> tuple[sealed.Sealed, socket.socket, sealed.Sealed]:
    """A sender of sealed records, the socket from which an attacker forwards, and the receiver."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    socks = []
    for _ in range(2):
        out = socket.create_connection(listener.getsockname(), PATIENCE_S)
        socks += [out, listener.accept()[0]]
    sender = sealed.Sealed(socks[0], b"s" * 32, b"r" * 32, 1 << 16, 1 << 16)
    receiver = sealed.Sealed(socks[3], b"r" * 32, b"s" * 32, 1 << 16, 1 << 16)
    sender.attacker = stack.enter_context(socks[2])  # type: ignore[attr-defined]
    stack.enter_context(socks[1])
    stack.callback(sender.close)
    stack.callback(receiver.close)
    return sender, socks[1], receiver


def records(ends: Any, *data: bytes) -> list[bytes]:
    """Seal each as a record of its own, and take it from the network."""
    sender, middle, _ = ends
    found = []
    for part in data:
        sender.send([part], PATIENCE_S)
        found.append(middle.recv(len(part) + 20, socket.MSG_WAITALL))
    return found


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


TAMPERINGS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a changed byte": lambda given: [flipped(given[0], 30), given[1]],
    "a changed tag": lambda given: [flipped(given[0], len(given[0]) - 1), given[1]],
    "a shorter length": lambda given: [flipped(given[0], 0), given[1]],
    "a record twice": lambda given: [given[0], given[0]],
    "a record left out": lambda given: [given[1]],
    "two records swapped": lambda given: [given[1], given[0]],
    "a length without bound": lambda given: [b"\xff\xff\xff\xff" + given[0][4:]],
    "an empty record": lambda given: [bytes(20)],
}


def test_small_parts_of_a_narrow_direction_fit_into_its_records() -> None:
    socks = socket.socketpair()
    for sock in socks:
        sock.setblocking(False)
    one, other = sealed.SMALL_BYTES, sealed.BULK_BYTES
    sender = sealed.Sealed(socks[0], b"s" * 32, b"r" * 32, one, other)
    receiver = sealed.Sealed(socks[1], b"r" * 32, b"s" * 32, other, one)
    with contextlib.closing(sender), contextlib.closing(receiver):
        sender.send([bytes([k % 256]) * 28 for k in range(900)], PATIENCE_S)
        came = bytearray(900 * 28)
        receiver.receive([came], len(came), PATIENCE_S)
        assert came[::28] == bytes(k % 256 for k in range(900))


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_tampered_record_is_never_delivered(ends: Any, tampering: Callable[[list[bytes]], list[bytes]]) -> None:
    given = records(ends, b"1" * 101, b"2" * 101)
    sender, _, receiver = ends
    for data in tampering(given):
        sender.attacker.sendall(data)
    with pytest.raises(sealed.RecordError, match="sealed record"):
        receiver.receive([bytearray(202)], 202, PATIENCE_S)


@pytest.mark.parametrize("cut", [0, 3, 50, 120, 121, 130, 241])
def test_connection_that_ends_early_is_an_error_and_no_end_of_data(ends: Any, cut: int) -> None:
    given = b"".join(records(ends, b"1" * 101, b"2" * 101))
    sender, _, receiver = ends
    sender.attacker.sendall(given[:cut])
    sender.attacker.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        receiver.receive([bytearray(202)], 202, PATIENCE_S)


def test_key_is_used_for_a_bounded_number_of_records(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "RECORDS_MAX", 2)
    records(ends, b"1", b"2")
    with pytest.raises(ConnectionError, match="open a new connection"):
        ends[0].send([b"3"], PATIENCE_S)


def test_records_of_any_cut_give_the_same_bytes(ends: Any) -> None:
    """Parts of many sizes, received into parts of other sizes."""
    sender, middle, receiver = ends
    sizes = [1, 0, 59, 16384, 16383, 40_000, 5, 70_000, 3]
    sent = [os.urandom(size) for size in sizes]
    whole = b"".join(sent)
    passing = threading.Thread(target=copy, args=(middle, sender.attacker, bytearray()))
    passing.start()
    sending = threading.Thread(target=lambda: (sender.send(sent, PATIENCE_S), sender.shutdown()))
    sending.start()
    got = bytearray(len(whole))
    view, at = memoryview(got), 0
    for step in (7, 100, 50_000, 1, len(whole) - 50_108):
        receiver.receive([view[at : at + step // 2], view[at + step // 2 : at + step]], step, PATIENCE_S)
        at += step
    assert bytes(got) == whole
    with pytest.raises(EOFError):
        receiver.receive([bytearray(1)], 1, PATIENCE_S)
    for thread in (passing, sending):
        thread.join(PATIENCE_S)


# ---- silence and floods ----


def greeting_threads() -> int:
    return sum(thread.name == "fastrt-source-stream" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        (False, b"fastrtP1"),
        (True, b"\x16\x03\x01\x02\x00\x01\x00"),
        pytest.param(False, b"", marks=pytest.mark.long),
        pytest.param(True, b"", marks=pytest.mark.long),
    ],
)
def test_flood_of_unfinished_greetings_keeps_no_taker_out(
    here: Node, there: Node, stack: contextlib.ExitStack, wait_until: Callable[..., None], tls: bool, says: bytes
) -> None:
    source = here.source(tls_on_loopback=tls)
    for _ in range(4 * source_module._GREETINGS_MAX):
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", source.port), PATIENCE_S))
        with contextlib.suppress(OSError):
            sock.sendall(says)
    wait_until(lambda: greeting_threads() <= source_module._GREETINGS_MAX, "the oldest strangers to be sent away")
    assert there.pull(source.address, tls_on_loopback=tls) == SECRET


def test_strangers_of_one_host_do_not_take_the_place_of_another(here: Node, stack: contextlib.ExitStack) -> None:
    source = here.source()
    alone = stack.enter_context(socket.create_connection(("127.0.0.1", source.port), PATIENCE_S))
    for _ in range(2 * source_module._GREETINGS_MAX):
        stack.enter_context(
            socket.create_connection(("127.0.0.1", source.port), PATIENCE_S, source_address=("127.0.0.2", 0))
        )
    proof.prove_as_client(alone, here.identity.key(link.PURPOSE), link.PURPOSE)
    alone.sendall(wire.pack_opening(False) + wire.pack_request(wire.Request(0, 1, 0)))
    frame = wire.read_frame(bytearray(alone.recv(wire.HEAD.size, socket.MSG_WAITALL)))
    assert frame.total == len(SECRET)


WITHOUT_FILES = """
import os, resource, sys
from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt.net.grpc.identity import Identity
from fastrt.store.client import Store
from fastrt.transfer.source import Source
from fastrt.transfer.table import Table
segment = Segment.create(16 << 20, objects_max=1 << 10, tasks_max=1 << 10)
client = Client(segment, *admit(segment, os.getpid(), KIND_DRIVER, "test"))
client.adopt_job(client.job)
table = Table(Store(client, 0.0))
table.add(1, table.store.put(b"value"))
source = Source(table, Identity.from_token(sys.argv[1]))
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, used + 20))
print(source.port, flush=True)
sys.stdin.read()
segment.unlink()
"""


def test_source_without_descriptors_sends_strangers_away_and_serves(there: Node, stack: contextlib.ExitStack) -> None:
    environ = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(fastrt.__file__))}
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_FILES, TOKEN],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    stack.callback(process.communicate)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    for _ in range(60):
        stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
    assert there.pull(f"127.0.0.1:{port}", timeout_s=60) == b"value"
    assert process.poll() is None


def test_insecure_says_so_in_words(here: Node, caplog: pytest.LogCaptureFixture) -> None:
    source = here.source(host="0.0.0.0", insecure=True)
    assert "is in the clear (--insecure)" in caplog.text
    assert source.port in range(1, 1 << 16)
