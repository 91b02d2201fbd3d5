"""Processes of the session, nodes of its cluster, and their resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrt.dashboard import sections
from fastrt.dashboard.pages import far, stacks, tasks
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.errors import AttachError
from fastrt.observe import listing, reading
from fastrt.observe.listing import Row
from fastrt.runtime.nodes import demand_at, nodes_at
from fastrt.store import join, messages
from fastrt.store.client import Store
from fastrt.tasks.placement_group import row_of

_ROWS = 100


def workers(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Every process that has joined: what it runs, and what it uses; of the node that `args` choose."""
    node, name = args.get("node", ""), far.name_of(store, args)
    if not node:
        return [_processes(listing.workers(store), "", ""), *far.links(store, "workers")]
    way = sections.way("way", [sections.link("this node", "workers")])
    rows, why = far.workers(session, store, node)
    return [way, *why] if rows is None else [way, _processes(rows, node, name)]


def _processes(rows: list[Row], node: str, name: str) -> Section:
    rows = sorted(rows, key=lambda row: (row["kind"], row["pid"]))
    most = max((row["rss"] or 0 for row in rows), default=0)
    args = {"node": node} if node else {}
    return sections.table(
        "processes", f"{len(rows)} processes{f' of node {name}' * bool(node)}", [
            ("pid", "code"), ("kind", "text"), ("name", "text"), ("state", "state"), ("runs", "text"),
            ("tasks ended", "count"), ("processor time", "seconds"), ("memory", "bytes"), ("", "share"),
            ("holds in the store", "bytes"),
        ], (
            (
                sections.link(row["pid"], "process", pid=row["pid"], **args), row["kind"], row["name"], row["state"],
                row["running"], row["tasks_done"] if row["kind"] in ("worker", "actor") else None, row["cpu_s"],
                row["rss"], sections.share(row["rss"] or 0, most), row["bytes_held"],
            ) for row in rows[:_ROWS]
        ), "No process has joined.",
    )  # fmt: skip


def process(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """One process: what it runs now."""
    node, name = args.get("node", ""), far.name_of(store, args)
    at = {"node": node} if node else {}
    way = sections.way("way", [sections.link(f"all processes{f' of node {name}' * bool(node)}", "workers", **at)])
    rows, why = far.workers(session, store, node) if node else (listing.workers(store), [])
    if rows is None:
        return [way, *why]
    pid = args.get("pid", "")
    found = [row for row in rows if str(row["pid"]) == pid]
    if not found:
        return [way, sections.text("gone", f"Process {pid} has left the session, or its process has ended.", "warn")]
    row = found[0]
    running = [
        sections.table("tasks", "Its tasks", tasks.COLUMNS, [
            tasks.row_of(one) for one in reading.page(store, "tasks", {"pid": row["pid"]}, limit=_ROWS).rows
        ], "It runs no task."),
    ]  # fmt: skip
    return [
        way,
        sections.facts("process", [
            ("pid", row["pid"], "code"), ("kind", row["kind"], "text"), ("name", row["name"], "text"),
            ("state", row["state"] or "-", "state"), ("runs", row["running"] or "-", "text"),
            ("tasks ended", row["tasks_done"], "count"), ("processor time", row["cpu_s"], "seconds"),
            ("memory", row["rss"], "bytes"), ("holds in the store", row["bytes_held"], "bytes"),
        ]),
        *([] if node else running),
        *stacks.of_process(session, row["pid"], row["kind"], node),
        sections.links("more", [sections.link("log of this process", "logs", worker=row["pid"], **at)]),
    ]  # fmt: skip


def nodes(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """The nodes of the cluster, their resources, the demand that waits, and the placement groups."""
    try:
        found = nodes_at(store.socket_path)
        demand = demand_at(store.socket_path)
        groups = join.inquire(store.socket_path, messages.ListGroups(), messages.GroupList, timeout_s=2.0).groups
    except AttachError as exc:
        return [sections.text("away", f"The node daemon does not answer: {exc}", "bad")]
    names = {node["NodeID"]: node["NodeName"] or "this node" for node in found}
    rows = [
        (sections.link(names[node["NodeID"]], "logs", node=node["NodeID"]), node["NodeID"][:8],
         "memory, GiB" if name == "memory" else name, _of(name, total), _of(name, node["Available"].get(name, 0.0)),
         sections.share(total - node["Available"].get(name, 0.0), total))
        for node in found for name, total in sorted(node["Resources"].items())
    ]  # fmt: skip
    made = [row_of(group) for group in groups]
    return [
        sections.table(
            "nodes", f"{len(found)} node{'' if len(found) == 1 else 's'}", [
                ("node", "text"), ("id", "code"), ("resource", "text"), ("has", "number"), ("free", "number"),
                ("in use", "share"),
            ], rows, "The session has no resources.",
        ),
        *_waiting(demand, names),
        sections.table(
            "groups", "Placement groups", [
                ("id", "code"), ("strategy", "text"), ("state", "state"), ("bundles", "text"), ("on", "text"),
            ], (
                (
                    group["placement_group_id"][:16], group["strategy"], group["state"].lower(),
                    "; ".join(_amounts(one) for _, one in sorted(group["bundles"].items())),
                    ", ".join(names.get(node, node[:8]) for _, node in sorted(group["bundles_to_node_id"].items())),
                ) for group in made[:_ROWS]
            ), "There are none. fastrt.util.placement_group reserves resources for tasks that belong together.",
        ),
    ]  # fmt: skip


def _waiting(demand: Mapping[str, Any], names: Mapping[str, str]) -> list[Section]:
    """The tasks, actors and bundles that wait for resources, by their demand."""
    rows = [
        (
            f"{row['kind']}s", _amounts(row["resources"]) or "any", row["count"],
            "waiting" if row["is_feasible"] else "never",
            ", ".join(f"{label}={wanted}" for label, wanted in sorted(row["label_selector"].items())),
            names.get(row["scheduling"], row["scheduling"][:16]) + " or another" * (
                row["is_soft"] and row["scheduling"] in names
            ),
        ) for row in demand["tasks"][:_ROWS]
    ]  # fmt: skip
    rows += [
        ("bundles of a group", _amounts(one), 1, "waiting", "", group["strategy"])
        for group in demand["placement_groups"][:_ROWS] for one in group["bundles"]
    ]  # fmt: skip
    left = len(demand["tasks"]) - _ROWS
    notes = [
        *([f"{left:,} more demands are not shown."] if left > 0 else []),
        *([f"{demand['more']:,} more tasks and actors with other demands wait."] if demand["more"] else []),
        *([f"{demand['queued_tasks']:,} tasks wait for nothing but a worker."] if demand["queued_tasks"] else []),
        *(["Requested by request_resources: " + "; ".join(map(_amounts, demand["requested"][:_ROWS]))]
          if demand["requested"] else []),
    ]  # fmt: skip
    return [
        sections.table(
            "demand", "Demand that waits on this node", [
                ("kind", "text"), ("resources", "text"), ("how many", "count"), ("state", "state"), ("labels", "text"),
                ("where", "text"),
            ], rows, "Nothing: each task, actor and placement group has what it demands.",
            sections.link("waiting tasks", "rows", state="waiting") if rows else None,
        ),
        *([sections.points("notes", "More about the demand", notes)] if notes else []),
    ]  # fmt: skip


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {_of(name, amount):.3g}{' GiB' * (name == 'memory')}" for name, amount in sorted(bundle.items())
    )


def _of(name: str, amount: float) -> float:
    """An amount of a resource; memory in GiB."""
    return amount / (1 << 30) if name == "memory" else amount
