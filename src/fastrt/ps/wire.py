"""Messages between parameter servers and those that use them: a head, JSON that says what it is, and bytes.

On one machine they go over a Unix socket, which can also carry descriptors of shared memory, elsewhere over TCP. Both
ends prove the cluster's secret before the first message: over TCP beyond loopback by TLS with certificates on both
sides, elsewhere (and everywhere with `insecure`) by HMACs over fresh nonces, after which messages go in the clear. Both
ends of a Unix socket also check the other one's user.

Every size that a peer names is checked before anything is allocated. A connection on which a message was broken off is
of no more use, and closed.
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
_TLS_BYTES = 256 << 10  # that one call encrypts
_IO_S = 30.0  # how long the other end may take or give no byte inside a message
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))  # 30 s
Meta = dict[str, Any]


class BrokenWireError(ConnectionError):
    """The other end is gone, or sent what is no message; the connection is closed."""


class Wire:
    """One connection; it belongs to this object. One thread at a time for each direction.

    Args:
        sock: connected, and the secret proved.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._turn = threading.Lock()  # of TLS, which takes one call at a time
        sock.setblocking(self._tls is None)
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says nothing
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self.peer = peer_of(sock)[0] if self.is_local else None  # the process at the other end, if that is known

    def close(self) -> None:
        """Close the connection; whoever waits on it is woken."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    @property
    def local_host(self) -> str:
        """This side's IP address."""
        return str(self._sock.getsockname()[0])

    def is_idle(self) -> bool:
        """Whether nothing has come that was not asked for: not even the connection's end."""
        try:
            return not self._is_readable(0.0)
        except (ValueError, OSError):  # it is closed
            return False

    def _is_readable(self, timeout_s: float | None) -> bool:
        if self._tls is not None and self._tls.pending():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000))

    def hang_up(self) -> None:
        """End the connection under a thread that waits on it, and closes it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            pass

    def wait_closed(self) -> None:
        """Wait until the other end has closed it, or is found to be gone; what it sends stays to be received."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        poll.poll()

    def send(self, meta: Meta, parts: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            meta: as JSON takes it.
            parts: contiguous buffers.
            fds: descriptors, on one machine only.
        Raises:
            BrokenWireError: the other end is gone, or takes nothing.
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
        """The first message of whoever has connected, which is small: what it is, and how many bytes follow.

        Args:
            timeout_s: until all of it must be there, however the bytes are dealt out.
        Raises:
            TimeoutError: it did not begin in time.
            BrokenWireError: the other end is gone, or sent no message, or not all of one.
        """
        meta, nbytes, fds = self.receive_head(timeout_s, GREETING_BYTES_MAX, time.monotonic() + timeout_s)
        for fd in fds:
            os.close(fd)
        return meta, nbytes

    def receive_head(
        self, timeout_s: float | None = None, meta_bytes_max: int = META_BYTES_MAX, deadline: float | None = None
    ) -> tuple[Meta, int, list[int]]:
        """Wait for a message: what it is, how many bytes follow (see `receive_data`), and its descriptors.

        Args:
            timeout_s: how long to wait for its beginning; None: as long as it takes.
            meta_bytes_max: of the JSON that says what it is.
            deadline: until when that must be there, by the monotonic clock; None: as long as bytes come.
        Raises:
            TimeoutError: it did not begin in time; the connection is as good as before.
            BrokenWireError: the other end is gone, or sent no message.
        """
        fds = array.array("i")
        try:
            if not self._is_readable(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            first = self._begin(fds)
            magic, meta_bytes, data_bytes = _HEAD.unpack(self._rest(first, _HEAD.size, deadline))
            if magic != _MAGIC or meta_bytes > meta_bytes_max or data_bytes > DATA_BYTES_MAX:
                raise ValueError("this is no message of fastrt's parameter servers")
            body = self._rest(b"", meta_bytes, deadline)
            meta = read_json(body, "a message", bytes_max=meta_bytes_max, depth_max=_DEPTH_MAX)
            if not isinstance(meta, dict):
                raise ValueError("this is no message of fastrt's parameter servers")
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
        """Receive bytes of a message's data into a writable buffer.

        Raises:
            BrokenWireError: the other end is gone, or sends nothing.
        """
        view = memoryview(into).cast("B")
        try:
            if view.nbytes:
                self._receive(view, view.nbytes, _IO_S)
        except (OSError, EOFError) as error:
            self.close()
            raise BrokenWireError(f"the connection is broken: {error}") from None

    def _rest(self, begun: bytes, size: int, deadline: float | None) -> bytearray:
        """So many bytes, of which some are there; with a deadline, none of them is a reason to wait on."""
        whole = bytearray(size)
        whole[: len(begun)] = begun
        have = len(begun)
        while have < size:
            left = _IO_S if deadline is None else max(0.0, deadline - time.monotonic())
            least = size - have if deadline is None else 1
            have += self._receive(memoryview(whole)[have:], least, left)
        return whole

    def _begin(self, fds: array.array[int]) -> bytes:
        """The first bytes of a message, and its descriptors.

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
            raise EOFError("the other end closed it")
        return begun

    def _receive(self, view: memoryview, least: int, timeout_s: float) -> int:
        """Receive so many bytes at least, with at most so many seconds between two pieces; returns how many.

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
                raise EOFError("the other end closed it")
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
        """Send a message and receive the answer to it: what it is, its data, and its descriptors.

        Raises:
            BrokenWireError: the other end is gone.
            TimeoutError: there is no answer in time; the connection is closed, since one may come yet.
        """
        self.send(meta, parts, fds)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float | None = None, into: Callable[[Meta, int], Any] | None = None) -> Any:
        """Receive an answer; see `call`.

        Args:
            timeout_s: how long it may take to begin.
            into: given its JSON and the size of its data, a buffer for them.
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
    """Process and user at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_mine(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of the same user."""
    return peer_of(sock)[1] == os.getuid()


def dial(unix: str | None, address: str, trust: Trust, timeout_s: float) -> Wire:
    """Connect over the Unix socket if that is on this machine, else over TCP. Both ends have then proved the secret.

    Args:
        unix: the socket's abstract name, without its leading zero.
        address: `host:port`.
        trust: the cluster's.
        timeout_s: for the connection, and for the proof.
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
            pass  # another machine, another network namespace, or a server that is just being restarted
        sock.close()
    try:
        sock = socket.create_connection(split_address(address), timeout_s)
    except (OSError, ValueError) as error:
        raise BrokenWireError(f"nobody answers at {address}: {error}") from None
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
    """Have the client of an accepted connection prove the secret, and prove it to the client.

    Args:
        sock: accepted; it is closed on failure.
        trust: the cluster's.
        timeout_s: for all of it.
    Raises:
        BrokenWireError: it has not proved the secret.
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
    """Whether messages over a connection are not encrypted: both of its ends find the same."""
    if sock.family == socket.AF_UNIX or trust.insecure:
        return True
    return is_loopback_host(sock.getpeername()[0])
