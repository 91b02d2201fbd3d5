"""The file in a session's folder by which drivers and `fastrt stop` find a node of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from pathlib import Path

from fastrt._core.memory.segment import start_time
from fastrt.config import RUNTIME_FOLDER
from fastrt.errors import AttachError, FastrtError
from fastrt.folders import has_private_folder, read_private, replace_private
from fastrt.foreign_text import read_object
from fastrt.net.address import is_same
from fastrt.store.join import answers

_NAME = "cluster.json"


@dataclasses.dataclass(frozen=True)
class NodeFile:
    """The contents of a node's file.

    Attributes:
        head: the address of the cluster's head.
        name: the node's name, for people.
        is_head: whether the head runs here.
        address: where other nodes reach this one.
        socket_path: where processes of this machine join.
        num_workers: of this node.
        token_file: the cluster's token, for this user's processes.
        pid, start_time: of the process of `fastrt start`.
        grace_s: seconds that it takes at most until it leaves after SIGTERM.
    """

    head: str
    name: str
    is_head: bool
    address: str
    socket_path: str
    num_workers: int
    token_file: str
    pid: int
    start_time: int
    grace_s: float = 0.0

    @property
    def session(self) -> str:
        """The name of the node's session."""
        return Path(self.socket_path).parent.name

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote the file still runs."""
        try:
            return start_time(self.pid) == self.start_time
        except OSError:
            return False

    def write(self) -> None:
        """Write the file into the session's folder, whole or not at all."""
        replace_private(Path(self.socket_path).parent, _NAME, json.dumps(dataclasses.asdict(self)).encode())

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the process that wrote the file, and to no other that has its pid by now."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.is_alive:
                signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)


def nodes_here(runtime_dir: Path) -> list[NodeFile]:
    """List this user's running nodes on this machine.

    Raises:
        UnsafeFolderError: another user could have written the files in the folder.
    """
    found: list[NodeFile] = []
    if not has_private_folder(runtime_dir, RUNTIME_FOLDER):
        return found
    for path in sorted(runtime_dir.glob(f"*/{_NAME}")):
        try:
            node = NodeFile(**read_object(read_private(path.parent, path.name), str(path), own=True))
        except (OSError, ValueError, TypeError, FastrtError):  # it is being removed, or was written by another version
            continue
        if node.is_alive:
            found.append(node)
    return found


def latest_node(runtime_dir: Path) -> tuple[NodeFile | None, bool]:
    """Return this user's node on this machine that started last, and whether nodes of other clusters run, too.

    Raises:
        UnsafeFolderError: another user could have written the files in the folder.
    """
    nodes = nodes_here(runtime_dir)
    return max(nodes, key=lambda node: node.start_time, default=None), len({node.head for node in nodes}) > 1


def latest_session(runtime_dir: Path) -> str | None:
    """Return the socket of this user's session on this machine that started last; None: none runs.

    Raises:
        UnsafeFolderError: another user could have made the sockets in the folder.
    """
    if not has_private_folder(runtime_dir, RUNTIME_FOLDER):
        return None
    found: list[tuple[int, str]] = []
    for path in runtime_dir.glob("*/node.sock"):
        with contextlib.suppress(FileNotFoundError):  # it ends at the moment
            found.append((path.stat().st_mtime_ns, str(path)))
    return next((path for _, path in sorted(found, reverse=True) if answers(path)), None)


def find_node(runtime_dir: Path, address: str) -> NodeFile:
    """The node on this machine of the cluster whose head is at `address`; "auto": of the only cluster.

    Raises:
        AttachError: no node fits, or "auto" and several clusters run here.
    """
    nodes = nodes_here(runtime_dir)
    fitting = [node for node in nodes if address == "auto" or is_same(address, node.head)]
    heads = sorted({node.head for node in fitting})
    if not fitting:
        known = f"; the clusters here have their heads at {', '.join(sorted({n.head for n in nodes}))}" if nodes else ""
        start = "fastrt start --head" if address == "auto" else f"fastrt start --address {address}"
        raise AttachError(
            f"no node of {address!r} runs on this machine{known} (looked in {runtime_dir}). Run `{start}` here first"
        )
    if len(heads) > 1:
        raise AttachError(
            f"nodes of several clusters run here, with heads at {', '.join(heads)}: say which by address="
        )
    return min(fitting, key=lambda node: not node.is_head)
