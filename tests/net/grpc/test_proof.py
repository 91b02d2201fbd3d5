"""Mutual proof over real connections: peers with another key, relays, recordings, silence and noise."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fastrt.net.grpc import proof
from fastrt.net.grpc.proof import ProofError, prove_as_client, prove_as_server

KEY, OTHER = b"k" * 32, b"o" * 32
PURPOSE = "test 1"
PATIENCE_S = 30.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def listener(opened: Callable[[Any], Any]) -> socket.socket:
    return opened(socket.create_server(("127.0.0.1", 0)))


def served(pool: ThreadPoolExecutor, listener: socket.socket, key: bytes = KEY, **options: Any) -> "Future[None]":
    """Accept one connection and prove the key over it."""

    def serve() -> None:
        listener.settimeout(PATIENCE_S)
        sock, _ = listener.accept()
        with sock:
            prove_as_server(sock, key, **{"purpose": PURPOSE, "timeout_s": PATIENCE_S, **options})
            sock.sendall(b"welcome")

    return pool.submit(serve)


def dial(opened: Callable[[Any], Any], listener: socket.socket) -> socket.socket:
    return opened(socket.create_connection(listener.getsockname(), PATIENCE_S))


def test_both_sides_prove_the_key_and_nothing_is_read_beyond(
    pool: ThreadPoolExecutor, opened: Any, listener: socket.socket
) -> None:
    serving = served(pool, listener)
    sock = dial(opened, listener)
    prove_as_client(sock, KEY, PURPOSE)
    assert sock.recv(7, socket.MSG_WAITALL) == b"welcome"
    assert sock.gettimeout() == PATIENCE_S
    serving.result(PATIENCE_S)


def test_listener_for_both_families_sees_the_same_connection(pool: ThreadPoolExecutor, opened: Any) -> None:
    listener = opened(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
    serving = served(pool, listener)
    sock = opened(socket.create_connection(("127.0.0.1", listener.getsockname()[1]), PATIENCE_S))
    prove_as_client(sock, KEY, PURPOSE)
    serving.result(PATIENCE_S)


@pytest.mark.parametrize("differing", ["key", "purpose", "address"])
def test_peer_with_another_key_purpose_or_address_is_refused(
    pool: ThreadPoolExecutor, opened: Any, listener: socket.socket, differing: str
) -> None:
    options = {} if differing == "key" else {differing: "another"}
    serving = served(pool, listener, OTHER if differing == "key" else KEY, **options)
    sock = dial(opened, listener)
    with sock, pytest.raises(ProofError, match="relay" if differing == "address" else "does not hold the secret"):
        prove_as_client(sock, KEY, PURPOSE)
    with pytest.raises((ProofError, ConnectionError)):
        serving.result(PATIENCE_S)


def test_client_that_skips_the_check_of_the_server_is_refused_by_the_server(
    pool: ThreadPoolExecutor, opened: Any, listener: socket.socket
) -> None:
    serving = served(pool, listener)
    sock = dial(opened, listener)
    client = proof.Client(OTHER, PURPOSE, proof.binding_of(sock, server=False))
    sock.sendall(client.hello)
    sock.recv(proof.REPLY_BYTES, socket.MSG_WAITALL)
    sock.sendall(bytes(proof.FINAL_BYTES))
    with pytest.raises(ProofError, match="the client does not hold the secret"):
        serving.result(PATIENCE_S)


def test_server_proof_sent_back_is_refused(pool: ThreadPoolExecutor, opened: Any, listener: socket.socket) -> None:
    """The peer has no key: it answers with what the other side itself has proved."""
    serving = served(pool, listener)
    sock = dial(opened, listener)
    sock.sendall(proof.Client(OTHER, PURPOSE, proof.binding_of(sock, server=False)).hello)
    sock.sendall(sock.recv(proof.REPLY_BYTES, socket.MSG_WAITALL)[-32:])
    with pytest.raises(ProofError, match="the client does not hold the secret"):
        serving.result(PATIENCE_S)


def test_recorded_greeting_is_refused(pool: ThreadPoolExecutor, opened: Any, listener: socket.socket) -> None:
    recorded: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]
            recorded.append(data)
            super().sendall(data, *flags)

    for replaying in (False, True):
        serving = served(pool, listener, address="the same")
        sock = opened(Recorded())
        sock.connect(listener.getsockname())
        if replaying:
            for data in list(recorded):
                socket.socket.sendall(sock, data)
            with pytest.raises(ProofError, match="the client does not hold the secret"):
                serving.result(PATIENCE_S)
        else:
            prove_as_client(sock, KEY, PURPOSE, "the same")
            serving.result(PATIENCE_S)


# ---- relays ----


def passing(sock: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := sock.recv(1 << 16):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


def relayed(pool: ThreadPoolExecutor, opened: Any, taken: socket.socket, target: Callable[[], Any]) -> None:
    """Pass every byte between the connection that `taken` accepts and another one to `target()`."""
    sock, _ = taken.accept()
    opened(sock)
    onward = opened(socket.create_connection(target(), PATIENCE_S))
    pool.submit(passing, sock, onward)
    pool.submit(passing, onward, sock)


def test_relay_on_another_port_is_refused(pool: ThreadPoolExecutor, opened: Any, listener: socket.socket) -> None:
    serving = served(pool, listener)
    squatted = opened(socket.create_server(("127.0.0.1", 0)))
    pool.submit(relayed, pool, opened, squatted, listener.getsockname)
    with dial(opened, squatted) as sock, pytest.raises(ProofError, match="a relay or a port forwarding is between"):
        prove_as_client(sock, KEY, PURPOSE)
    with pytest.raises(ProofError, match="a relay or a port forwarding is between"):
        serving.result(PATIENCE_S)


def test_relay_that_gives_its_port_back_to_the_true_listener_is_refused(pool: ThreadPoolExecutor, opened: Any) -> None:
    """Dialled address and listener's address are equal; only the client's own port tells the connections apart."""
    squatted = opened(socket.create_server(("127.0.0.1", 0)))
    address = squatted.getsockname()
    sock = dial(opened, squatted)
    held, _ = squatted.accept()
    opened(held)
    squatted.close()
    listener = opened(socket.create_server(address))
    serving = served(pool, listener)
    onward = opened(socket.create_connection(address, PATIENCE_S))
    pool.submit(passing, held, onward)
    pool.submit(passing, onward, held)
    with sock, pytest.raises(ProofError, match="a relay or a port forwarding is between"):
        prove_as_client(sock, KEY, PURPOSE)
    with pytest.raises(ProofError, match="a relay or a port forwarding is between"):
        serving.result(PATIENCE_S)


def test_relay_that_rewrites_the_bindings_is_refused(
    pool: ThreadPoolExecutor, opened: Any, listener: socket.socket
) -> None:
    serving = served(pool, listener)
    squatted = opened(socket.create_server(("127.0.0.1", 0)))
    client = dial(opened, squatted)
    held, _ = squatted.accept()
    onward = dial(opened, listener)
    opened(held)

    def forge() -> None:
        hello = held.recv(proof.HELLO_BYTES, socket.MSG_WAITALL)
        mine = proof.Client(KEY, PURPOSE, proof.binding_of(onward, server=False)).hello[8:40]
        onward.sendall(hello[:8] + mine + hello[40:])
        reply = onward.recv(proof.REPLY_BYTES, socket.MSG_WAITALL)
        held.sendall(reply[:8] + hello[8:40] + reply[40:])

    forging = pool.submit(forge)
    with client, pytest.raises(ProofError, match="the server does not hold the secret"):
        prove_as_client(client, KEY, PURPOSE)
    forging.result(PATIENCE_S)
    onward.close()
    with pytest.raises(ConnectionError):
        serving.result(PATIENCE_S)


IN_A_NAMESPACE = """
import socket, subprocess, sys
from fastrt.net.grpc.proof import binding_of
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with socket.create_server(("127.0.0.1", 31999)) as listener, socket.socket() as sock:
    sock.bind(("127.0.0.1", 31998))
    sock.connect(("127.0.0.1", 31999))
    print(binding_of(sock, False))
"""


def test_same_addresses_in_another_network_namespace_are_another_connection() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")
    said = []
    for _ in range(2):
        done = subprocess.run(["unshare", "-n", sys.executable, "-c", IN_A_NAMESPACE], capture_output=True, text=True)
        if "unshare" in done.stderr:
            pytest.skip(f"no network namespaces here: {done.stderr}")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said[0][:-1] == said[1][:-1]
    assert said[0][-1] != said[1][-1]


# ---- noise and silence ----


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01", "speaks TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak fastrt's protocol"),
        (b"f" * 1000, "does not speak fastrt's protocol"),
        (b"", "closed the connection"),
        (b"fastrtP1", "closed the connection"),
    ],
)
@pytest.mark.parametrize("side", ["client", "server"])
def test_noise_is_refused_in_words(
    pool: ThreadPoolExecutor, opened: Any, listener: socket.socket, side: str, noise: bytes, said: str
) -> None:
    if side == "server":
        serving = served(pool, listener)
        with dial(opened, listener) as sock:
            sock.sendall(noise)
            with contextlib.suppress(OSError):  # the server may have refused the noise and closed by now
                sock.shutdown(socket.SHUT_WR)
            with pytest.raises((ProofError, ConnectionError), match=f"the client {said}"):
                serving.result(PATIENCE_S)
        return
    sock = dial(opened, listener)
    held, _ = listener.accept()
    opened(held).sendall(noise)
    held.shutdown(socket.SHUT_WR)
    with pytest.raises((ProofError, ConnectionError), match=f"the server {said}"):
        prove_as_client(sock, KEY, PURPOSE)


@pytest.mark.parametrize("dripping", [False, True])
def test_silence_and_drops_are_given_up_at_the_deadline(
    pool: ThreadPoolExecutor, opened: Any, listener: socket.socket, dripping: bool
) -> None:
    serving = served(pool, listener, timeout_s=0.3)
    begun = time.monotonic()
    over = threading.Event()
    with dial(opened, listener) as sock:

        def drip() -> None:
            for byte in b"fastrtP1" + bytes(60):
                with contextlib.suppress(OSError):
                    sock.sendall(bytes([byte]))
                if over.wait(0.2):  # 14 s for all of it
                    return

        dropping = pool.submit(drip) if dripping else None
        with pytest.raises(TimeoutError, match=r"of 72 bytes of the client's greeting came in time"):
            serving.result(PATIENCE_S)
        over.set()
        assert time.monotonic() - begun < 12
        if dropping is not None:
            dropping.result(PATIENCE_S)


def test_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="proves nothing"):
        proof.Client(b"short", PURPOSE, "")


def test_proof_counts_once() -> None:
    client, server = (kind(KEY, PURPOSE, "a") for kind in (proof.Client, proof.Server))
    final = client.answer(server.reply(client.hello))
    server.check(final)
    with pytest.raises(ProofError):
        server.check(final)
    with pytest.raises(ProofError):
        proof.Server(KEY, PURPOSE, "a").check(b"")
