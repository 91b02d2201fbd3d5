"""Opens connections of the native stream: authenticated, in the clear within one machine, sealed between machines.

Both ends make the same choice, from the addresses of the connection itself:

- **Within one machine** (loopback, or both ends at one address) both ends prove the cluster's secret to each other, and
  the stream is in the clear. The proof is bound to this connection, so a relay by another local user fails (see
  `fastrt.net.grpc.proof`), and another user needs a privilege such as CAP_NET_RAW to read the bytes on loopback. A Unix
  socket in the runtime folder would be as safe, but it would be a second listener and a second address per node, and
  TCP over loopback is as fast.
- **Between machines** the two ends make a TLS handshake and continue with sealed records (`fastrt.net.grpc.sealed`).
  `insecure` replaces this by the proof and a stream in the clear. That stops unauthenticated peers, but not an attacker
  who can read or change packets.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from fastrt.errors import FastrtError
from fastrt.net.address import AddressError, split_address
from fastrt.net.grpc import proof
from fastrt.net.grpc.sealed import BULK_BYTES, SMALL_BYTES, Link, moved, seal_as_client, seal_as_server
from fastrt.transfer.wire import WireError

if TYPE_CHECKING:
    from fastrt.net.grpc.identity import Identity

PURPOSE = "native stream 4"
_TLS_BEGIN = b"\x16"  # the first byte of every handshake
_TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # fatal, protocol_version


def dial(
    address: str, identity: Identity, insecure: bool, timeout_s: float = proof.GREETING_S, tls_on_loopback: bool = False
) -> Link:
    """Connect to a source. Both sides have then proved the cluster's secret.

    Args:
        address: host:port.
        identity: the cluster's identity.
        insecure: stay in the clear between machines too.
        timeout_s: for the connection, and again for the authentication.
        tls_on_loopback: use TLS within this machine too, as through a tunnel. The source must do the same.
    Returns:
        The link.
    Raises:
        WireError: the peer has not proved the secret, is not the end of this connection, or speaks another protocol; or
            the address is invalid.
        OSError, EOFError: nothing listens there, or the connection broke during the authentication.
    """
    try:
        place = split_address(address)
    except AddressError as exc:
        raise WireError(f"the address of a store is malformed: {exc}") from None
    sock = socket.create_connection(place, timeout_s)
    try:
        return _greet(sock, identity, insecure, timeout_s, tls_on_loopback)
    except OSError:  # also a handshake that the peer did not finish
        raise
    except FastrtError as exc:
        raise WireError(f"the native stream at {address} was rejected: {exc}") from exc
    finally:
        sock.close()  # a link holds the connection in another socket object


def _greet(sock: socket.socket, identity: Identity, insecure: bool, timeout_s: float, tls_on_loopback: bool) -> Link:
    prepare(sock)
    if _in_the_clear(sock, insecure, tls_on_loopback):
        proof.prove_as_client(sock, identity.key(PURPOSE), PURPOSE, None, timeout_s)
        local = proof.is_local(sock)  # raises when the connection is gone; the next line cannot fail
        return Link(moved(sock), local)
    until = time.monotonic() + timeout_s
    with identity.open_client(sock, timeout_s) as tls:
        return seal_as_client(tls, until, SMALL_BYTES, BULK_BYTES)


def accept(
    sock: socket.socket,
    identity: Identity,
    insecure: bool,
    timeout_s: float = proof.GREETING_S,
    tls_on_loopback: bool = False,
) -> Link:
    """Authenticate the peer of an accepted connection, and prove the cluster's secret to it.

    Args:
        sock: an accepted socket; it belongs to the link.
        identity: the cluster's identity.
        insecure: stay in the clear between machines too.
        timeout_s: for the whole authentication.
        tls_on_loopback: use TLS within this machine too.
    Returns:
        The link.
    Raises:
        IdentityError, ProofError: the peer has not proved the secret, or is not the end of this connection.
        OSError, EOFError: the connection broke during the authentication.
    """
    sock.setblocking(True)
    prepare(sock)
    if _in_the_clear(sock, insecure, tls_on_loopback):
        proof.prove_as_server(sock, identity.key(PURPOSE), PURPOSE, None, timeout_s)
        local = proof.is_local(sock)
        return Link(moved(sock), local)
    until = time.monotonic() + timeout_s
    _expect_tls(sock, timeout_s)
    with identity.open_server(sock, max(until - time.monotonic(), 0.001)) as tls:
        tls.settimeout(max(until - time.monotonic(), 0.001))
        return seal_as_server(tls, BULK_BYTES, SMALL_BYTES)


def prepare(sock: socket.socket) -> None:
    """Set socket options: send small frames at once, and detect a peer that vanished within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 20),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 50_000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _in_the_clear(sock: socket.socket, insecure: bool, tls_on_loopback: bool) -> bool:
    return not tls_on_loopback if proof.is_local(sock) else insecure


def _expect_tls(sock: socket.socket, timeout_s: float) -> None:
    """Reject a taker that does not begin with TLS, with an error at both ends; OpenSSL would only disconnect."""
    sock.settimeout(timeout_s)
    first = sock.recv(1, socket.MSG_PEEK)
    if first and first != _TLS_BEGIN:
        with contextlib.suppress(OSError):
            sock.recv(1 << 16)  # closing a socket with unread bytes would discard the alert
            sock.sendall(_TLS_ALERT)
        raise WireError(
            "it does not speak TLS, and links between machines need it. Give --insecure to both sides or to neither"
        )
