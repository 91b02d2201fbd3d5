"""JAX's coordinator for a job: one on rank 0, which the JAX processes of each rank reach through a door on loopback.

JAX's clients speak plain text and carry no secret, so no port of the coordinator is open on the network. It listens at
a Unix socket in the folder of rank 0's session. Every rank has a `Door`: a port on loopback that takes connections of
this user's processes only. Rank 0's door leads to the Unix socket, that of another rank to rank 0's meeting, by TLS
with the certificates of the job.

JAX ends a process whose connection to the coordinator breaks. A door lives as long as its rank's node, so no process
ends earlier by it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from fastrt.errors import FastrtError

_CHUNK = 1 << 16
_CONNECTIONS_MAX = 256  # of one door
_TCP_FIELDS = 8
_AGAIN_S = 0.1
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Door:
    """A port on loopback that forwards the connections of this user's processes.

    Args:
        size, rank: of the job and of this process.
        target: connects to the coordinator, once there is one; a thread of each connection calls it. It may raise
            OSError or FastrtError: then the connection ends, and JAX's client tries again.

    Attributes:
        port: where it listens.
    """

    def __init__(self, size: int, rank: int, target: Callable[[], socket.socket]) -> None:
        self._size, self._rank, self._target = size, rank, target
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="fastrt-jax", daemon=True)
        self._thread.start()

    def variables(self) -> dict[str, str]:
        """Return JAX's variables of this rank.

        JAX's process 0 always starts a service of its own; JAX_COORDINATOR_BIND_ADDRESS gives it an unused port.
        """
        return {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
            "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0",
            "JAX_NUM_PROCESSES": str(self._size),
            "JAX_PROCESS_ID": str(self._rank),
        }

    def close(self) -> None:
        """End the door and its connections."""
        with self._lock:
            self._closing = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(_AGAIN_S)  # no descriptor is free
                continue
            with self._lock:
                is_taken = not self._closing and len(self._open) < _CONNECTIONS_MAX and _is_own(address, self.port)
                if is_taken:
                    self._open.add(sock)
            if is_taken:
                threading.Thread(target=self._serve, args=[sock], name="fastrt-jax", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, FastrtError), self._target() as other:
                forward(sock, other)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()


def forward(one: socket.socket, other: socket.socket) -> None:
    """Forward bytes both ways until one side ends its connection. Of each direction it holds 64 KiB at most.

    Args:
        one, other: TCP, Unix or TLS sockets, which become non-blocking. The caller closes them.
    Raises:
        OSError: a connection broke.
    """
    ways = ((one, other), (other, one))
    held = {one: memoryview(b""), other: memoryview(b"")}  # bytes to be sent to it
    poll = select.poll()
    for sock in held:
        sock.setblocking(False)
    while True:
        has_moved = False
        for source, target in ways:
            with contextlib.suppress(*_BLOCKED):
                if not held[target]:
                    data = source.recv(_CHUNK)
                    if not data:
                        return
                    held[target] = memoryview(data)
                held[target] = held[target][target.send(held[target]) :]
                has_moved = True
        if not has_moved:
            for source, target in ways:
                poll.register(source, (0 if held[target] else select.POLLIN) | (select.POLLOUT if held[source] else 0))
            poll.poll()


def _is_own(peer: tuple[str, int], port: int) -> bool:
    """Whether a process of this user holds the other end of a connection over loopback; root may hold it, too.

    gRPC connects by IPv6 sockets to mapped IPv4 addresses.

    Source: `Documentation/networking/proc_net_tcp.rst` of the kernel: local and remote address, and the user's id.
    """
    for name, host in (("tcp6", "0000000000000000FFFF00000100007F"), ("tcp", "0100007F")):
        ends = [f"{host}:{number:04X}" for number in (peer[1], port)]
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/net/{name}", encoding="ascii") as file:
            for line in file:
                fields = line.split()
                if len(fields) >= _TCP_FIELDS and fields[1:3] == ends:
                    return int(fields[7]) in (os.geteuid(), 0)
    return False
