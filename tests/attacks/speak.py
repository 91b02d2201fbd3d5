"""How a right client speaks to each kind of door, and how one with another secret, or with none, does."""

import contextlib
import socket
import urllib.error
import urllib.request
from typing import Any

import grpc

import fastrt.ps
from fastrt.cluster.peers import look
from fastrt.errors import FastrtError
from fastrt.ps.wire import dial
from fastrt.rpc.channel import bearer
from fastrt.transfer import wire

PATIENCE_S = 10.0
ALONE = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]  # a connection of its own


class RefusedError(Exception):
    """A door did not open: the words, or the status, that came instead."""


def call(address: str, method: str, secret: str | None, body: bytes = b"", timeout_s: float = PATIENCE_S) -> list[bytes]:
    """Call a gRPC method of any kind; what came before its end. Raises RefusedError if the caller is not known."""
    metadata = () if secret is None else bearer(secret)
    with grpc.insecure_channel(address, ALONE) as channel:
        answers = channel.stream_stream(method)(iter([body]), timeout=timeout_s, metadata=metadata)
        came: list[bytes] = []
        with contextlib.suppress(grpc.RpcError):
            came += answers
        code = answers.code()
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED):
            raise RefusedError(f"{code.name} after {came}" if came else code.name)
        return [*came, code.name.encode()]


def native(address: str, secret: str | None) -> None:
    """Greet at a native stream. Raises RefusedError if it does not open."""
    try:
        wire.connect(address, secret or "", False)[0].close()
    except (OSError, EOFError, wire.WireError) as error:
        raise RefusedError(str(error)) from None


def http(address: str, secret: str | None) -> bytes:
    """GET /state. Raises RefusedError if it is refused."""
    request = urllib.request.Request(f"http://{address}/state", headers=dict(() if secret is None else bearer(secret)))
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        raise RefusedError(str(error.code)) from None
    except OSError as error:
        raise RefusedError(str(error)) from None


def members(address: str, secret: str | None) -> Any:
    """Ask a parameter servers' scheduler for its members, as `fastrt ps status` does."""
    try:
        return look(address, 2.0)
    except (FastrtError, OSError) as error:
        raise RefusedError(str(error)) from None


def parameters(address: str, secret: str | None) -> None:
    """Connect to a cluster of parameter servers. Raises RefusedError if it does not take the secret."""
    try:
        fastrt.ps.connect(address, secret or "", timeout=PATIENCE_S).close()
    except (FastrtError, OSError, ValueError) as error:
        raise RefusedError(str(error)) from None


def parameters_local(unix: str) -> None:
    """Connect to a parameter server's Unix socket, as a worker of this machine. Raises RefusedError."""
    try:
        dial(unix.removeprefix("@"), "127.0.0.1:1", PATIENCE_S).close()
    except OSError as error:
        raise RefusedError(str(error)) from None


def rank(address: str, kind: int) -> None:
    """Greet rank 0 of a group, with a token that is not the group's. Raises RefusedError unless it answers."""
    with socket.socket(socket.AF_UNIX if address.startswith("@") else socket.AF_INET, kind) as sock:
        sock.settimeout(2.0)
        try:
            host, _, port = address.rpartition(":")
            sock.connect("\0" + address[1:] if address.startswith("@") else (host, int(port)))
            sock.sendall(b'{"token": "0", "rank": 1, "use": "x"}\n')
            if came := sock.recv(4096):
                raise RefusedError(repr(came[:100])) if b"error" in came else AssertionError(came)
        except OSError as error:
            raise RefusedError(str(error)) from None
    raise RefusedError("it hung up")


def is_open(address: str) -> bool:
    """Whether a TCP port takes connections."""
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        sock.settimeout(PATIENCE_S)
        return sock.connect_ex((host, int(port))) == 0
