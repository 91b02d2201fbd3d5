"""The identity of a cluster: tokens, keys, and TLS handshakes that prove the secret to both ends."""

import contextlib
import datetime
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fastrt.errors import ConfigError
from fastrt.net.grpc import identity as identity_module
from fastrt.net.grpc.identity import Identity, IdentityError, new_token

PATIENCE_S = 20.0
ECHO = "/t.S/Echo"
TOKEN = new_token()
OTHER = new_token()


@contextlib.contextmanager
def listening(serve_one: Callable[[socket.socket], Any]) -> Iterator[tuple[str, list[Any]]]:
    """A listener that hands one connection to a function on a thread; yields the address and what it returned."""
    results: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as sock:
                try:
                    results.append(serve_one(sock))
                except (OSError, IdentityError) as error:
                    results.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        yield "{}:{}".format(*listener.getsockname()), results
        thread.join(PATIENCE_S)


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


@contextlib.contextmanager
def grpc_server(credentials: grpc.ServerCredentials) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(lambda body, _: body)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.S", {"Echo": handler}),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def echo(address: str, identity: Identity, options: Any = None) -> bytes:
    options = identity.channel_options() if options is None else options
    with grpc.secure_channel(address, identity.channel_credentials(), options=options) as channel:
        return channel.unary_unary(ECHO)(b"hello", timeout=PATIENCE_S)


def with_certificate(identity: Identity, name: str = "", days: int = 1) -> Identity:
    """The same cluster's, with a certificate for another name, or that expired so many days ago (below 0)."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from fastrt.net.grpc import identity as module

    now = datetime.datetime(2020, 6, 1) if days < 0 else datetime.datetime(2150, 1, 1)
    key: Any = load_pem_private_key(identity._key_pem, None)
    made = identity._sign(name or identity.name, key, datetime.datetime(2020, 1, 2), now)
    identity._certificate_pem = module._pem(made)
    return identity


def test_token_gives_the_same_cluster_in_each_process() -> None:
    first, second = Identity.from_token(TOKEN), Identity.from_token(f" {TOKEN}\n")
    assert first.name == second.name == f"{TOKEN.split('-')[1][:16]}.fastrt"
    assert first.key("a") == second.key("a")
    assert len({first.key("a"), first.key("b"), Identity.from_token(OTHER).key("a"), bytes.fromhex(TOKEN[-64:])}) == 4
    assert first._key_pem != second._key_pem


def test_secret_is_not_in_what_is_shown_or_sent() -> None:
    identity = Identity.from_token(TOKEN)
    secret = TOKEN[-64:]
    assert secret not in repr([identity])
    assert secret.encode() not in identity._certificate_pem + identity._authority_pem


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token[:-1],
        lambda token: token + "0",
        lambda token: token.replace("fastrt1", "fastrt2"),
        lambda token: token[40:],
        lambda token: "",
        lambda token: "é" * 105,
    ],
)
def test_text_that_is_no_token_is_refused(change: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="not a cluster's token") as caught:
        Identity.from_token(change(TOKEN))
    assert TOKEN[-20:] not in str(caught.value)


@pytest.mark.parametrize("place", [8, 39, 41, 104])
def test_damaged_token_is_refused_by_its_hash(place: int) -> None:
    changed = TOKEN[:place] + ("0" if TOKEN[place] != "0" else "1") + TOKEN[place + 1 :]
    with pytest.raises(ConfigError, match="damaged"):
        Identity.from_token(changed)


def test_both_ends_with_the_token_talk_in_tls_1_3() -> None:
    server, client = Identity.from_token(TOKEN), Identity.from_token(TOKEN)

    def answer(sock: socket.socket) -> bytes:
        with server.open_server(sock) as wrapped:
            wrapped.sendall(b"pong")
            return wrapped.recv(4)

    with listening(answer) as (address, got), client.open_client(dial(address)) as wrapped:
        assert wrapped.version() == "TLSv1.3"
        assert wrapped.gettimeout() == PATIENCE_S
        wrapped.sendall(b"ping")
        assert wrapped.recv(4) == b"pong"
    assert got == [b"ping"]


def test_other_clusters_token_is_refused_at_both_ends() -> None:
    server, client = Identity.from_token(TOKEN), Identity.from_token(OTHER)
    with (
        listening(server.open_server) as (address, got),
        pytest.raises(IdentityError, match=f"process at {address} is not part.*has another cluster's token"),
    ):
        client.open_client(dial(address))
    assert isinstance(got[0], IdentityError)
    assert "another cluster's token" in str(got[0])


def test_client_with_another_authority_is_refused_by_the_server() -> None:
    """It trusts the server's authority, and shows a certificate that another one has signed."""
    server, client = Identity.from_token(TOKEN), Identity.from_token(OTHER)
    client._authority_pem, client.name = server._authority_pem, server.name
    with (
        listening(server.open_server) as (address, got),
        pytest.raises(IdentityError, match="does not accept the certificate of this process"),
    ):
        client.open_client(dial(address))
    assert "another authority" in str(got[0])


@pytest.mark.parametrize("side", ["client", "server"])
def test_expired_certificate_is_refused_in_words(side: str) -> None:
    server, client = Identity.from_token(TOKEN), Identity.from_token(TOKEN)
    with_certificate(server if side == "server" else client, days=-1)
    with listening(server.open_server) as (address, got), pytest.raises(IdentityError, match="expired"):
        client.open_client(dial(address))
    assert "expired" in str(got[0])


def test_certificate_for_another_name_is_refused_in_words() -> None:
    server = with_certificate(Identity.from_token(TOKEN), "0123456789abcdef.fastrt")
    with listening(server.open_server) as (address, got), pytest.raises(IdentityError, match="for another name"):
        Identity.from_token(TOKEN).open_client(dial(address))
    assert isinstance(got[0], IdentityError)


def test_client_without_certificate_is_refused_in_words() -> None:
    server = Identity.from_token(TOKEN)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=server._authority_pem.decode())
    with (
        listening(server.open_server) as (address, got),
        bare.wrap_socket(dial(address), server_hostname=server.name) as sock,
        pytest.raises(ssl.SSLError),
    ):
        sock.recv(1)
    assert "shows no certificate" in str(got[0])


@pytest.mark.parametrize("first", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64])
def test_plain_text_client_is_refused_in_words(first: bytes) -> None:
    server = Identity.from_token(TOKEN)
    with listening(server.open_server) as (address, got), dial(address) as sock:
        sock.sendall(first)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):
                pass
    assert "does not speak TLS" in str(got[0])


def test_plain_text_server_is_refused_in_words() -> None:
    client = Identity.from_token(TOKEN)
    with (
        listening(lambda sock: (sock.recv(1), sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))) as (address, _),
        pytest.raises(IdentityError, match="does not speak TLS"),
    ):
        client.open_client(dial(address))


@pytest.mark.parametrize("side", ["client", "server"])
def test_tls_1_2_is_refused_in_words(side: str) -> None:
    server, client = Identity.from_token(TOKEN), Identity.from_token(TOKEN)
    old = server if side == "server" else client
    context = old.server_context() if side == "server" else old.client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    if side == "server":
        old.server_context = lambda: context  # type: ignore[method-assign]
    else:
        old.client_context = lambda: context  # type: ignore[method-assign]
    with listening(server.open_server) as (address, got), pytest.raises(IdentityError, match="TLS"):
        client.open_client(dial(address))
    assert "does not speak TLS 1.3" in str(got[0]) or side == "server"


@pytest.mark.parametrize("side", ["client", "server"])
def test_silent_peer_is_given_up_at_the_deadline(side: str) -> None:
    identity = Identity.from_token(TOKEN)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(IdentityError, match=r"within 0\.1 s"):
        (identity.open_client if side == "client" else identity.open_server)(ours, 0.1)
    assert ours.fileno() == -1


def test_slow_peer_is_given_up_at_the_deadline() -> None:
    """Each byte comes in time, and all of them would take too long."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            for byte in b"\x16\x03\x01\x02\x00" + bytes(500):
                theirs.send(bytes([byte]))
                if stop.wait(0.02):
                    return

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(IdentityError, match=r"within 0\.3 s"):
        Identity.from_token(TOKEN).open_server(ours, 0.3)
    stop.set()
    dripping.join()
    theirs.close()


def test_recorded_handshake_replayed_is_refused() -> None:
    server, client = Identity.from_token(TOKEN), Identity.from_token(TOKEN)
    recorded = bytearray()

    def relay(sock: socket.socket, to: str) -> None:
        with dial(to) as onward:
            copying = threading.Thread(target=copy, args=(onward, sock))
            copying.start()
            copy(sock, onward, recorded)
            copying.join()

    def copy(source: socket.socket, sink: socket.socket, record: bytearray | None = None) -> None:
        while data := source.recv(1 << 16):
            if record is not None:
                record += data
            sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def read_one(sock: socket.socket) -> bytes:
        with server.open_server(sock) as wrapped:
            return wrapped.recv(1)

    with (
        listening(read_one) as (real, got),
        listening(lambda sock: relay(sock, real)) as (address, _),  # a relay in between changes nothing
        client.open_client(dial(address)) as wrapped,
    ):
        wrapped.sendall(b"x")
    assert got == [b"x"]
    with listening(server.open_server) as (address, got), dial(address) as sock:
        sock.sendall(recorded)
        with contextlib.suppress(OSError):  # the server may have refused it and closed by now
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass
    assert isinstance(got[0], IdentityError)


def test_grpc_with_the_token_works_over_any_address() -> None:
    with grpc_server(Identity.from_token(TOKEN).server_credentials()) as address:
        assert echo(address, Identity.from_token(TOKEN)) == b"hello"
        assert echo(address.replace("127.0.0.1", "localhost"), Identity.from_token(TOKEN)) == b"hello"
        assert Identity.from_token(TOKEN).why_refused(address) is None


def test_grpc_with_another_token_is_refused() -> None:
    with grpc_server(Identity.from_token(TOKEN).server_credentials()) as address:
        with pytest.raises(grpc.RpcError):
            echo(address, Identity.from_token(OTHER))
        assert Identity.from_token(OTHER).why_refused(address) == (
            f"the process at {address} is not part of this cluster: "
            "another authority has signed its certificate: it has another cluster's token, or none"
        )


def test_grpc_without_a_certificate_is_refused() -> None:
    identity = Identity.from_token(TOKEN)
    with grpc_server(identity.server_credentials()) as address:
        anonymous = grpc.ssl_channel_credentials(identity._authority_pem)
        with (
            grpc.secure_channel(address, anonymous, options=identity.channel_options()) as channel,
            pytest.raises(grpc.RpcError),
        ):
            channel.unary_unary(ECHO)(b"", timeout=PATIENCE_S)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(ECHO)(b"", timeout=PATIENCE_S)


def test_grpc_server_of_another_name_or_time_is_refused() -> None:
    for changed, words in ((("0123456789abcdef.fastrt", 1), "another name"), (("", -1), "expired")):
        server = with_certificate(Identity.from_token(TOKEN), *changed)
        with grpc_server(server.server_credentials()) as address:
            with pytest.raises(grpc.RpcError):
                echo(address, Identity.from_token(TOKEN))
            assert words in (Identity.from_token(TOKEN).why_refused(address) or "")


def test_reason_is_none_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    assert Identity.from_token(TOKEN).why_refused(address) is None


def test_import_and_a_session_do_not_load_cryptography() -> None:
    code = (
        "import sys, fastrt, fastrt.net.grpc.identity\n"
        "fastrt.init(num_workers=1, object_store_memory='64MiB')\n"
        "fastrt.get(fastrt.remote(lambda: 1).remote())\n"
        "fastrt.shutdown()\n"
        "assert 'cryptography' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_process_that_was_given_its_identity_is_of_the_cluster_and_does_not_load_cryptography() -> None:
    parent = Identity.from_token(TOKEN)
    given = parent.for_child()
    assert given["key"] not in (parent._key_pem.decode(), parent.for_child()["key"])
    code = (
        "import json, sys\n"
        "from fastrt.net.grpc.identity import Identity\n"
        "identity = Identity.from_parent(json.loads(sys.stdin.readline()))\n"
        "identity.server_context(), identity.client_context()\n"
        "print(identity.key('a').hex(), 'cryptography' in sys.modules)"
    )
    text = subprocess.check_output([sys.executable, "-c", code], input=json.dumps(given) + "\n", text=True)
    assert text.split() == [parent.key("a").hex(), "False"]
    child = Identity.from_parent(given)
    with listening(lambda sock: parent.open_server(sock).close()) as (address, results):
        child.open_client(dial(address)).close()
    with listening(lambda sock: child.open_server(sock).close()) as (address, more):
        parent.open_client(dial(address)).close()
    assert (results, more) == ([None], [None])
    assert child.for_programs().name == parent.for_programs().name


@pytest.mark.parametrize("length", [32, 48, 100])
def test_keys_are_derived_by_hkdf(length: int) -> None:
    known = HKDF(hashes.SHA256(), length, salt=None, info=b"fastrt 1 key a").derive(b"secret")
    assert identity_module._derive(b"secret", "fastrt 1 key a", length) == known


def test_no_key_stays_behind_in_a_file() -> None:
    before = set(os.listdir("/proc/self/fd"))
    identity = Identity.from_token(TOKEN)
    identity.server_context()
    identity.client_context()
    assert set(os.listdir("/proc/self/fd")) == before
