"""`list_tasks`, `list_actors`, `list_objects`, `list_workers`: tables of this node, and of all nodes of its cluster.

This node's tables are read in shared memory. Another node's are read by its uplink, so it answers also while all its
workers are busy. A node that does not answer in time is named on standard error, and the rows of the others are there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastrt._core.tasks import actors
from fastrt.cluster.questions import SOCKET
from fastrt.errors import AttachError
from fastrt.observe import elsewhere, reading
from fastrt.observe.elsewhere import NodeRows
from fastrt.observe.listing import ACTOR_STATES, Row
from fastrt.observe.reading import Rows
from fastrt.runtime.nodes import nodes_at
from fastrt.store import client as store_client
from fastrt.store.client import Store

_ANSWER_S = elsewhere.ANSWER_S
_AWAY, _RESTARTING, _DEAD = (ACTOR_STATES[state] for state in (actors.AWAY, actors.DOWN, actors.DEAD))
_IDS = {"task_id", "results"}
_OF_PROCESS = ("actor", "state", "pid", "calls", "repr")  # what the node knows that runs an actor


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
        actor, attempt, max_retries, waits_for, results, cancelled, priority, given_name (by the option `name`), job,
        and node where there are several: that which runs the task.
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
        A dict for each: actor, class, name, namespace, state ("starting", "alive", "restarting" or "dead"), pid (of a
        dead one that of its last process), restarts, max_restarts, detached, calls (that have not ended), reason (why
        it is dead), actor_id, owner (the NodeID of the node that created it), repr (if its class has a `__repr__`),
        job, and node where there are several: that which runs the actor or ran it last, or of one that no node has run
        its owner. With all_nodes=False an actor that another node runs is "away".
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
    if len(nodes) > 1 and what == "tasks" and filters.get("state") != reading.FAILED:
        found = _read(store, wanted, what, filters, limit, timeout)
        copies = elsewhere.forwarded(store.socket_path, [one["NodeID"] for one in nodes], timeout)
        return each_task_once(found, copies, bool(_IDS & filters.keys()))
    if what != "actors" or not nodes:
        return _read(store, wanted, what, filters, limit, timeout)
    found = each_actor_once(_read(store, nodes, what, {}, 0, timeout))
    for one in found:
        one.rows = [row for row in one.rows if all(reading.fits(row[name], value) for name, value in filters.items())]
        one.total = len(one.rows)
        del one.rows[limit or one.total :]
    names = {one["NodeID"] for one in wanted}
    return [one for one in found if one.node in names]


def _read(
    store: Store, nodes: Sequence[Mapping[str, Any]], what: str, filters: Mapping[str, Any], limit: int, timeout: float
) -> list[NodeRows]:  # fmt: skip
    found = []
    if not nodes or any(one["IsHere"] for one in nodes):
        rows = reading.rows(store, what, filters, limit)
        here = nodes[0] if nodes else {"NodeID": store.client.segment.session, "NodeName": ""}
        found = [NodeRows(here["NodeID"], here["NodeName"], rows, rows.total)]
    others = {one["NodeID"]: one["NodeName"] for one in nodes if not one["IsHere"]}
    return found + elsewhere.read(store.socket_path, others, what, filters, limit, timeout) if others else found


def each_actor_once(found: Sequence[NodeRows]) -> list[NodeRows]:
    """Put the records that several nodes have of an actor together, in the node that runs it.

    Its owner knows its name and its restarts, the node that runs it knows its process. A record that another node has
    for a handle counts if the owner has not answered, or has forgotten the actor.

    Args:
        found: the rows of all nodes.
    """
    groups = {one.node: replace(one, rows=[]) for one in found}
    every = [(one.node, (row["owner"], row["actor_id"]), row) for one in found for row in one.rows]
    runs = {key: (node, row) for node, key, row in every if row["state"] != _AWAY and node != key[0]}
    for node, key, row in every:
        if node != key[0]:
            continue
        there, process = runs.pop(key, (node, row))
        if row["state"] == _AWAY:
            row = {**row, **{name: process[name] for name in _OF_PROCESS}}
            row["state"] = _RESTARTING if row["state"] == _DEAD else row["state"]  # its owner decides that
            node = there
        elif row["state"] == _DEAD and row["pid"] is None:
            node, row = there, {**row, "pid": process["pid"]}
        groups[node].rows.append(row)
    known = {key for node, key, _ in every if node == key[0]}
    rest = {key: (node, row) for node, key, row in every if key not in known} | runs
    for node, row in rest.values():
        groups[node].rows.append(row)
    return list(groups.values())


def each_task_once(
    found: Sequence[NodeRows], copies: Mapping[tuple[str, str], tuple[str, str]], by_id: bool
) -> list[NodeRows]:  # fmt: skip
    """Leave out tasks that their nodes have forwarded, and give the copies that run their ids.

    Args:
        found: the rows of nodes.
        copies: as of `elsewhere.forwarded`.
        by_id: whether the rows were chosen by ids: the copies have other ones, so forwarded tasks stay, without a pid.
    """
    groups = {one.node: replace(one, rows=[]) for one in found}
    runs = {forwarded: copy for copy, forwarded in copies.items()}
    for one in found:
        for row in one.rows:
            key = there = (one.node, row["results"][0] if row["results"] else "")
            while key in copies:
                key = copies[key]
            if there not in runs:
                groups[one.node].rows.append(row if key == there else _with_ids(row, int(key[1], 16)))
            elif by_id and key == there:
                while there in runs:
                    there = runs[there]
                groups.get(there[0], groups[one.node]).rows.append({**row, "pid": None})
            elif (total := groups[one.node].total) is not None:
                groups[one.node].total = total - 1
    return list(groups.values())


def _with_ids(row: Row, first: int) -> Row:
    """The row of a task under the ids of the task that another node has forwarded: its own, then those of results."""
    ids = [f"{first - 1 + k:016x}" for k in range(len(row["results"]) + 1)]
    return {**row, "results": ids[1:], "task_id": ids[0]}


def actor_ids(timeout: float = _ANSWER_S) -> dict[tuple[str | None, int], str]:
    """The ids of all actors by the names of nodes (None: of a session without a cluster) and their numbers there."""
    store = store_client.require()
    found = _read(store, _nodes(store), "actors", {}, 0, timeout)
    return {(one.name or None, row["actor"]): row["actor_id"] for one in found for row in one.rows}


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
