"""Messages between parameter servers and their clients: a head, JSON, and bytes.

On one machine they use a Unix socket, which can also carry descriptors of shared memory; between machines TCP. Both
ends prove the cluster's secret before the first message. Over TCP beyond loopback they use TLS with certificates on
both sides. Elsewhere (and everywhere with `insecure`) they use HMACs over fresh nonces, after which messages go in the
clear. Both ends of a Unix socket also check the peer's user.

Every size that a peer names is checked before memory is allocated. A connection on which a message was interrupted
cannot be used any more, and is closed.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastrt._core.transfer import stream
from fastrt.errors import FastrtError
from fastrt.foreign_text import read_json
from fastrt.net.address import is_loopback_host, split_address
from fastrt.net.grpc.proof import prove_as_client, prove_as_server
from fastrt.net.grpc.trust import Trust

VERSION = 1
META_BYTES_MAX = 16 << 20
GREETING_BYTES_MAX = 64 << 10
DATA_BYTES_MAX = 1 << 36
FDS_MAX = 4
_DEPTH_MAX = 64
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"frps"
_PURPOSE = "parameter server"
_TLS_BYTES = 256 << 10  # encrypted by one call
_IO_S = 30.0  # longest time without progress inside a message
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))  # 30 s
Meta = dict[str, Any]


class BrokenWireError(ConnectionError):
    """The peer is gone, or sent an invalid message; the connection is closed."""


class Wire:
    """One connection, owned by this object. At most one thread per direction may use it.

    Args:
        sock: connected, with the secret proved.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._turn = threading.Lock()  # for TLS, which allows one call at a time
        sock.setblocking(self._tls is None)
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a machine that has disappeared
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self.peer = peer_of(sock)[0] if self.is_local else None  # the peer's process id; None for another machine

    def close(self) -> None:
        """Close the connection and wake a thread that waits on it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    @property
    def local_host(self) -> str:
        """The IP address of this end."""
        return str(self._sock.getsockname()[0])

    def is_idle(self) -> bool:
        """Whether no unread data is there, and the connection has not ended."""
        try:
            return not self._is_readable(0.0)
        except (ValueError, OSError):  # the connection is closed
            return False

    def _is_readable(self, timeout_s: float | None) -> bool:
        if self._tls is not None and self._tls.pending():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000))

    def hang_up(self) -> None:
        """Shut the connection down; the thread that waits on it is woken and closes it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            pass

    def wait_closed(self) -> None:
        """Wait until either side has closed the connection, or the peer disappeared; does not read its messages."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
            poll.poll()
        except (ValueError, OSError):  # another thread has closed it
            return

    def send(self, meta: Meta, parts: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            meta: the JSON part.
            parts: contiguous buffers.
            fds: descriptors; on one machine only.
        Raises:
            BrokenWireError: the peer is gone, or does not read.
        """
        body = json.dumps(meta).encode()
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        head = _HEAD.pack(_MAGIC, len(body), sum(view.nbytes for view in views)) + body
        try:
            sent = 0
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._sock.sendmsg([head], rights)
            rest = [memoryview(head)[sent:], *views]
            if self._tls is not None:
                for part in rest:
                    self._encrypt(self._tls, part)
                return
            for k in range(0, len(rest), stream.PARTS_MAX):
                stream.send_parts(self._sock.fileno(), rest[k : k + stream.PARTS_MAX], _IO_S)
        except (OSError, ValueError) as error:
            self.close()
            raise BrokenWireError(f"the connection is broken: {error}") from None

    def greeting(self, timeout_s: float) -> tuple[Meta, int]:
        """Receive the first message of an accepted connection, which is small. Returns its JSON and data size.

        Args:
            timeout_s: time limit for the whole message, however its bytes are spread.
        Raises:
            TimeoutError: the message did not begin in time.
            BrokenWireError: the peer is gone, or did not send a complete, valid message.
        """
        meta, nbytes, fds = self.receive_head(timeout_s, GREETING_BYTES_MAX, time.monotonic() + timeout_s)
        for fd in fds:
            os.close(fd)
        return meta, nbytes

    def receive_head(
        self, timeout_s: float | None = None, meta_bytes_max: int = META_BYTES_MAX, deadline: float | None = None
    ) -> tuple[Meta, int, list[int]]:
        """Wait for a message. Returns its JSON, the size of its data (see `receive_data`), and its descriptors.

        Args:
            timeout_s: how long to wait for its start; None: without limit.
            meta_bytes_max: largest size of the JSON.
            deadline: time of the monotonic clock by which the JSON must be complete; None: any time while bytes come.
        Raises:
            TimeoutError: the message did not begin in time; the connection stays usable.
            BrokenWireError: the peer is gone, or sent an invalid message.
        """
        fds = array.array("i")
        try:
            if not self._is_readable(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            first = self._begin(fds)
            magic, meta_bytes, data_bytes = _HEAD.unpack(self._rest(first, _HEAD.size, deadline))
            if magic != _MAGIC or meta_bytes > meta_bytes_max or data_bytes > DATA_BYTES_MAX:
                raise ValueError("the peer does not speak the protocol of fastrt's parameter servers")
            body = self._rest(b"", meta_bytes, deadline)
            meta = read_json(body, "a message", bytes_max=meta_bytes_max, depth_max=_DEPTH_MAX)
            if not isinstance(meta, dict):
                raise ValueError("the peer does not speak the protocol of fastrt's parameter servers")
            return meta, data_bytes, list(fds)
        except TimeoutError:
            for fd in fds:
                os.close(fd)
            raise
        except (OSError, EOFError, ValueError) as error:
            for fd in fds:
                os.close(fd)
            self.close()
            raise BrokenWireError(f"the connection is broken: {error}") from None

    def receive_data(self, into: Any) -> None:
        """Receive data of a message into a writable buffer.

        Raises:
            BrokenWireError: the peer is gone, or sends nothing.
        """
        view = memoryview(into).cast("B")
        try:
            if view.nbytes:
                self._receive(view, view.nbytes, _IO_S)
        except (OSError, EOFError) as error:
            self.close()
            raise BrokenWireError(f"the connection is broken: {error}") from None

    def _rest(self, begun: bytes, size: int, deadline: float | None) -> bytearray:
        """Complete a buffer whose first bytes are there. With a deadline, arriving bytes do not extend the wait."""
        whole = bytearray(size)
        whole[: len(begun)] = begun
        have = len(begun)
        while have < size:
            left = _IO_S if deadline is None else max(0.0, deadline - time.monotonic())
            least = size - have if deadline is None else 1
            have += self._receive(memoryview(whole)[have:], least, left)
        return whole

    def _begin(self, fds: array.array[int]) -> bytes:
        """Receive the first bytes of a message, and its descriptors.

        Raises:
            EOFError: the connection has ended.
        """
        if not self.is_local:
            first = bytearray(_HEAD.size)
            return bytes(first[: self._receive(memoryview(first), 1, _IO_S)])
        begun, rights, _, _ = self._sock.recvmsg(_HEAD.size, socket.CMSG_SPACE(4 * FDS_MAX), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % 4])
        if not begun:
            raise EOFError("the peer closed it")
        return begun

    def _receive(self, view: memoryview, least: int, timeout_s: float) -> int:
        """Receive at least this many bytes, with a time limit between two pieces; returns the number received.

        Raises:
            EOFError, OSError: the connection has ended, or nothing came in time.
        """
        if self._tls is None:
            return int(stream.receive_parts(self._sock.fileno(), [view], least, timeout_s))
        have = 0
        while have < least:
            try:
                with self._turn:
                    got = self._tls.recv_into(view[have:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                self._wait(wanted, timeout_s)
                continue
            if not got:
                raise EOFError("the peer closed it")
            have += got
        return have

    def _encrypt(self, tls: ssl.SSLSocket, part: memoryview) -> None:
        for k in range(0, len(part), _TLS_BYTES):
            rest = part[k : k + _TLS_BYTES]
            while rest:
                try:
                    with self._turn:
                        rest = rest[tls.send(rest) :]
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                    self._wait(wanted, _IO_S)

    def _wait(self, wanted: ssl.SSLError, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN if isinstance(wanted, ssl.SSLWantReadError) else select.POLLOUT)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(f"no byte moved for {timeout_s:g} s")

    def call(
        self, meta: Meta, parts: Sequence[Any] = (), fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> Any:
        """Send a message and receive the answer: its JSON, data and descriptors.

        Raises:
            BrokenWireError: the peer is gone.
            TimeoutError: no answer came in time; the connection is closed, since one may come later.
        """
        self.send(meta, parts, fds)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float | None = None, into: Callable[[Meta, int], Any] | None = None) -> Any:
        """Receive an answer; see `call`.

        Args:
            timeout_s: how long to wait for its start.
            into: returns the buffer for the data, given the JSON and the size.
        """
        try:
            meta, nbytes, fds = self.receive_head(timeout_s)
        except TimeoutError:
            self.close()
            raise
        data = bytearray(nbytes) if into is None else into(meta, nbytes)
        self.receive_data(data)
        return meta, data, fds


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the peer of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_mine(sock: socket.socket) -> bool:
    """Whether the peer of a Unix socket is a process of the same user."""
    return peer_of(sock)[1] == os.getuid()


def dial(unix: str | None, address: str, trust: Trust, timeout_s: float) -> Wire:
    """Connect over the Unix socket if it is on this machine, else over TCP, and prove the secret in both directions.

    Args:
        unix: the socket's abstract name, without its leading zero.
        address: `host:port`.
        trust: the cluster's.
        timeout_s: for the connection, and again for the proof.
    Raises:
        BrokenWireError: no process of the cluster listens there.
    """
    if unix is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + unix)
            if is_mine(sock):
                prove_as_client(sock, trust.key, _PURPOSE, timeout_s=timeout_s)
                return Wire(sock)
        except (OSError, FastrtError):
            pass  # another machine or network namespace, or a server that is restarting
        sock.close()
    try:
        sock = socket.create_connection(split_address(address), timeout_s)
    except (OSError, ValueError) as error:
        raise BrokenWireError(f"no process answers at {address}: {error}") from None
    try:
        if is_clear(sock, trust):
            prove_as_client(sock, trust.key, _PURPOSE, timeout_s=timeout_s)
        else:
            sock = trust.identity.open_client(sock, timeout_s)
        return Wire(sock)
    except (OSError, FastrtError) as error:
        sock.close()
        raise BrokenWireError(f"no process of this cluster answers at {address}: {error}") from None


def receive(sock: socket.socket, trust: Trust, timeout_s: float) -> Wire:
    """Exchange proofs of the secret with the client of an accepted connection.

    Args:
        sock: accepted; it is closed on failure.
        trust: the cluster's.
        timeout_s: for the whole exchange.
    Raises:
        BrokenWireError: the client has not proved the secret.
    """
    try:
        if is_clear(sock, trust):
            prove_as_server(sock, trust.key, _PURPOSE, timeout_s=timeout_s)
        else:
            sock = trust.identity.open_server(sock, timeout_s)
        return Wire(sock)
    except (OSError, FastrtError) as error:
        sock.close()
        raise BrokenWireError(str(error)) from None


def is_clear(sock: socket.socket, trust: Trust) -> bool:
    """Whether messages over a connection are not encrypted; both ends come to the same answer."""
    if sock.family == socket.AF_UNIX or trust.insecure:
        return True
    return is_loopback_host(sock.getpeername()[0])
