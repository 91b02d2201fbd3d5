"""How a process joins a session: a Unix socket to the node daemon, one JSON message a line.

The daemon takes the peer's pid from the kernel (SO_PEERCRED), opens its pidfd before it gives it a client slot,
and keeps the connection for the few things that do not go through the arena: log lines to drivers, a worker's
word that it blocks, orders to leave.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from typing import Any

from fastrt._core.clients import Client
from fastrt._core.segment import Segment
from fastrt.errors import AttachError

_MESSAGE_BYTES_MAX = 1 << 20


class Link:
    """One end of a connection between a process and its node daemon."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, **message: Any) -> bool:
        """Send one message; False when the other end is gone."""
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def post(self, **message: Any) -> bool:
        """Send without ever waiting for the reader: what it does not take now goes with `flush`.

        Returns:
            False when the reader is gone.
        """
        self._outgoing += json.dumps(message).encode() + b"\n"
        return self.flush()

    @property
    def backlog(self) -> int:
        """How many bytes `post` has left over: who posts to a slow reader must look at this and pause."""
        return len(self._outgoing)

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Send what `post` has left over, as far as the reader takes it in time; False when the reader is gone."""
        until = time.monotonic() + timeout_s
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0 or not select.select([], [self._sock], [], left)[1]:
                    return True
                continue
            except OSError:
                self._outgoing.clear()
                return False
            del self._outgoing[:sent]
        return True

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None when none comes in time.

        Raises:
            EOFError: the other end is gone, or sends what is no message.
        """
        while True:
            line, found, rest = self._received.partition(b"\n")
            if found:
                self._received = rest
                return self._parse(bytes(line))
            if not select.select([self._sock], [], [], timeout_s)[0]:
                return None
            try:
                data = self._sock.recv(65536)
            except OSError as exc:
                raise EOFError(str(exc)) from None
            if not data or len(self._received) > _MESSAGE_BYTES_MAX:
                raise EOFError("the connection was closed")
            self._received += data

    def waiting(self) -> bool:
        """Whether a whole message has been read ahead."""
        return b"\n" in self._received

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the process at the other end, as the kernel recorded them when it connected."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        return pid, uid

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EOFError("the other end sent something that is no message")
        return message


def join(path: str, kind: str, name: str, timeout_s: float = 30.0, logs: bool = False) -> tuple[Client, Link]:
    """Join the session whose daemon listens at `path`.

    Args:
        path: of the daemon's socket.
        kind: "driver", "worker" or "tool".
        name: for listings.
        timeout_s: how long to wait for the daemon's answer.
        logs: whether to send what workers print; the caller must then go on reading from the connection.
    Returns:
        The core's attachment and the connection, which stays open.
    Raises:
        AttachError: nobody listens there, or the daemon refuses; the message says why.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as exc:
        sock.close()
        raise AttachError(f"no node daemon answers at {path}: {exc}; start one with fastrt.init()") from None
    link = Link(sock)
    link.send(op="join", kind=kind, name=name, logs=logs)
    try:
        answer = link.receive(timeout_s)
    except EOFError as exc:
        raise AttachError(f"the node daemon at {path} went away while this process joined: {exc}") from None
    if answer is None:
        raise AttachError(f"the node daemon at {path} did not answer within {timeout_s} s")
    if "error" in answer:
        link.close()
        raise AttachError(answer["error"])
    client = Client(Segment.attach(answer["segment"]), answer["index"], answer["gen"])
    return client, link


def answers(path: str) -> bool:
    """Whether somebody listens at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(path) == 0


def listen(path: str) -> socket.socket:
    """Listen at `path`, for this user only."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(old)
    sock.listen(128)
    return sock
