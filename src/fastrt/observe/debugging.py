"""Tasks that wait in a debugger, for `fastrt debug`: which they are, and the connection to one of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fastrt.errors import FastrtError
from fastrt.folders import has_private_folder
from fastrt.store import debugging
from fastrt.store.debugging import Stop
from fastrt.store.join import Link


class DebugError(FastrtError):
    """A task cannot be debugged; the text says why."""


def waiting(socket_path: Path) -> list[Stop]:
    """List the tasks of a session on this node that wait in a debugger, those first that wait longest.

    Args:
        socket_path: of the session's daemon.
    """
    return debugging.waiting(debugging.folder_of(str(socket_path)))


def attach(socket_path: Path, pid: int) -> Link:
    """Connect to the debugger of a process.

    Args:
        socket_path: of the session's daemon.
        pid: the process.
    Raises:
        DebugError: none waits there, or another user could have made its socket.
        UnsafeFolderError: another user could change the folder of debuggers.
    """
    folder = debugging.folder_of(str(socket_path))
    has_private_folder(folder, "the folder of debuggers")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(folder / str(pid)))
    except OSError as exc:
        sock.close()
        raise DebugError(f"no task of process {pid} waits in a debugger: {exc}") from None
    link = Link(sock)
    if link.peer()[1] != os.geteuid():
        link.close()
        raise DebugError(f"the debugger of process {pid} belongs to another user")
    return link
