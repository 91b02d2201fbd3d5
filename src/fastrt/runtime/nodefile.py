"""The note that a cluster's node leaves in its session's folder, by which drivers and `fastrt stop` find it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from fastrt._core.segment import start_time
from fastrt.errors import AttachError
from fastrt.foreign_text import read_object

_NAME = "cluster.json"


@dataclasses.dataclass(frozen=True)
class NodeFile:
    """What the note says.

    Attributes:
        head: the address of the cluster's head.
        name: the node's, for people.
        is_head: whether the head runs here.
        address: where other nodes reach this one.
        socket_path: where processes of this machine join.
        num_workers: of this node.
        token_file: the cluster's token, for this user's processes.
        pid, start_time: of the process that `fastrt start` is.
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

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote it still runs."""
        try:
            return start_time(self.pid) == self.start_time
        except OSError:
            return False

    def write(self) -> None:
        """Put it into the session's folder, whole or not at all."""
        path = Path(self.socket_path).with_name(_NAME)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(dataclasses.asdict(self)))
        os.replace(new, path)


def nodes_here(runtime_dir: Path) -> list[NodeFile]:
    """This user's nodes on this machine that run."""
    found = []
    for path in sorted(runtime_dir.glob(f"*/{_NAME}")):
        try:
            node = NodeFile(**read_object(path.read_bytes(), str(path), own=True))
        except (OSError, ValueError, TypeError):  # it is being removed, or another version's
            continue
        if node.is_alive:
            found.append(node)
    return found


def find_node(runtime_dir: Path, address: str) -> NodeFile:
    """The node on this machine of the cluster whose head is at `address`; "auto": the only cluster there is.

    Raises:
        AttachError: there is none, or more than one cluster for "auto".
    """
    nodes = nodes_here(runtime_dir)
    fitting = [node for node in nodes if address in ("auto", node.head)]
    heads = sorted({node.head for node in fitting})
    if not fitting:
        known = f"; the clusters here have their heads at {', '.join(sorted({n.head for n in nodes}))}" if nodes else ""
        start = "fastrt start --head" if address == "auto" else f"fastrt start --address {address}"
        raise AttachError(f"no node of {address!r} runs on this machine{known}. Run `{start}` here first")
    if len(heads) > 1:
        raise AttachError(
            f"nodes of several clusters run here, with heads at {', '.join(heads)}: say which by address="
        )
    return min(fitting, key=lambda node: not node.is_head)
