"""Processes, memory and stacks of other nodes: their uplinks are asked in threads while a page is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastrt.cluster.questions import SOCKET
from fastrt.dashboard import sections
from fastrt.dashboard.sections import Section
from fastrt.dashboard.services import Polled
from fastrt.dashboard.watched import Watched
from fastrt.errors import AttachError
from fastrt.observe import elsewhere
from fastrt.observe.elsewhere import NodeSilentError
from fastrt.observe.listing import Row
from fastrt.observe.memory import Summary
from fastrt.runtime.nodes import nodes_at
from fastrt.store.client import Store

_KEPT = 16  # tables that are asked for
_ROWS = 200


def nodes(store: Store) -> dict[str, str]:
    """The names of the other nodes of the cluster by their NodeID; none if the session is no node of a cluster."""
    if not Path(store.socket_path).with_name(SOCKET).exists():
        return {}
    try:
        return {one["NodeID"]: one["NodeName"] for one in nodes_at(store.socket_path) if not one["IsHere"]}
    except AttachError:
        return {}


def links(store: Store, view: str) -> list[Section]:
    """Links to the same page of the other nodes; no section if there are none."""
    found = [sections.link(f"node {name}", view, node=node) for node, name in nodes(store).items()]
    return [sections.links("nodes", found)] if found else []


def workers(session: Watched, store: Store, node: str) -> tuple[list[Row] | None, list[Section]]:
    """The rows of the processes of another node, or None and sections that say why there are none yet."""

    def read() -> list[Row]:
        (found,) = elsewhere.read(store.socket_path, {node: node}, "workers", {}, _ROWS, elsewhere.ANSWER_S)
        if found.error:
            raise NodeSilentError(found.error)
        return found.rows

    return _answer(session, ("workers", node), read)


def memory(session: Watched, store: Store, node: str) -> tuple[Summary | None, list[Section]]:
    """The memory of another node, or None and sections that say why it is not there yet."""
    return _answer(session, ("memory", node), lambda: elsewhere.read_memory(store.socket_path, node))


def name_of(store: Store, args: Mapping[str, str]) -> str:
    """The name of the node that the arguments of a page choose; "" for this node.

    Raises:
        ValueError: the cluster has no such node.
    """
    node = args.get("node", "")
    if not node:
        return ""
    there = nodes(store)
    if node not in there:
        raise ValueError("the cluster has no such node")
    return there[node]


def _answer(session: Watched, key: tuple[str, str], read: Callable[[], Any]) -> tuple[Any, list[Section]]:
    polled = session.asked.pop(key, None) or Polled(read)
    session.asked[key] = polled
    for old in list(session.asked)[:-_KEPT]:
        del session.asked[old]
    polled.look()
    if polled.why:
        return None, [sections.text("silent", f"The node does not answer: {polled.why}", "warn")]
    if polled.value is None:
        return None, [sections.text("asked", "The node is being asked.")]
    return polled.value, []
