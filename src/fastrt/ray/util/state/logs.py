"""`get_log` and `list_logs` of `ray.util.state`: the kept output of workers and actors.

A node keeps one log of all its processes. Here it has the form that Ray's has: two files for each process,
`worker-PID.out` and `worker-PID.err`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastrt.errors import ArgumentError, FastrtError
from fastrt.ids import OWN_DIGITS, OWN_NODE_DIGITS
from fastrt.node.log_files import LogLine
from fastrt.ray.util.addresses import get_node_ip_address
from fastrt.runtime import node_logs
from fastrt.runtime.nodes import nodes
from fastrt.runtime.state_api import rows_of
from fastrt.store import client as store_client

_TIMEOUT_S = 30
_SUFFIXES = {"out": False, "err": True}
_FILE = re.compile(r"worker-(\d+)\.(out|err)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def list_logs(
    address: str | None = None, node_id: str | None = None, node_ip: str | None = None, glob_filter: str | None = None,
    timeout: int = _TIMEOUT_S,
) -> dict[str, list[str]]:  # fmt: skip
    """Return the names of a node's logs, by group: "worker_out" and "worker_err".

    Args:
        address, timeout: taken for Ray's sake.
        node_id, node_ip: the node; one of them is given.
        glob_filter: only names that match this pattern.
    Raises:
        ValueError: no node is given, or there is none with that id or address.
        NodeSilentError: the node did not answer.
    Source:
        The semantics of `ray.util.state.list_logs`.
    """
    found: dict[str, set[str]] = {}
    for line in _lines(_node(node_id, node_ip), {}, False):
        suffix = "err" if line.is_error else "out"
        name = f"worker-{line.pid}.{suffix}"
        if line.pid and fnmatch.fnmatchcase(name, glob_filter or "*"):
            found.setdefault(f"worker_{suffix}", set()).add(name)
    return {group: sorted(names) for group, names in sorted(found.items())}


def get_log(
    address: str | None = None, node_id: str | None = None, node_ip: str | None = None, filename: str | None = None,
    actor_id: str | None = None, task_id: str | None = None, pid: int | None = None, follow: bool = False,
    tail: int = -1, timeout: int = _TIMEOUT_S, suffix: str = "out", encoding: str | None = "utf-8",
    errors: str | None = "strict", submission_id: str | None = None, attempt_number: int = 0,
    _interval: float | None = None, filter_ansi_code: bool = False,
) -> Iterator[Any]:  # fmt: skip
    r"""Iterate over the lines of a process, an actor or a task; each ends with "\n".

    Args:
        address, errors, attempt_number, _interval: taken for Ray's sake.
        node_id, node_ip: the node; default: that of the actor or task, else this one.
        filename: one of `list_logs`.
        actor_id: of an actor that `list_actors` has.
        task_id: of a task or call that has not ended, or `task_id` of `fastrt.runtime_context()`.
        pid: of a process.
        timeout: seconds that the other nodes have to answer.
        follow: whether to wait for further lines, until the node has ended.
        tail: only the last lines, so many; -1: all.
        suffix: "out" or "err": stdout or stderr; `filename` says it, too.
        encoding: None: the lines come as bytes.
        submission_id: taken for Ray's sake: there is no job server.
        filter_ansi_code: whether to leave out the escape codes of terminals.
    Raises:
        ValueError: nothing, or something unknown is named.
        NodeSilentError: the node did not answer.
    Source:
        The semantics of `ray.util.state.get_log`.
    """
    if filename is not None:
        parts = _FILE.fullmatch(filename)
        if parts is None:
            raise ArgumentError(f"filename is {filename!r}; it must be a name that list_logs returns")
        pid, suffix = int(parts[1]), parts[2]
    if suffix not in _SUFFIXES:
        raise ArgumentError(f"suffix is {suffix!r}; it must be 'out' or 'err'")
    wanted: dict[str, Any] = {}
    if actor_id is not None:
        row = next((one for one in _rows("actors", timeout) if one["actor_id"] == actor_id[:OWN_DIGITS]), None)
        if row is None:
            raise ArgumentError(f"list_actors has no actor with the id {actor_id!r}")
        wanted, node_id = {"actor": str(row["actor"])}, node_id or _id_of(row.get("node"))
    elif task_id is not None:
        own = task_id[:OWN_DIGITS]
        row = next((one for one in _rows("tasks", timeout) if own in (one["task_id"], *(one["results"] or ()))), {})
        wanted, node_id = {"task": row.get("task_id", str(own))}, node_id or _id_of(row.get("node"))
    elif pid is not None:
        wanted = {"worker": pid}
    else:
        raise ArgumentError("get_log needs a filename, actor_id, task_id or pid")
    lines = _lines(_node(node_id or _id_of(None), node_ip), wanted, follow)
    texts: Iterator[str] = (line.text for line in lines if line.is_error == _SUFFIXES[suffix])
    if tail >= 0 and not follow:
        listed = list(texts)
        texts = iter(listed[len(listed) - min(tail, len(listed)) :])
    plain = (_ANSI.sub("", text) if filter_ansi_code else text for text in texts)
    return (f"{text}\n" if encoding is not None else f"{text}\n".encode() for text in plain)


def _rows(what: str, timeout: float) -> list[dict[str, Any]]:
    return rows_of(what, limit=0, all_nodes=True, timeout=timeout)


def _id_of(name: str | None) -> str:
    """Return the id of the node with that name; None: of this node."""
    return str(next(one["NodeID"] for one in nodes() if (one["IsHere"] if name is None else one["NodeName"] == name)))


def _node(node_id: str | None, node_ip: str | None) -> str:
    """Return the id of the node that is named by its id or address.

    Raises:
        ArgumentError: none is named, or there is none.
    """
    if node_id is None and node_ip is None:
        raise ArgumentError("give node_id or node_ip")
    if node_id is None and node_ip == get_node_ip_address():
        return _id_of(None)
    own = node_id and node_id[:OWN_NODE_DIGITS]
    found = [one["NodeID"] for one in nodes() if one["NodeID"] == own or f"node:{node_ip}" in one["Resources"]]
    if not found:
        raise ArgumentError(f"no node has the id or address {node_id or node_ip!r}")
    return str(found[0])


def _lines(node: str, wanted: Mapping[str, Any], follow: bool) -> Iterator[LogLine]:
    def on_silent(name: str, exc: FastrtError) -> None:
        raise exc

    logs = node_logs.logs_at(store_client.require().socket_path, node, wanted) or []
    for batch in node_logs.read(logs, on_silent, follow=follow):
        yield from (line for _, line in batch)
