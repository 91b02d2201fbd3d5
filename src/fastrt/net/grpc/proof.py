"""Mutual proof of a shared key over a connection in the clear. The key itself is never sent.

    client -> server   hello   magic, SHA-256 of the client's binding, nonce
    server -> client   reply   magic, SHA-256 of the server's binding, nonce, HMAC by the server
    client -> server   final   HMAC by the client

Each HMAC-SHA256 covers the role of its sender, the purpose, the binding and both nonces. So a recording proves nothing
on another connection, no side can send back what the other side sent, and a proof for one purpose is worthless for
another. The client knows after the reply, and the server after the final message, that the peer holds the key.

The proof authenticates the two ends of one TCP connection and protects no byte after it. It is for connections that no
attacker can change in transit: loopback, where only the kernel carries the bytes, and networks that the user trusts by
`--insecure`. All other links use TLS (`fastrt.net.grpc.identity`).

**Binding.** A process of another user may listen where the client dials, for example on the port of a listener that
has died, and pass every byte on to the true listener. Nonces do not help against such a relay. Both sides therefore
prove how they see the connection itself (`binding_of`):

- On one machine (loopback, or both ends at one address): the addresses and ports of both ends, the network namespace
  and the boot of the machine. The kernel has at most one connection with these four values in a namespace. A relay
  needs a second connection, and its own end of that connection has another port. This also holds when the relay closes
  its listener and the true one starts again on the same port while the greeting is under way: the port of the client
  is still taken. It holds for two machines that an SSH tunnel joins, because the boot differs.
- Otherwise: the address and port that the client dialled, as the listener sees them. A process on another address
  cannot relay. An attacker on the path could take over the connection after the proof anyway.
- A port forwarding changes what the two sides see. It is refused like any relay.

A Unix socket has no such values, only the path to which the listener bound it. Check the uid of the peer there
(`SO_PEERCRED`) and use the proof in addition, if at all.

`Client` and `Server` are the two halves without input and output, for event loops. `prove_as_client` and
`prove_as_server` run them over a socket with one deadline for all of it.

Source: RFC 5802 (SCRAM) for the order of messages, RFC 5929 for the idea of binding a proof to its connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from functools import lru_cache

from fastrt.errors import FastrtError
from fastrt.net.address import ip_of

GREETING_S = 10.0  # for the whole proof, no matter how the bytes are spread over it

_MAGIC = b"fastrtP1"
_NONCE_BYTES = 32
_KEY_BYTES_MIN = 16
_HELLO = struct.Struct("<8s32s32s")
_REPLY = struct.Struct("<8s32s32s32s")
_SO_NETNS_COOKIE = 71  # Linux 5.14; the socket module does not name it
HELLO_BYTES = _HELLO.size
REPLY_BYTES = _REPLY.size
FINAL_BYTES = 32


class ProofError(FastrtError):
    """The peer does not hold the same key, speaks another protocol, or is not the end of this connection.

    The message names the cause. Give both sides the token file of one cluster, and connect them without a relay.
    """


class Client:
    """The proof of the side that has dialled, without input and output.

    Args:
        key: the shared key, at least 16 bytes.
        purpose: the kind of link. Both sides must give the same text.
        binding: this side's view of the connection, from `binding_of`, or another text that both sides know.

    Raises:
        ValueError: the key is too short to be a key.
    """

    def __init__(self, key: bytes, purpose: str, binding: str) -> None:
        self._parts = _Parts(key, purpose, binding)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.hello = _HELLO.pack(_MAGIC, self._parts.digest, self._nonce)

    def answer(self, reply: bytes | bytearray) -> bytes:
        """Check the server's proof and return the client's, the final message.

        Args:
            reply: REPLY_BYTES bytes.
        Returns:
            FINAL_BYTES bytes to send.
        Raises:
            ProofError: the server has not proved the key, or sees another connection.
        """
        if len(reply) != REPLY_BYTES or reply[: len(_MAGIC)] != _MAGIC:
            raise ProofError(_strange("server", bytes(reply[: len(_MAGIC)])))
        _, digest, nonce, proof = _REPLY.unpack(reply)
        self._parts.check_binding(digest, "server")
        if not hmac.compare_digest(proof, self._parts.proof(b"server", self._nonce, nonce)):
            raise ProofError("the server does not hold the secret of this cluster")
        return self._parts.proof(b"client", self._nonce, nonce)


class Server:
    """The proof of the side that has accepted, without input and output. Use one per connection.

    Args:
        key: the shared key, at least 16 bytes.
        purpose: the kind of link. Both sides must give the same text.
        binding: this side's view of the connection, from `binding_of`, or another text that both sides know.

    Raises:
        ValueError: the key is too short to be a key.
    """

    def __init__(self, key: bytes, purpose: str, binding: str) -> None:
        self._parts = _Parts(key, purpose, binding)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._digest = b""
        self._expected = b""

    def reply(self, hello: bytes | bytearray) -> bytes:
        """Answer the client's first message.

        Args:
            hello: HELLO_BYTES bytes.
        Returns:
            REPLY_BYTES bytes to send.
        Raises:
            ProofError: the client speaks another protocol.
        """
        if len(hello) != HELLO_BYTES or hello[: len(_MAGIC)] != _MAGIC:
            raise ProofError(_strange("client", bytes(hello[: len(_MAGIC)])))
        _, self._digest, nonce = _HELLO.unpack(hello)
        self._expected = self._parts.proof(b"client", nonce, self._nonce)
        proof = self._parts.proof(b"server", nonce, self._nonce)
        return _REPLY.pack(_MAGIC, self._parts.digest, self._nonce, proof)

    def check(self, final: bytes | bytearray) -> None:
        """Check the client's proof.

        Args:
            final: FINAL_BYTES bytes.
        Raises:
            ProofError: the client has not proved the key, or sees another connection.
        """
        self.check_binding()
        if not self._expected or not hmac.compare_digest(bytes(final), self._expected):
            raise ProofError("the client does not hold the secret of this cluster")
        self._expected = b""  # once

    def check_binding(self) -> None:
        """Check that the client sees the same connection, after `reply`: an earlier and clearer refusal than `check`.

        Raises:
            ProofError: it sees another one.
        """
        self._parts.check_binding(self._digest, "client")


class _Parts:
    """The data that both roles put under an HMAC, apart from role and nonces."""

    __slots__ = ("_context", "_key", "digest")

    def __init__(self, key: bytes, purpose: str, binding: str) -> None:
        if len(key) < _KEY_BYTES_MIN:
            raise ValueError(f"a key of {len(key)} bytes proves nothing; give at least {_KEY_BYTES_MIN}")
        self._key = key
        self.digest = hashlib.sha256(binding.encode()).digest()
        purpose_bytes = purpose.encode()
        self._context = struct.pack("<I", len(purpose_bytes)) + purpose_bytes + self.digest

    def proof(self, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        covered = b"fastrt proof 1 " + role + self._context + client_nonce + server_nonce
        return hmac.digest(self._key, covered, "sha256")

    def check_binding(self, digest: bytes, peer: str) -> None:
        if not hmac.compare_digest(digest, self.digest):
            raise ProofError(
                f"the {peer} is not the other end of this connection: a relay or a port forwarding is between. "
                "Connect directly, or use TLS"
            )


# ---- over a socket ----


def prove_as_client(
    sock: socket.socket, key: bytes, purpose: str, address: str | None = None, timeout_s: float = GREETING_S
) -> None:
    """Prove the key to the listener that `sock` is connected to, and have it prove the key.

    The socket's own timeout is the same afterwards. After an error the connection is of no use: close it.

    Args:
        sock: a connected TCP or Unix socket.
        key: the shared key, at least 16 bytes.
        purpose: the kind of link. Both sides must give the same text.
        address: a text to which the proof is bound, for example the address dialled. None: `binding_of(sock)`, which is
            the safe choice wherever both sides can use it.
        timeout_s: for all of it.
    Raises:
        ProofError: the server does not hold the key, speaks another protocol, or is not the end of this connection.
        TimeoutError: the proof was not complete in time.
        OSError: the connection is broken, or the server closed it.
    """
    client = Client(key, purpose, binding_of(sock, server=False) if address is None else address)
    with _deadline(sock, timeout_s) as until:
        _send(sock, client.hello, until)
        _send(sock, client.answer(_receive(sock, REPLY_BYTES, until, "server")), until)


def prove_as_server(
    sock: socket.socket, key: bytes, purpose: str, address: str | None = None, timeout_s: float = GREETING_S
) -> None:
    """Have the client of an accepted connection prove the key, and prove it to the client.

    The socket's own timeout is the same afterwards. After an error the connection is of no use: close it.

    Args:
        sock: an accepted TCP or Unix socket.
        key: the shared key, at least 16 bytes.
        purpose: the kind of link. Both sides must give the same text.
        address: a text to which the proof is bound. None: `binding_of(sock)`.
        timeout_s: for all of it.
    Raises:
        ProofError: the client does not hold the key, speaks another protocol, or is not the end of this connection.
        TimeoutError: the proof was not complete in time.
        OSError: the connection is broken, or the client closed it.
    """
    server = Server(key, purpose, binding_of(sock, server=True) if address is None else address)
    with _deadline(sock, timeout_s) as until:
        try:
            hello = _receive(sock, HELLO_BYTES, until, "client")
        except ProofError:
            with contextlib.suppress(OSError):
                _send(sock, _MAGIC, until)  # a client that speaks TLS then reports that this server does not
            raise
        _send(sock, server.reply(hello), until)
        server.check_binding()
        server.check(_receive(sock, FINAL_BYTES, until, "client"))


def binding_of(sock: socket.socket, server: bool) -> str:
    """Describe a connection so that both of its ends, and no end of another connection, get the same text.

    Args:
        sock: a connected socket.
        server: whether this process accepted the connection.
    Returns:
        A text; see the module for its contents.
    Raises:
        OSError: the socket is not connected any more.
    """
    here, there = sock.getsockname(), sock.getpeername()
    client, listener = (there, here) if server else (here, there)
    if sock.family == socket.AF_UNIX:
        return f"unix {os.fsdecode(listener)}"
    if not is_local(sock):
        return f"tcp {_end(listener)}"
    return f"local {_end(client)} {_end(listener)} {_boot()} {_namespace(sock)}"


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connection are on this machine; both ends get the same result.

    Args:
        sock: a connected socket.
    Returns:
        True for loopback, for a Unix socket, and where both ends have one address.
    Raises:
        OSError: the socket is not connected any more.
    """
    if sock.family == socket.AF_UNIX:
        return True
    here, there = ip_of(sock.getsockname()[0]), ip_of(sock.getpeername()[0])
    return here.is_loopback or here == there


def _end(end: tuple[str, int]) -> str:
    return f"{ip_of(end[0])} {end[1]}"


@lru_cache(maxsize=1)
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _namespace(sock: socket.socket) -> str:
    """Return the network namespace of a socket, which can differ from that of the process."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8).hex()
    except OSError:  # an older kernel
        return str(os.stat("/proc/self/ns/net").st_ino)


def _strange(peer: str, begin: bytes) -> str:
    """Return the error message for a first message of another protocol."""
    if begin[:1] in (b"\x15", b"\x16") and begin[1:2] in (b"", b"\x03"):
        return f"the {peer} speaks TLS, but this link is in the clear. Give --insecure to both sides or to neither"
    return f"the {peer} does not speak fastrt's protocol of this version"


@contextlib.contextmanager
def _deadline(sock: socket.socket, timeout_s: float) -> Iterator[float]:
    before = sock.gettimeout()
    try:
        yield time.monotonic() + timeout_s
    finally:
        sock.settimeout(before)


def _wait_at_most(sock: socket.socket, until: float) -> None:
    sock.settimeout(max(until - time.monotonic(), 1e-6))  # 0 would mean: do not block


def _send(sock: socket.socket, data: bytes, until: float) -> None:
    _wait_at_most(sock, until)
    sock.sendall(data)


def _receive(sock: socket.socket, nbytes: int, until: float, peer: str) -> bytes:
    """Read exactly `nbytes` bytes by a deadline; bytes of another protocol are refused at the first wrong one."""
    data = b""
    while len(data) < nbytes:
        _wait_at_most(sock, until)
        try:
            more = sock.recv(nbytes - len(data))
        except TimeoutError:
            raise TimeoutError(f"{len(data)} of {nbytes} bytes of the {peer}'s greeting came in time") from None
        if not more:
            raise ConnectionError(f"the {peer} closed the connection after {len(data)} bytes of its greeting")
        data += more
        if nbytes > FINAL_BYTES and data[: len(_MAGIC)] != _MAGIC[: len(data)]:
            raise ProofError(_strange(peer, data[: len(_MAGIC)]))
    return data
