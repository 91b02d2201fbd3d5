"""Messages between parameter servers and those that use them: a head, JSON that says what it is, and bytes.

On one machine they go over a Unix socket, which can also carry descriptors of shared memory, elsewhere over TCP. Every
size that a peer names is checked before anything is allocated. A connection on which a message was broken off is of no
more use, and closed.
"""

from __future__ import annotations

import array
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastrt._core import stream

VERSION = 1
META_BYTES_MAX = 16 << 20
GREETING_BYTES_MAX = 64 << 10  # whoever sends it has not shown the token
DATA_BYTES_MAX = 1 << 36
FDS_MAX = 4
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"frps"
_IO_S = 30.0  # how long the other end may take or give no byte inside a message
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))  # 30 s
Meta = dict[str, Any]


class BrokenWireError(ConnectionError):
    """The other end is gone, or sent what is no message; the connection is closed."""


class Wire:
    """One connection; it belongs to this object. One thread at a time for each direction.

    Args:
        sock: connected.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
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
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except (ValueError, OSError):  # it is closed
            return False
        return not poll.poll(0)

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
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if not poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            first, rights, _, _ = self._sock.recvmsg(
                _HEAD.size, socket.CMSG_SPACE(4 * FDS_MAX), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(data[: len(data) - len(data) % 4])
            if not first:
                raise EOFError("the other end closed it")
            magic, meta_bytes, data_bytes = _HEAD.unpack(self._rest(first, _HEAD.size, deadline))
            if magic != _MAGIC or meta_bytes > meta_bytes_max or data_bytes > DATA_BYTES_MAX:
                raise ValueError("this is no message of fastrt's parameter servers")
            meta = json.loads(self._rest(b"", meta_bytes, deadline))
            if not isinstance(meta, dict):
                raise ValueError("this is no message of fastrt's parameter servers")
            return meta, data_bytes, list(fds)
        except TimeoutError:
            for fd in fds:
                os.close(fd)
            raise
        except (OSError, EOFError, ValueError, RecursionError) as error:
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
                stream.receive_parts(self._sock.fileno(), [view], view.nbytes, _IO_S)
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
            have += stream.receive_parts(self._sock.fileno(), [memoryview(whole)[have:]], least, left)
        return whole

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


def same_token(given: Any, expected: str) -> bool:
    """Whether a token is the right one, in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def dial(unix: str | None, address: str, timeout_s: float) -> Wire:
    """Connect over the Unix socket if that is on this machine, else over TCP.

    Args:
        unix: the socket's abstract name, without its leading zero.
        address: `host:port`.
        timeout_s: for the connection.
    Raises:
        BrokenWireError: nobody listens there.
    """
    if unix is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + unix)
            if is_mine(sock):
                return Wire(sock)
        except OSError:
            pass  # another machine, another network namespace, or a server that is just being restarted
        sock.close()
    host, _, port = address.rpartition(":")
    try:
        return Wire(socket.create_connection((host.strip("[]"), int(port)), timeout_s))
    except (OSError, ValueError) as error:
        raise BrokenWireError(f"nobody answers at {address}: {error}") from None
