"""Passes bytes between a client of debugpy and the debugger in a worker; a program of its own, without fastrt.

debugpy has no authentication on its port. So the client connects to a listener of fastrt, which lets in this user
only: the kernel knows whose the other end of a loopback connection is. It also wants the first words of the Debug
Adapter Protocol, because a page in this user's browser can send a request of HTTP to any port, which the debugger
would read.

A stop of debugpy holds all threads of its process, so this is a process. It ends when either end closes.

    python dap_relay.py CLIENT LISTENER: the descriptors of the connected client, and of the listener for the debugger.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

_ESTABLISHED = "01"  # a closed connection is listed as root's
_BEGINS = b"content-length:"  # each message of the protocol; a request of HTTP begins with its method
_BEGIN_S = 10.0  # for the client's first message, and for the debugger to connect
_SEND_S = 60.0  # a client that does not read for so long is left
_PART_BYTES = 1 << 16


def owner_of(sock: socket.socket) -> int | None:
    """The user whose process is at the other end of a TCP connection over 127.0.0.1; None: it is closed."""
    ends = sock.getpeername(), sock.getsockname()
    there, here = (f"{bytes(reversed(socket.inet_aton(host))).hex().upper()}:{port:04X}" for host, port in ends)
    if sys.byteorder == "big":
        there, here = (f"{socket.inet_aton(host).hex().upper()}:{port:04X}" for host, port in ends)
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[1:4] == [there, here, _ESTABLISHED]:
                return int(fields[7])
    return None


def is_protocol(sock: socket.socket) -> bool:
    """Whether a client begins as the protocol does; its bytes stay to be read."""
    sock.settimeout(_BEGIN_S)
    begin = b""
    try:
        while len(begin) < len(_BEGINS) and _BEGINS.startswith(begin.lower()):
            more = sock.recv(len(_BEGINS), socket.MSG_PEEK | socket.MSG_WAITALL)
            if more == begin:  # it has closed the connection
                return False
            begin = more
    except OSError:
        return False
    return begin.lower() == _BEGINS


def _relay(client: socket.socket, debugger: socket.socket) -> None:
    ends = {client: debugger, debugger: client}
    for sock in ends:
        sock.settimeout(_SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        for sock in select.select(list(ends), [], [])[0]:
            data = sock.recv(_PART_BYTES)
            if not data:
                return
            ends[sock].sendall(data)


def main(client_fd: int, listener_fd: int) -> None:
    """Let the debugger connect, and pass bytes on until one end closes, or the worker has sent SIGTERM."""
    client, listener = socket.socket(fileno=client_fd), socket.socket(fileno=listener_fd)
    listener.settimeout(_BEGIN_S)
    debugger, _ = listener.accept()
    listener.close()
    if owner_of(debugger) != os.geteuid():
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        _relay(client, debugger)
    except _EndError:
        debugger.setblocking(False)
        while data := debugger.recv(_PART_BYTES):
            client.sendall(data)


class _EndError(Exception):
    """The worker has said that nothing more will come."""


def _end(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _EndError


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except OSError:
        pass  # an end is gone
