"""Processes of the session, nodes of its cluster, and their resources."""

from __future__ import annotations

from collections.abc import Mapping

from fastrt.dashboard import sections
from fastrt.dashboard.pages import stacks, tasks
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.errors import AttachError
from fastrt.observe import listing, reading
from fastrt.runtime.nodes import nodes_at
from fastrt.store import join, messages
from fastrt.store.client import Store
from fastrt.tasks.placement_group import row_of

_ROWS = 100


def workers(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Every process that has joined: what it runs, and what it uses."""
    rows = sorted(listing.workers(store), key=lambda row: (row["kind"], row["pid"]))
    most = max((row["rss"] or 0 for row in rows), default=0)
    return [
        sections.table(
            "processes", f"{len(rows)} processes", [
                ("pid", "code"), ("kind", "text"), ("name", "text"), ("state", "state"), ("runs", "text"),
                ("tasks ended", "count"), ("processor time", "seconds"), ("memory", "bytes"), ("", "share"),
                ("holds in the store", "bytes"),
            ], (
                (
                    sections.link(row["pid"], "process", pid=row["pid"]), row["kind"], row["name"], row["state"],
                    row["running"], row["tasks_done"] if row["kind"] in ("worker", "actor") else None, row["cpu_s"],
                    row["rss"], sections.share(row["rss"] or 0, most), row["bytes_held"],
                ) for row in rows[:_ROWS]
            ), "No process has joined.",
        ),
    ]  # fmt: skip


def process(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """One process: what it runs now."""
    way = sections.way("way", [sections.link("all processes", "workers")])
    pid = args.get("pid", "")
    found = [row for row in listing.workers(store) if str(row["pid"]) == pid]
    if not found:
        return [way, sections.text("gone", f"Process {pid} has left the session, or its process has ended.", "warn")]
    row = found[0]
    return [
        way,
        sections.facts("process", [
            ("pid", row["pid"], "code"), ("kind", row["kind"], "text"), ("name", row["name"], "text"),
            ("state", row["state"] or "-", "state"), ("runs", row["running"] or "-", "text"),
            ("tasks ended", row["tasks_done"], "count"), ("processor time", row["cpu_s"], "seconds"),
            ("memory", row["rss"], "bytes"), ("holds in the store", row["bytes_held"], "bytes"),
        ]),
        sections.table("tasks", "Its tasks", tasks.COLUMNS, [
            tasks.row_of(one) for one in reading.page(store, "tasks", {"pid": row["pid"]}, limit=_ROWS).rows
        ], "It runs no task."),
        *stacks.of_process(session, row["pid"], row["kind"]),
        sections.links("more", [sections.link("log of this process", "logs", worker=row["pid"])]),
    ]  # fmt: skip


def nodes(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """The nodes of the cluster, their resources, and the placement groups."""
    try:
        found = nodes_at(store.socket_path)
        groups = join.inquire(store.socket_path, messages.ListGroups(), messages.GroupList, timeout_s=2.0).groups
    except AttachError as exc:
        return [sections.text("away", f"The node daemon does not answer: {exc}", "bad")]
    names = {node["NodeID"]: node["NodeName"] or "this node" for node in found}
    rows = [
        (sections.link(names[node["NodeID"]], "logs", node=node["NodeID"]), node["NodeID"][:8], name, total,
         node["Available"].get(name, 0.0), sections.share(total - node["Available"].get(name, 0.0), total))
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


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(bundle.items()))
