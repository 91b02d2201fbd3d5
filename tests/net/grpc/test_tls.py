"""TLS as our servers and callers have it: whose certificates, for which names, and which versions of the protocol."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.channel import bearer, open_aio_channel, open_channel
from fastrt.net.grpc.descriptors import message_set

PATIENCE_S = 20.0
ECHO = "/t.S/Echo"
EXCHANGE = "/fastrt.node.Node/Exchange"
NODE = message_set("node")
ANYTHING = NODE.methods("fastrt.node.Node")["Exchange"]
OLD = [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1]
NEW = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    """One authority's certificates: "ours" for this machine, "elsewhere" for another; "foreign" is another's for us."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)

    made = {}
    for ca in ("ca", "stranger"):
        openssl(f"req -newkey rsa:2048 -nodes -subj /CN=ca -x509 -days 2 -keyout {ca}.key -out {ca}.pem")
    for name, ca, names in (
        ("ours", "ca", "IP:127.0.0.1,DNS:localhost"),
        ("elsewhere", "ca", "IP:127.0.0.9,DNS:elsewhere.example"),
        ("foreign", "stranger", "IP:127.0.0.1,DNS:localhost"),
    ):
        (folder / "names").write_text(f"subjectAltName={names}")
        openssl(f"req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout {name}.key -out {name}.csr")
        signed = f"-CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 2 -extfile names"
        openssl(f"x509 -req -in {name}.csr {signed} -out {name}.pem")
        made[name] = TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")
    return made


def call_blocking(address: str, tls: TlsFiles) -> None:
    with open_channel(address, tls.channel_credentials()) as channel:
        channel.unary_unary(ECHO)(b"", timeout=PATIENCE_S, metadata=bearer("secret"))


def call_aio(address: str, tls: TlsFiles) -> None:
    async def call() -> None:
        async with open_aio_channel(address, tls.channel_credentials()) as channel:
            await channel.unary_unary(ECHO)(b"", timeout=PATIENCE_S, metadata=bearer("secret"))

    asyncio.run(call())


@pytest.mark.parametrize("call", [call_blocking, call_aio])
@pytest.mark.parametrize("name", ["elsewhere", "foreign"])
def test_caller_shows_a_server_with_anothers_certificate_no_token(
    serve: Any, files: dict[str, TlsFiles], call: Any, name: str
) -> None:
    shown: list[Any] = []
    recorder, _ = serve(credentials=files[name].server_credentials(), authorize=lambda _, data: shown.append(data))
    with pytest.raises(grpc.RpcError) as failed:
        call(recorder.address, files["ours"])
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert shown == []
    known, _ = serve(credentials=files["ours"].server_credentials(), authorize=lambda _, data: shown.append(data))
    call(known.address, files["ours"])
    assert ("authorization", "Bearer secret") in [tuple(pair) for pair in shown[0]]


# ---- versions of the protocol ----


def contexts(files: TlsFiles, version: ssl.TLSVersion) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A client's and a server's that speak one version only, also an old one."""
    made = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    for context in made:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # what old versions need, and OpenSSL has switched off
        context.minimum_version = context.maximum_version = version
        context.load_cert_chain(files.certificate, files.key)
        context.load_verify_locations(files.client_ca)
        context.set_alpn_protocols(["h2"])
    return made


@contextlib.contextmanager
def plain_server(context: ssl.SSLContext) -> Iterator[tuple[str, list[str]]]:
    """A server of Python's; its address, and how the greetings of its callers ended."""
    ended: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            sock, _ = listener.accept()
            sock.settimeout(PATIENCE_S)
            try:
                with context.wrap_socket(sock, server_side=True) as wrapped:
                    ended.append(str(wrapped.version()))
            except OSError:
                ended.append("refused")

    thread = threading.Thread(target=serve)
    thread.start()
    host, port = listener.getsockname()
    try:
        yield f"{host}:{port}", ended
    finally:
        stopping.set()
        with contextlib.suppress(OSError), socket.create_connection((host, port)):
            pass
        thread.join()
        listener.close()


def greeted(address: str, context: ssl.SSLContext) -> str | None:
    """The version that a server speaks with a client that knows just one; None when it refuses."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        try:
            with context.wrap_socket(sock, server_hostname=host) as wrapped:
                return wrapped.version()
        except (ssl.SSLError, ConnectionError):
            return None


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_server_refuses_old_versions(serve: Any, files: dict[str, TlsFiles]) -> None:
    recorder, _ = serve(credentials=files["ours"].server_credentials())
    for version in [*OLD, *NEW]:
        client, server = contexts(files["ours"], version)
        with plain_server(server) as (address, _):
            spoken = greeted(address, client)
            assert spoken is not None, "this Python cannot speak it, so the test would show nothing"
        assert greeted(recorder.address, client) == (spoken if version in NEW else None), version


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [*OLD, *NEW])
def test_caller_refuses_old_versions(files: dict[str, TlsFiles], version: ssl.TLSVersion, wait_until: Any) -> None:
    with plain_server(contexts(files["ours"], version)[1]) as (address, ended):
        with pytest.raises(grpc.RpcError):  # it is no server of gRPC's in any case
            call_blocking(address, files["ours"])
        wait_until(lambda: ended, "the end of the greeting")
        assert ended[0] == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}.get(version.name, "refused")
