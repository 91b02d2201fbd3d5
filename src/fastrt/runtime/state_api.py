"""`list_tasks`, `list_actors`, `list_objects`, `list_workers`: tables of this node, and of all nodes of its cluster.

This node's tables are read in shared memory. Another node's are read by a task that demands no resources and runs on
that node: its answer needs a worker that becomes free in time, and a node without workers does not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fastrt.errors import AttachError, FastrtError
from fastrt.observe import reading
from fastrt.observe.listing import Row
from fastrt.observe.reading import Rows
from fastrt.runtime.nodes import nodes_at
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks.cancel import cancel
from fastrt.tasks.remote import RemoteFunction

_ANSWER_S = 5.0


def list_tasks(*, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, **filters: Any) -> Rows:
    """Tasks and calls of actors that have not ended.

    Args:
        limit: the greatest number of rows, of all nodes together; 0: all.
        all_nodes: whether to ask the other nodes of the cluster, too.
        timeout: seconds that the other nodes have to answer.
        **filters: a column's name and what its value must be; text may have the wildcards * and ?.
    Returns:
        A list whose attribute `total` is the number of all that match (None if they were not counted), of a dict for
        each: task_id, name, state ("waiting", "ready", "claimed", "running", "blocked" or "ending"), pid,
        actor, attempt, max_retries, waits_for, results, cancelled, priority, and node where there are several.
    Raises:
        ValueError: a filter names no column.
    Source:
        The semantics of `ray.util.state.list_tasks`, for tasks that have not ended.
    """
    return rows_of("tasks", limit=limit, all_nodes=all_nodes, timeout=timeout, **filters)


def list_actors(*, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, **filters: Any) -> Rows:
    """Actors, including dead ones that still have a handle; arguments as for `list_tasks`.

    Returns:
        A dict for each: actor, class, name, namespace, state ("starting", "alive", "restarting" or "dead"), pid,
        restarts, max_restarts, detached, calls (that have not ended), reason (why it is dead), actor_id, and node where
        there are several.
    Raises:
        ValueError: a filter names no column.
    """
    return rows_of("actors", limit=limit, all_nodes=all_nodes, timeout=timeout, **filters)


def list_objects(*, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, **filters: Any) -> Rows:
    """Objects; arguments as for `list_tasks`.

    Returns:
        A dict for each: object_id, state ("pending", "sealed", "spilled", ...), bytes, type, what, refs and pins
        (pids), counted, error, site, stored, and node where there are several.
    Raises:
        ValueError: a filter names no column.
    """
    return rows_of("objects", limit=limit, all_nodes=all_nodes, timeout=timeout, **filters)


def list_workers(*, limit: int = 100, all_nodes: bool = True, timeout: float = _ANSWER_S, **filters: Any) -> Rows:
    """The processes of the session: workers, actors, drivers, the daemon; arguments as for `list_tasks`.

    Returns:
        A dict for each: pid, kind, name, state ("idle", "running" or "waiting"), running, tasks_done, bytes_held,
        cpu_s, rss, and node where there are several.
    Raises:
        ValueError: a filter names no column.
    """
    return rows_of("workers", limit=limit, all_nodes=all_nodes, timeout=timeout, **filters)


def rows_of(what: str, *, limit: int, all_nodes: bool, timeout: float, **filters: Any) -> Rows:
    """Rows of "tasks", "actors", "objects" or "workers" that match the filters.

    Raises:
        ValueError: a filter names no column.
    """
    reading.check_columns(what, filters)
    store = store_client.require()
    others = _others(store) if all_nodes else {}
    if not others:
        return reading.rows(store, what, filters, limit)
    asked = {name: _ask(what, filters, limit, node) for node, name in others.items()}
    here = next(node["NodeName"] for node in nodes_at(store.socket_path) if node["IsHere"])
    parts = {here: reading.rows(store, what, filters, limit)}
    counted = True
    for name, ref in asked.items():
        try:
            parts[name] = store.get(ref, timeout)
        except FastrtError as exc:
            sys.stderr.write(f"fastrt: the rows of node {name} are missing: {type(exc).__name__}: {exc}\n")
            cancel(ref)
            counted = False
    rows = [{**row, "node": name} for name, part in parts.items() for row in part]
    totals = [part.total for part in parts.values() if part.total is not None]
    total = sum(totals) if counted and len(totals) == len(parts) else None
    return Rows(rows[:limit] if limit else rows, total)


def select(rows: list[Row], filters: Mapping[str, Any], limit: int) -> list[Row]:
    """The rows that match the filters, at most `limit`; 0: all."""
    found = [row for row in rows if all(reading.fits(row[name], wanted) for name, wanted in filters.items())]
    return found[:limit] if limit else found


def _others(store: Store) -> dict[str, str]:
    """The other nodes of the cluster that have workers: name by id."""
    try:
        found = nodes_at(store.socket_path)
    except AttachError:
        return {}
    return {node["NodeID"]: node["NodeName"] for node in found if not node["IsHere"] and node["Resources"].get("CPU")}


def _ask(what: str, filters: dict[str, Any], limit: int, node: str) -> ObjectRef:
    ref: ObjectRef = RemoteFunction(_look, num_cpus=0, scheduling=node, max_retries=0, name=f"list {what}").remote(
        what, filters, limit
    )
    return ref


def _look(what: str, filters: dict[str, Any], limit: int) -> Rows:
    """Read the rows in a worker of another node."""
    return reading.rows(store_client.require(), what, filters, limit)
