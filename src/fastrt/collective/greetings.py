"""Opening of a connection between two ranks: both prove the group's secret, then the caller sends a greeting.

    caller -> listener   TLS handshake with certificates on both sides, or the proof of `fastrt.net.grpc.proof`
    caller -> listener   greeting: JSON with the purpose of the connection, its length before it
    listener -> caller   one byte, or with TLS the keys of `fastrt.net.grpc.sealed`: the greeting has arrived

Before the proof the listener parses only fields of fixed size. It serves all callers at the same time. Silent or slow
strangers have a deadline and a limited number of places, and do not delay the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Generator
from typing import Any

from fastrt.collective.access import Access
from fastrt.errors import FastrtError
from fastrt.foreign_text import ForeignTextError, read_object
from fastrt.net.grpc import proof
from fastrt.net.grpc.sealed import SMALL_BYTES, Link, moved, seal_as_client, seal_as_server
from fastrt.shortage import is_short

GREETING_S = 5.0  # for the proof and the greeting together
_PLACES = 512
_STAY_S = 0.25  # a new connection keeps its place for at least this long; then the oldest one may be replaced
_GREETING_BYTES_MAX = 1 << 16
_LENGTH = struct.Struct("<I")
_TAKEN = b"\x01"
_Steps = Generator[int, bytes, dict[str, Any]]  # yields the number of bytes that it needs next


class NotAdmitted(ConnectionError):
    """The process at an address is no rank of the group, or it closed the connection before the proof."""


def dial(
    address: tuple[str, int],
    access: Access,
    purpose: str,
    greeting: dict[str, Any],
    timeout: float,
    bulk_bytes: int = SMALL_BYTES,
) -> Link:
    """Connect to a rank, prove the secret to each other, and send a greeting.

    Args:
        address: host and port of its listener.
        access: the group's secret.
        purpose: purpose of the connection; must be the same at both ends.
        greeting: data for the listener.
        timeout: for everything together, in seconds.
        bulk_bytes: size of the listener's buffer for this end's data.
    Returns:
        The connection, encrypted or not.
    Raises:
        NotAdmitted: the peer has not proved the secret.
        TimeoutError: the peer did not answer in time.
        OSError: no process listens there.
    """
    until = time.monotonic() + timeout
    sock: Any = socket.create_connection(address, timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the greeting waits 40 ms for the proof's ACK
        left = max(until - time.monotonic(), 0.01)
        if access.uses_tls(address[0]):
            sock = access.identity.open_client(sock, left)
        else:
            proof.prove_as_client(sock, access.key, purpose, timeout_s=left)
        sock.sendall(_text({**greeting, "purpose": purpose}))
        if isinstance(sock, ssl.SSLSocket):
            return seal_as_client(sock, until, bulk_bytes, SMALL_BYTES)
        sock.settimeout(max(until - time.monotonic(), 0.001))
        if not sock.recv(1):
            raise ConnectionError("the peer closed the connection")
        return _in_the_clear(sock)
    except TimeoutError:
        sock.close()
        raise
    except (OSError, FastrtError) as error:
        sock.close()
        raise NotAdmitted(f"{address[0]}:{address[1]}: {error}") from None


def _in_the_clear(sock: socket.socket) -> Link:
    local = proof.is_local(sock)  # fails when the connection is gone
    return Link(moved(sock), local)


def _text(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def send_text(link: Link, message: dict[str, Any]) -> None:
    """Send a message as JSON with its length."""
    link.send([_text(message)], GREETING_S)


def receive_text(link: Link, what: str, bytes_max: int, deadline: float) -> dict[str, Any]:
    """Receive a message of `send_text`.

    Raises:
        ForeignTextError: it is too long, or not a JSON object.
        TimeoutError: it did not come in time.
        ConnectionError: the peer is gone.
    """
    (size,) = _LENGTH.unpack(_receive(link, _LENGTH.size, deadline))
    if size > bytes_max:
        raise ForeignTextError(f"{what} has {size} bytes; at most {bytes_max} are allowed")
    return read_object(_receive(link, size, deadline), what, bytes_max=bytes_max)


def _receive(link: Link, size: int, deadline: float) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    try:
        while view:
            view = view[link.receive([view], 1, max(deadline - time.monotonic(), 0.001)) :]
    except EOFError:
        raise ConnectionError("the peer closed the connection") from None
    return data


class _Caller:
    """A connection that has not proved the secret yet.

    Args:
        sock: the accepted socket.
        access: the group's secret.
        purpose: purpose of connections to this listener.
        context: for TLS; None: the proof in the clear.
        bulk_bytes: see `dial`.

    Attributes:
        link: the connection, once the greeting is complete.
    """

    def __init__(
        self, sock: socket.socket, access: Access, purpose: str, context: ssl.SSLContext | None, bulk_bytes: int
    ) -> None:
        self.link: Link | None = None
        self._bulk_bytes = bulk_bytes
        self.since = time.monotonic()
        self.host = sock.getpeername()[0]
        self.greeting: dict[str, Any] | None = None
        self.wants = select.POLLIN
        self.sock: Any = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self.sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._access = access
        self._purpose = purpose
        self._handshakes = context is not None
        self._steps = self._read_greeting() if context is not None else self._prove()
        self._received = b""
        self._needed = next(self._steps)

    def proceed(self) -> None:
        """Process the bytes that have come. `greeting` is set when all of it has.

        Raises:
            OSError, FastrtError: the caller is gone, or is no rank of this group.
        """
        try:
            if self._handshakes:
                self.sock.do_handshake()
                self.sock.sendall(b"\x01")  # see `Identity.open_client`
                self._handshakes = False
            while self.greeting is None:
                more = self.sock.recv(self._needed - len(self._received))
                if not more:
                    raise ConnectionError("it closed the connection before the proof")
                self._received += more
                if len(self._received) == self._needed:
                    self._step()
        except (BlockingIOError, ssl.SSLWantReadError):
            self.wants = select.POLLIN
        except ssl.SSLWantWriteError:
            self.wants = select.POLLOUT

    def _step(self) -> None:
        received, self._received = self._received, b""
        try:
            self._needed = self._steps.send(received)
        except StopIteration as stop:
            if isinstance(self.sock, ssl.SSLSocket):
                self.link = seal_as_server(self.sock, SMALL_BYTES, self._bulk_bytes)
            else:
                self.sock.sendall(_TAKEN)
                self.link = _in_the_clear(self.sock)
            self.greeting = stop.value

    def _prove(self) -> _Steps:
        server = proof.Server(self._access.key, self._purpose, proof.binding_of(self.sock, server=True))
        self.sock.sendall(server.reply((yield proof.HELLO_BYTES)))  # it fits into a socket's empty buffer
        server.check((yield proof.FINAL_BYTES))
        return (yield from self._read_greeting())

    def _read_greeting(self) -> _Steps:
        (size,) = _LENGTH.unpack((yield _LENGTH.size))
        if not 0 < size <= _GREETING_BYTES_MAX:
            raise ForeignTextError(f"a greeting has {size} bytes; the limit is {_GREETING_BYTES_MAX}")
        greeting = read_object((yield size), "a rank's greeting", {"purpose": str})
        if greeting["purpose"] != self._purpose:
            raise ForeignTextError("the greeting is for another group, or for an earlier one of this name")
        return greeting


class Greetings:
    """The callers of a listener that have not sent a complete greeting yet.

    Args:
        listener: accepts the callers; not owned by this object.
        access: the group's secret.
        purpose: purpose of connections to this listener.
        bulk_bytes: see `dial`.
    """

    def __init__(self, listener: socket.socket, access: Access, purpose: str, bulk_bytes: int = SMALL_BYTES) -> None:
        self._bulk_bytes = bulk_bytes
        self.refused = ""  # the reason why the last caller was refused
        listener.setblocking(False)  # a caller may disconnect before it is accepted
        self._listener = listener
        self._access = access
        self._purpose = purpose
        tls = access.uses_tls(listener.getsockname()[0])
        self._context = access.identity.server_context() if tls else None
        self._callers: dict[int, _Caller] = {}  # by descriptor; the oldest first
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def wait(self, patience_s: float | None) -> list[tuple[Link, dict[str, Any]]]:
        """Wait for callers, and process their messages.

        Args:
            patience_s: how long to wait, in seconds; None: until a caller comes or the listener is shut down.
        Returns:
            Connections that have proved the secret, and their greetings.
        Raises:
            EOFError: the listener is shut down.
        """
        poll = select.poll()
        for fd, caller in self._callers.items():
            poll.register(fd, caller.wants)
        until = self._next_change()
        if self._has_room():
            poll.register(self._listener, select.POLLIN)
        left = None if until is None else max(until - time.monotonic(), 0.0)
        patience = min((one for one in (patience_s, left) if one is not None), default=None)
        events = poll.poll(None if patience is None else patience * 1000)
        greeted = []
        for fd, event in events:
            if fd in self._callers:
                greeted += self._proceed(fd)
            elif fd != self._listener.fileno():
                continue  # the descriptor's caller has gone, and this is a later one
            elif event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                for link, _ in greeted:
                    link.close()
                raise EOFError("the listener is shut down")
            else:
                self._accept()
        now = time.monotonic()
        for fd in [fd for fd, caller in self._callers.items() if caller.since + GREETING_S <= now]:
            self._drop(fd, f"it did not greet within {GREETING_S:g} s")
        return greeted

    def close(self) -> None:
        """Close the connections of all callers that have not sent a greeting."""
        for fd in list(self._callers):
            self._drop(fd, "")
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def _has_room(self) -> bool:
        """Whether one more caller can be accepted: a place is free, or the oldest caller may be replaced."""
        oldest = next(iter(self._callers.values()), None)
        return len(self._callers) < _PLACES or (oldest is not None and oldest.since + _STAY_S <= time.monotonic())

    def _next_change(self) -> float | None:
        """Time at which the oldest caller must leave, or may be replaced."""
        oldest = next(iter(self._callers.values()), None)
        if oldest is None:
            return None
        return oldest.since + (GREETING_S if self._has_room() else _STAY_S)

    def _accept(self) -> None:
        try:
            sock = self._listener.accept()[0]
        except OSError as error:
            if is_short(error):
                self._make_room()
            return
        if len(self._callers) >= _PLACES:
            self._drop(next(iter(self._callers)), "it was replaced by newer connections")
        try:
            caller = _Caller(sock, self._access, self._purpose, self._context, self._bulk_bytes)
        except (OSError, ValueError):  # it has disconnected
            sock.close()
            return
        self._callers[caller.sock.fileno()] = caller

    def _make_room(self) -> None:
        """Free a descriptor, since the process has none left: drop the oldest caller, or else refuse the next one."""
        if self._callers:
            self._drop(next(iter(self._callers)), "this process has no descriptors left")
            return
        os.close(self._reserve)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _drop(self, fd: int, why: str) -> None:
        caller = self._callers.pop(fd)
        if why:
            self.refused = f"{caller.host}: {why}"
        caller.sock.close()

    def _proceed(self, fd: int) -> list[tuple[Link, dict[str, Any]]]:
        caller = self._callers[fd]
        try:
            caller.proceed()
        except (OSError, ValueError, FastrtError) as error:
            self._drop(fd, str(error))
            return []
        if caller.link is None or caller.greeting is None:
            return []
        del self._callers[fd]
        return [(caller.link, caller.greeting)]
