"""`fastrt status`: this user's sessions on this machine, read from their shared tables."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastrt.cli.look import joined, runtime_folder
from fastrt.config import size_text

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = 100  # of a table


@click.command(short_help="Show the sessions that run on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--demand", is_flag=True, help="Show the demand that waits, for programs that add nodes.")
@click.option("--check", is_flag=True, help="Print nothing; exit with 1 unless a node here answers.")
def status(as_json: bool, demand: bool, check: bool) -> None:
    """Show every session of this user on this machine: its processes, objects, memory and queue."""
    if check:
        sys.exit(0 if _answers(runtime_folder()) else 1)
    if demand:
        _show_demand(_demands(runtime_folder()), as_json)
        return
    from fastrt.errors import AttachError
    from fastrt.runtime.nodefile import nodes_here
    from fastrt.runtime.nodes import nodes_at

    folder = runtime_folder()
    nodes = {node.socket_path: node for node in nodes_here(folder)}
    sessions = [look(path) for path in sorted(folder.glob("*/node.sock"))]
    for session in sessions:
        node = nodes.get(session["socket"])
        if node is not None:
            about = ("head", "name", "is_head", "address")
            session["cluster"] = {name: getattr(node, name) for name in about}
        with contextlib.suppress(AttachError):
            session["nodes"] = nodes_at(session["socket"])
    if as_json:
        click.echo(json.dumps(sessions, indent=2))
    elif not sessions:
        click.echo(f"no session is running here (looked in {folder})")
    else:
        _show(sessions)


def _answers(folder: Path) -> bool:
    """Whether the daemon of a session in the folder answers."""
    from fastrt.errors import AttachError
    from fastrt.runtime.nodes import nodes_at

    for path in folder.glob("*/node.sock"):
        with contextlib.suppress(AttachError):
            return bool(nodes_at(str(path)))
    return False


def _demands(folder: Path) -> list[dict[str, Any]]:
    """Return the waiting demand of each session of the folder, and the nodes that it has."""
    from fastrt.errors import AttachError
    from fastrt.runtime.nodes import demand_at, nodes_at

    found = []
    for path in sorted(folder.glob("*/node.sock")):
        with contextlib.suppress(AttachError):
            found.append({"session": path.parent.name, "nodes": nodes_at(str(path)), **demand_at(str(path))})
    return found


def _show_demand(sessions: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(sessions, indent=2))
        return
    for session in sessions:
        click.echo(f"session {session['session'][:8]}, {len(session['nodes'])} nodes")
        for row in session["tasks"]:
            wanted = {**row["resources"], **row["label_selector"]} | (
                {"on": row["scheduling"]} if row["scheduling"] else {}
            )
            words = ", ".join(f"{name} {amount}" for name, amount in wanted.items()) or "a worker"
            click.echo(f"  {row['count']:,} {row['kind']}s: {words}{'' if row['is_feasible'] else ' (no node has it)'}")
        for group in session["placement_groups"]:
            click.echo(f"  placement group, {group['strategy']}: {group['bundles']}")
        if session["more"]:
            click.echo(f"  {session['more']:,} tasks and actors with other demands")
        for bundle in session["requested"]:
            click.echo(f"  requested: {', '.join(f'{name} {amount}' for name, amount in bundle.items()) or 'nothing'}")
        click.echo(f"  {session['queued_tasks']:,} tasks wait for a worker only")


def look(socket_path: Path) -> dict[str, Any]:
    """Join a session as a tool, read its tables, and leave.

    Args:
        socket_path: of its node daemon.
    Returns:
        session, socket, and either error, or processes (the client table), the counts of
        `fastrt._core.repair.fsck.usage` (objects, tasks, queued, bytes_used, bytes_committed, bytes_max), and those of
        `fastrt._core.objects.spill.totals` with spill_dir and spill_error, the error of the last round.
    """
    from fastrt._core.memory.clients import table
    from fastrt._core.objects import spill
    from fastrt._core.repair import fsck
    from fastrt.errors import FastrtError

    found: dict[str, Any] = {"session": socket_path.parent.name, "socket": str(socket_path)}
    try:
        with joined(socket_path, "fastrt status") as store:
            client = store.client
            held = {row["client"]: row["bytes"] for row in fsck.holders(client)}
            rows = [row for row in table(client.segment) if row["client"] != client.index]
            processes = [
                {
                    "pid": row["pid"],
                    "kind": _kind(row["kind"]),
                    "name": row["name"],
                    "doing": _doing(row),
                    "tasks_done": row["tasks_done"],
                    "bytes_held": held.get(row["client"], 0),
                }
                for row in rows
            ]
            spilled = {"spill_dir": spill.directory(client), "spill_error": spill.last_round(client)[1]}
            return {**found, "processes": processes, **fsck.usage(client), **spill.totals(client), **spilled}
    except FastrtError as exc:  # also raised when the session ends meanwhile
        return {**found, "error": str(exc)}


def _kind(number: int) -> str:
    from fastrt._core.memory import clients

    names = {clients.KIND_DAEMON: "daemon", clients.KIND_DRIVER: "driver", clients.KIND_WORKER: "worker"}
    names[clients.KIND_ACTOR] = "actor"
    return names.get(number, "tool")


def _doing(row: dict[str, Any]) -> str:
    from fastrt._core.memory import clients

    if row["kind"] == clients.KIND_ACTOR:
        return "idle" if row["task"] is None else "running a call"
    if row["kind"] != clients.KIND_WORKER:
        return ""
    if row["task"] is None:
        return "idle"
    return "waiting inside a task" if row["blocked"] else "running a task"


def _show(sessions: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fastrt.tasks.resources import shown_amount

    console = Console()
    for session in sessions:
        if "error" in session:
            console.print(f"session {session['session'][:8]}: {session['error']}", markup=False)
            continue
        console.print(
            f"[bold]session {session['session'][:8]}[/]: {session['objects']:,} objects, {session['tasks']:,} tasks, "
            f"{session['queued']:,} queued, {size_text(session['bytes_used'])} used of "
            f"{size_text(session['bytes_max'])} ({size_text(session['bytes_committed'])} committed)"
        )
        if "cluster" in session:
            about = session["cluster"]
            what = "the head" if about["is_head"] else "a node"
            console.print(f"{what} of the cluster at {about['head']}, named {about['name']}", markup=False)
        if session["spilled_objects"] or session["spill_error"]:
            console.print(
                f"spilled {session['spilled_objects']:,} values ({size_text(session['spilled_bytes'])}) to "
                f"{session['spill_dir']}, brought back {session['restored_objects']:,} "
                f"({size_text(session['restored_bytes'])}){' - ' if session['spill_error'] else ''}"
                f"{session['spill_error']}",
                markup=False,
            )
        if session["mapped_objects"]:
            console.print(
                f"{session['mapped_objects']:,} values ({size_text(session['mapped_bytes'])}) found no room and went "
                f"to files in {session['spill_dir']}; to keep them in memory, raise object_store_memory",
                markup=False,
            )
        nodes = Table(box=box.SIMPLE)
        for name in ("node", "name", "free of what it has"):
            nodes.add_column(name)
        known = session.get("nodes", ())
        for about in known[:_ROWS]:
            free, total = about["Available"], about["Resources"]
            has = ", ".join(
                f"{name} {shown_amount(name, free.get(name, 0))} of {shown_amount(name, amount)}"
                for name, amount in sorted(total.items())
            )
            nodes.add_row(about["NodeID"][:8], escape(about["NodeName"]), escape(has))
        console.print(nodes)
        _say_part(console, len(known), "nodes")
        processes = Table(box=box.SIMPLE)
        for name in ("pid", "kind", "name", "doing"):
            processes.add_column(name)
        for name in ("tasks done", "holds"):
            processes.add_column(name, justify="right")
        for row in session["processes"][:_ROWS]:
            done = f"{row['tasks_done']:,}" if row["kind"] in ("worker", "actor") else ""
            processes.add_row(
                str(row["pid"]), row["kind"], escape(row["name"]), row["doing"], done, size_text(row["bytes_held"])
            )
        console.print(processes)
        _say_part(console, len(session["processes"]), "processes")


def _say_part(console: Console, total: int, what: str) -> None:
    """Say of a table that shows a part, how large the whole is."""
    if total > _ROWS:
        console.print(f"showing {_ROWS} of {total:,} {what}; --json has all", markup=False)
