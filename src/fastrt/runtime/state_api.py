"""`list_tasks`, `list_actors`, `list_objects`, `list_workers`: tables of this node, and of all nodes of its cluster.

This node's tables are read in shared memory. Another node's are read by its uplink, so it answers also while all its
workers are busy. A node that does not answer in time is named on standard error, and the rows of the others are there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrt.cluster.questions import SOCKET
from fastrt.errors import AttachError
from fastrt.observe import elsewhere, reading
from fastrt.observe.elsewhere import NodeRows
from fastrt.observe.reading import Rows
from fastrt.runtime.nodes import nodes_at
from fastrt.store import client as store_client
from fastrt.store.client import Store

_ANSWER_S = elsewhere.ANSWER_S


def list_tasks(
    *, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, node: str = "", **filters: Any
) -> Rows:  # fmt: skip
    """Tasks and calls of actors that have not ended; with state="failed" the failures that the session keeps.

    Args:
        limit: the greatest number of rows, of all nodes together; 0: all.
        all_nodes: whether to ask the other nodes of the cluster, too.
        timeout: seconds that another node has to answer; one that does not is named on standard error.
        node: only rows of the node with this name, or whose NodeID begins with this.
        **filters: a column's name and what its value must be; text may have the wildcards * and ?.
    Returns:
        A list whose attribute `total` is the number of all that match (None if they were not counted), of a dict for
        each: task_id, name, state ("waiting", "ready", "claimed", "running", "blocked" or "ending"), pid,
        actor, attempt, max_retries, waits_for, results, cancelled, priority, and node where there are several.
    Raises:
        ValueError: a filter names no column, or there is no such node.
    Source:
        The semantics of `ray.util.state.list_tasks`, for tasks that have not ended.
    """
    return rows_of("tasks", limit=limit, all_nodes=all_nodes, timeout=timeout, node=node, **filters)


def list_actors(
    *, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, node: str = "", **filters: Any
) -> Rows:  # fmt: skip
    """Actors, including dead ones that still have a handle; arguments as for `list_tasks`.

    Returns:
        A dict for each: actor, class, name, namespace, state ("starting", "alive", "restarting" or "dead"), pid,
        restarts, max_restarts, detached, calls (that have not ended), reason (why it is dead), actor_id, and node where
        there are several.
    Raises:
        ValueError: a filter names no column, or there is no such node.
    """
    return rows_of("actors", limit=limit, all_nodes=all_nodes, timeout=timeout, node=node, **filters)


def list_objects(
    *, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, node: str = "", **filters: Any
) -> Rows:  # fmt: skip
    """Objects; arguments as for `list_tasks`.

    Returns:
        A dict for each: object_id, state ("pending", "sealed", "spilled", ...), bytes, type, what, refs and pins
        (pids), counted, error, site, stored, and node where there are several.
    Raises:
        ValueError: a filter names no column, or there is no such node.
    """
    return rows_of("objects", limit=limit, all_nodes=all_nodes, timeout=timeout, node=node, **filters)


def list_workers(
    *, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, node: str = "", **filters: Any
) -> Rows:  # fmt: skip
    """The processes of the session: workers, actors, drivers, the daemon; arguments as for `list_tasks`.

    Returns:
        A dict for each: pid, kind, name, state ("idle", "running" or "waiting"), running, tasks_done, bytes_held,
        cpu_s, rss, and node where there are several.
    Raises:
        ValueError: a filter names no column, or there is no such node.
    """
    return rows_of("workers", limit=limit, all_nodes=all_nodes, timeout=timeout, node=node, **filters)


def rows_of(what: str, /, *, limit: int, all_nodes: bool, timeout: float, node: str = "", **filters: Any) -> Rows:
    """Rows of "tasks", "actors", "objects" or "workers" that match the filters.

    Raises:
        ValueError: a filter names no column, or there is no such node.
    """
    reading.check_columns(what, filters)
    store = store_client.require()
    found = rows_by_node(store, what, filters, limit, timeout, node=node, all_nodes=all_nodes)
    for one in found:
        if one.error:
            sys.stderr.write(f"fastrt: rows of node {one.name} are missing: {one.error}\n")
    return together(found, limit)


def rows_by_node(
    store: Store, what: str, filters: Mapping[str, Any], limit: int, timeout: float, *, node: str = "",
    all_nodes: bool = True,
) -> list[NodeRows]:  # fmt: skip
    """Rows of this node and of the other nodes of its cluster, this node first.

    Args:
        store: any process's attachment.
        what, filters: as for `reading.page`.
        limit: the greatest number of rows of each node; 0: all.
        timeout: seconds that another node has for each page.
        node: only the node with this name, or whose NodeID begins with this; empty: all.
        all_nodes: whether to ask the other nodes.
    Returns:
        A group for each node; the only group of a session without a cluster has no name.
    Raises:
        ValueError: a filter names no column, or there is no such node.
    """
    nodes = _nodes(store) if all_nodes or node else []
    wanted = [one for one in nodes if not node or _is_named(one, node)]
    if node and not wanted:
        there = ", ".join(one["NodeName"] for one in nodes) or "this session is no node of a cluster"
        raise ValueError(f"there is no node {node!r}; there are: {there}")
    found = []
    if not nodes or any(one["IsHere"] for one in wanted):
        rows = reading.rows(store, what, filters, limit)
        here = wanted[0] if wanted else {"NodeID": store.client.segment.session, "NodeName": ""}
        found = [NodeRows(here["NodeID"], here["NodeName"], rows, rows.total)]
    others = {one["NodeID"]: one["NodeName"] for one in wanted if not one["IsHere"]}
    return found + elsewhere.read(store.socket_path, others, what, filters, limit, timeout) if others else found


def together(found: Sequence[NodeRows], limit: int) -> Rows:
    """The rows of all nodes, at most `limit` (0: all), each with its node's name where there are several nodes."""
    rows = [{**row, "node": one.name} if one.name else row for one in found for row in one.rows]
    totals = [one.total for one in found if one.total is not None and not one.error]
    return Rows(rows[:limit] if limit else rows, sum(totals) if len(totals) == len(found) else None)


def _nodes(store: Store) -> list[dict[str, Any]]:
    """The nodes of the cluster, this one first; none if the session is no node of a cluster with others."""
    try:
        found = nodes_at(store.socket_path)
    except AttachError:
        return []
    return found if len(found) > 1 or Path(store.socket_path).with_name(SOCKET).exists() else []


def _is_named(node: Mapping[str, Any], wanted: str) -> bool:
    return bool(node["NodeName"] == wanted or node["NodeID"].startswith(wanted))
