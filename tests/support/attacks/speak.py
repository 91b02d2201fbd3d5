"""How a right client speaks to each kind of door, and how one with another secret, or with none, does."""

import contextlib
import socket

import grpc

import fastrt.ps
from fastrt.errors import FastrtError
from fastrt.membership.http import request
from fastrt.membership.peers import look
from fastrt.net.grpc.identity import Identity
from fastrt.net.grpc.trust import Trust
from fastrt.ps.wire import dial
from fastrt.transfer import link

PATIENCE_S = 10.0
ALONE = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]  # a connection of its own


class RefusedError(Exception):
    """A door did not open: the words, or the status, that came instead."""


def call(
    address: str, method: str, secret: str | None, programs: bool = False, timeout_s: float = PATIENCE_S
) -> list[bytes]:
    """Call a gRPC method of any kind; what came before its end. Raises RefusedError if the caller is not known."""
    if secret is None:
        channel = grpc.insecure_channel(address, ALONE)
    else:
        identity = Identity.from_token(secret)
        identity = identity.for_programs() if programs else identity
        channel = grpc.secure_channel(address, identity.channel_credentials(), [*ALONE, *identity.channel_options()])
    with channel:
        answers = channel.stream_stream(method)(iter([b""]), timeout=timeout_s)
        came: list[bytes] = []
        with contextlib.suppress(grpc.RpcError):
            came += answers
        code = answers.code()
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED):
            raise RefusedError(f"{code.name} after {came}" if came else code.name)
        return [*came, code.name.encode()]


def native(address: str, secret: str | None, timeout_s: float = 2.0) -> None:
    """Greet at a native stream. Raises RefusedError if it does not open."""
    if secret is None:
        heard = plain(address, bytes(200))
        if len(heard) > 200:
            raise AssertionError(heard)
        raise RefusedError("it hung up")
    try:
        link.dial(address, Identity.from_token(secret), False, timeout_s).close()
    except (OSError, EOFError, FastrtError) as error:
        raise RefusedError(str(error)) from None


def plain(address: str, said: bytes) -> bytes:
    """Say something over TCP; what comes within a second, or before the other end hangs up."""
    host, _, port = address.rpartition(":")
    heard = b""
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        sock.settimeout(1.0)
        with contextlib.suppress(OSError):
            sock.sendall(said)
            while piece := sock.recv(1 << 16):
                heard += piece
    return heard


def http(address: str, secret: str | None, timeout_s: float = 2.0) -> bytes:
    """GET /state. Raises RefusedError if it is refused."""
    try:
        trust = None if secret is None else Trust(secret)
        status, answer = request(address, trust, "GET", "/state", timeout_s=timeout_s)
    except (OSError, FastrtError, ValueError) as error:
        raise RefusedError(str(error)) from None
    if status != 200:
        raise RefusedError(str(status))
    return repr(answer).encode()


def members(address: str, secret: str | None, timeout_s: float = 2.0) -> object:
    """Ask a parameter servers' scheduler for its members, as `fastrt ps status` does. Raises RefusedError."""
    try:
        return look(address, secret, timeout_s)
    except (FastrtError, OSError) as error:
        raise RefusedError(str(error)) from None


def parameters(address: str, secret: str | None) -> None:
    """Connect to a cluster of parameter servers. Raises RefusedError if it does not take the secret."""
    if secret is None:
        heard = plain(address, b'frps\x2a\0\0\0\0\0\0\0\0\0\0\0{"token": null, "version": 1, "client": 1}')
        if b"{" in heard:
            raise AssertionError(heard)
        raise RefusedError("it hung up")
    try:
        fastrt.ps.connect(address, secret, timeout=PATIENCE_S).close()
    except (FastrtError, OSError, ValueError) as error:
        raise RefusedError(str(error)) from None


def parameter_server(unix: str | None, address: str, secret: str, timeout_s: float = PATIENCE_S) -> None:
    """Connect to a parameter server as a worker does, first over its Unix socket. Raises RefusedError."""
    try:
        dial(unix, address, Trust(secret), timeout_s).close()
    except (OSError, FastrtError) as error:
        raise RefusedError(str(error)) from None


def rank(address: str) -> None:
    """Greet rank 0 of a group without its secret. Raises RefusedError unless it answers."""
    heard = plain(address, b'{"token": "0", "rank": 1, "use": "x"}\n')
    if b"places" in heard or b"token" in heard:
        raise AssertionError(heard)
    raise RefusedError("it hung up")
