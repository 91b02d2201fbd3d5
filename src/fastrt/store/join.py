"""Connections between the processes of a session and the node's daemon: a Unix socket, one message a line.

The daemon takes the peer's pid from the kernel (SO_PEERCRED) and opens its pidfd before it gives it a client slot.
Messages (`store.messages`) carry only what does not go through the arena: joining, output for drivers, requests to
spill and restore, which workers sleep, and the orders of the daemon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import struct
import threading
import time
import weakref

from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt.errors import AttachError
from fastrt.folders import private_files
from fastrt.store import messages
from fastrt.store.messages import ANSWER_BYTES_MAX, BYTES_MAX, M, Message, MessageError, read_message, write_message
from fastrt.versions import required_versions

UPLINK_SOCKET = "peer.sock"  # of the node's uplink, beside that of the daemon; there while the node is in a cluster
_COMEBACK_S = 10.0  # how long a dead daemon may take to be replaced
_COMEBACK_STEP_S = 0.02


class DaemonAwayError(AttachError):
    """No daemon answers at a session's socket: the session has ended, or another daemon is about to take over."""


class Link:
    """One end of a connection between a process and its node daemon.

    Args:
        sock: the connection.
        bytes_max: of one message that the other end sends.
    """

    def __init__(self, sock: socket.socket, bytes_max: int = BYTES_MAX) -> None:
        self._sock = sock
        self._bytes_max = bytes_max
        self._received = bytearray()
        self._searched = 0  # so many bytes of it hold no end of a line
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other end is gone."""
        try:
            self._sock.sendall(write_message(message) + b"\n")
        except OSError:
            return False
        return True

    def post(self, message: Message) -> bool:
        """Send without waiting for the reader: `flush` sends what the socket does not take now.

        Returns:
            False when the reader is gone.
        """
        self._outgoing += write_message(message) + b"\n"
        return self.flush()

    @property
    def backlog(self) -> int:
        """Bytes that `post` has not sent yet: a caller that posts much checks this and pauses."""
        return len(self._outgoing)

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Send the backlog, as far as the reader takes it in time; False when the reader is gone."""
        until = time.monotonic() + timeout_s
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0 or not self._ready(select.POLLOUT, left):
                    return True
                continue
            except OSError:
                self._outgoing.clear()
                return False
            del self._outgoing[:sent]
        return True

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None when none comes in time.

        Raises:
            EOFError: the other end is gone, or has sent a line without an end.
            MessageError: the other end has sent a malformed message.
        """
        while True:
            end = self._received.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                self._searched = 0
                return read_message(line)
            self._searched = len(self._received)
            if not self._ready(select.POLLIN, timeout_s):
                return None
            try:
                data = self._sock.recv(65536)
            except OSError as exc:
                raise EOFError(str(exc)) from None
            if not data or len(self._received) > self._bytes_max:
                raise EOFError("the connection was closed")
            self._received += data

    def _ready(self, event: int, timeout_s: float | None) -> bool:
        """Wait until the socket can be read or written; `poll`, because `select` takes no descriptor above 1023."""
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def waiting(self) -> bool:
        """Whether a whole message has been read ahead."""
        return b"\n" in self._received

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the process at the other end, as the kernel recorded them when it connected or listened."""
        return peer_of(self._sock)

    def hang_up(self) -> None:
        """End the connection in both directions; a thread that waits in `receive` gets EOFError."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):  # a task may have closed any descriptor
            self._sock.close()


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket; see `Link.peer`."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


@dataclasses.dataclass(frozen=True)
class _Former:
    """A client slot that this process has in a session that it left."""

    pid: int  # a forked child has no part in it
    client: weakref.ref[Client]  # alive while views are


_former: dict[str, _Former] = {}  # by the daemon's socket


def join(path: str, kind: str, name: str, timeout_s: float = 30.0, logs: str = "") -> tuple[Client, Link]:
    """Join the session whose daemon listens at `path`.

    Args:
        path: of the daemon's socket.
        kind: "driver", "worker", "actor", "tool" or "child" (of a worker, forked by a task).
        name: for listings.
        timeout_s: how long to wait for the daemon's answer.
        logs: which output of workers to send: "all" that of the caller's own tasks and actors on all nodes; "node" that
            of all tasks on this node. The caller must then go on reading from the connection. Empty: none.
    Returns:
        The core's attachment and the connection, which stays open.
    Raises:
        AttachError: no daemon of this user listens there, or it refuses; the message says why.
    """
    former = _former.get(path)
    if former is not None and former.pid == os.getpid():
        link, answer = _ask(path, timeout_s, messages.JoinAgain(kind, name, logs), messages.Joined)
        del _former[path]
        before = former.client()
    else:
        question = messages.Join(kind, name, logs, dict(required_versions()))
        link, answer = _ask(path, timeout_s, question, messages.Joined)
        before = None
    try:
        segment = Segment.attach(answer.segment) if before is None else before.segment
        return Client(segment, answer.slot, answer.gen, before), link
    except BaseException:
        link.close()
        raise


def leave(path: str, client: Client, timeout_s: float = 10.0) -> None:
    """Leave a session for now; `join` uses the same client slot again.

    The daemon ends the tasks of a driver that leaves. The slot is this process's as long as it lives, because views of
    values may be alive that it has pinned.

    Args:
        path: of the daemon's socket.
        client: the attachment, which `recovery.leave` has closed.
        timeout_s: how long to wait for the daemon's answer, and for the next daemon if that one has died.
    Raises:
        AttachError: no daemon answers in time.
    """
    _former[path] = _Former(os.getpid(), weakref.ref(client))
    until = time.monotonic() + timeout_s
    while True:
        try:
            patience_s = max(_COMEBACK_STEP_S, until - time.monotonic())
            _ask(path, patience_s, messages.Leave(), messages.Left)[0].close()
            return
        except AttachError:
            if time.monotonic() >= until or not os.path.exists(os.path.dirname(path)):
                raise
        time.sleep(_COMEBACK_STEP_S)


def rejoin(path: str, timeout_s: float = 30.0, logs: str = "") -> Link:
    """Connect a process that has a client slot already to the daemon that took the place of a dead one.

    Args:
        path, timeout_s, logs: as for `join`.
    Returns:
        The connection.
    Raises:
        AttachError: no daemon listens there, or the daemon does not know this process.
    """
    return _ask(path, timeout_s, messages.Reconnect(logs), messages.Reconnected)[0]


def inquire(path: str, question: Message, answer: type[M], timeout_s: float = 10.0, patient: bool = False) -> M:
    """Ask a node's daemon a question, without joining its session.

    Args:
        path: of the daemon's socket.
        question: `ListNodes`, `ListDemand`, `RequestResources`, `ListGroups`, `RemoveGroup`,
            `ListEndedProcesses` or `FindActor`.
        answer: the message that answers it.
        timeout_s: how long to wait for the answer.
        patient: whether to ask the daemon that takes the place of a dead one. Programs of the session do; a tool that
            examines any session does not, because that session may have ended.
    Raises:
        AttachError: no daemon listens there, it does not answer, or it refuses.
    """
    until = time.monotonic() + _COMEBACK_S
    while True:
        try:
            link, found = _ask(path, timeout_s, question, answer)
        except DaemonAwayError:
            if not patient or time.monotonic() > until or not os.path.isdir(os.path.dirname(path)):
                raise
            select.select([], [], [], _COMEBACK_STEP_S)
        else:
            link.close()
            return found


def _ask(path: str, timeout_s: float, question: Message, expected: type[M]) -> tuple[Link, M]:
    """Connect and send the first message; return the connection and the daemon's answer."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as exc:
        raise AttachError(f"this process cannot connect to the node daemon at {path}: {exc}") from None
    try:
        sock.connect(path)
    except OSError as exc:
        sock.close()
        raise DaemonAwayError(f"no node daemon answers at {path}: {exc}; start one with fastrt.init()") from None
    link = Link(sock, ANSWER_BYTES_MAX)
    uid = link.peer()[1]
    if uid != os.geteuid():
        link.close()
        raise AttachError(f"a process of uid {uid} listens at {path}, not one of uid {os.geteuid()}; remove the socket")
    link.send(question)
    try:
        answer = link.receive(timeout_s)
        if answer is not None and not isinstance(answer, messages.Refused):
            return link, messages.expect(answer, expected)
    except MessageError as exc:
        link.close()
        raise AttachError(f"the daemon at {path} may run another version of fastrt: {exc}") from None
    except EOFError as exc:
        link.close()
        raise DaemonAwayError(f"the node daemon at {path} went away while this process joined: {exc}") from None
    link.close()
    raise AttachError(answer.error if answer else f"the daemon at {path} did not answer in {timeout_s} s")


class Lasting:
    """A connection that outlives the daemon at its other end: when that dies, it connects to the next one.

    Args:
        path: where daemons of the session listen, one after the other.
        link: the first connection.
    """

    def __init__(self, path: str, link: Link) -> None:
        self._path = path
        self._link = link
        self._lock = threading.Lock()  # one thread may send while another receives

    def send(self, message: Message) -> bool:
        """Send one message; False when no daemon comes back."""
        link = self._link
        return link.send(message) or (self._again(link) and self._link.send(message))

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None when none comes in time, or a new daemon has not heard the request.

        Raises:
            EOFError: the daemon is gone, and none comes back.
        """
        link = self._link
        try:
            return link.receive(timeout_s)
        except EOFError:
            if self._again(link):
                return None
            raise

    def _again(self, dead: Link) -> bool:
        with self._lock:
            return self._link is not dead or self._reconnect()

    def _reconnect(self) -> bool:
        until = time.monotonic() + _COMEBACK_S
        while time.monotonic() < until:
            try:
                link = rejoin(self._path)
            except AttachError:
                select.select([], [], [], _COMEBACK_STEP_S)
                continue
            self._link.close()
            self._link = link
            return True
        return False


def answers(path: str) -> bool:
    """Whether a process listens at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(path) == 0


def listen(path: str) -> socket.socket:
    """Listen at `path`, for this user only."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with private_files():
        sock.bind(path)
    sock.listen(128)
    return sock
