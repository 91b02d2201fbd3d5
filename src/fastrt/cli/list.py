"""`fastrt list`: tasks, actors, objects and workers of the sessions on this machine, and of their clusters."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastrt.cli.look import joined, look_at
from fastrt.config import size_text

if TYPE_CHECKING:
    from fastrt.observe.elsewhere import NodeRows
    from fastrt.observe.reading import Rows

_BYTES = ("bytes", "stored", "bytes_held", "rss")
# Columns of the tables; `--json` has all.
_SHOWN = {
    "tasks": ("task_id", "name", "state", "pid", "attempt", "waits_for", "priority"),
    "actors": ("actor", "class", "name", "state", "pid", "calls", "restarts", "reason"),
    "objects": ("object_id", "what", "type", "state", "bytes", "refs", "pins", "counted", "site", "kept_by"),
    "failures": ("time", "task_id", "name", "type", "message", "attempt", "retried", "mended", "pid"),
    "workers": ("pid", "kind", "name", "state", "running", "tasks_done", "bytes_held", "rss"),
}
_WIDTH = 160  # when the output is not a terminal


@click.command("list", short_help="List tasks, actors, objects or workers.")
@click.argument("what", type=click.Choice([what for what in _SHOWN if what != "failures"]))
@click.option("--state", help="Only rows in this state, such as running or failed; * and ? are wildcards.")
@click.option("--name", help="Only rows with this name (of a class: for actors); * and ? are wildcards.")
@click.option("--filter", "filters", multiple=True, metavar="COLUMN=VALUE", help="Only matching rows; may be repeated.")
@click.option("--limit", default=100, show_default=True, help="How many rows at most; 0: all.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--node", metavar="NAME|ID", help="Only rows of this node of the cluster.")
@click.option("--this-node", is_flag=True, help="Do not ask the other nodes of a cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, with all columns.")
def list_(
    what: str, state: str | None, name: str | None, filters: tuple[str, ...], limit: int, session: str | None,
    node: str | None, this_node: bool, as_json: bool,
) -> None:  # fmt: skip
    """List the unfinished tasks, the actors, the objects or the processes of the sessions on this machine.

    Tasks of the state failed are the failures that the session keeps, newest first.

    If a session is a node of a cluster, the other nodes are asked too; they answer also while all their workers are
    busy. A node that does not answer within five seconds is named on standard error.
    \f
    Raises:
        click.ClickException: no session runs here, or a filter names an unknown column.
    """
    wanted: dict[str, Any] = {}
    for text in filters:
        column, equals, value = text.partition("=")
        if not equals:
            raise click.ClickException(f"--filter {text}: write COLUMN=VALUE")
        wanted[column] = value
    if state is not None:
        wanted["state"] = state
    if name is not None:
        wanted["class" if what == "actors" else "what" if what == "objects" else "name"] = name
    from fastrt.observe.reading import Rows, check_columns
    from fastrt.runtime.state_api import together

    try:
        check_columns(what, wanted)
    except ValueError as exc:
        raise click.ClickException(str(exc)) from None
    heads: set[str] = set()  # heads of the clusters that were asked; one node answers for its whole cluster
    try:
        found = look_at(session, lambda path: _found(path, what, wanted, limit, node, None if this_node else heads))
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
    groups = [one for more in found.values() for one in more]
    if node and not groups:
        raise click.ClickException(f"no session here is a node of a cluster, so there is no node {node!r} to ask")
    for one in groups:
        if one.error:
            click.echo(f"fastrt: rows of node {one.name} are missing: {one.error}", err=True)
    every: list[dict[str, Any]] = []
    for one in groups:
        mark = {"session": one.node[:8]} if len(found) > 1 else {}  # a node's session has the name that its NodeID is
        every += [{**mark, **row} for row in together([one], 0)]
    rows = Rows(every[:limit] if limit else every, together(groups, 0).total)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show("failures" if what == "tasks" and state == "failed" else what, rows)
    if rows.note:
        click.echo(f"{rows.note}{f'; --limit 0 shows all {what}' if limit else ''}", err=as_json)


def _found(
    path: Path, what: str, wanted: dict[str, Any], limit: int, node: str | None, heads: set[str] | None
) -> list[NodeRows]:  # fmt: skip
    """The rows of a session's cluster, once per cluster (`heads`); of the session alone if `heads` is None."""
    from fastrt.observe.elsewhere import ANSWER_S
    from fastrt.runtime.nodefile import nodes_here
    from fastrt.runtime.state_api import rows_by_node

    here = next((one for one in nodes_here(path.parent.parent) if one.socket_path == str(path)), None)
    in_cluster = here is not None and heads is not None
    if (node and not in_cluster) or (here is not None and heads is not None and here.head in heads):
        return []
    with joined(path, "fastrt list") as store:
        found = rows_by_node(store, what, wanted, limit, ANSWER_S, node=node or "", all_nodes=in_cluster)
    if here is not None and heads is not None:
        heads.add(here.head)
    return found


def _show(what: str, rows: Rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if not rows:
        console.print(f"no {what}")
        return
    table = Table(box=box.SIMPLE)
    columns = [name for name in ("session", "node") if name in rows[0]] + list(_SHOWN[what])
    if what == "objects" and not any(row["site"] for row in rows):
        columns.remove("site")
    if what == "tasks" and not any(row.get("priority") for row in rows):
        columns.remove("priority")
    for name in columns:
        table.add_column(name, justify="right" if name in (*_BYTES, "tasks_done", "calls", "priority") else "left")
    for row in rows:
        table.add_row(*(escape(_cell(name, row.get(name))) for name in columns))
    console.print(table)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _BYTES:
        return size_text(value)
    if name == "time":
        return time.strftime("%H:%M:%S", time.localtime(value))
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    if name == "site":
        return os.path.relpath(value) if value.startswith(os.getcwd() + os.sep) else str(value)
    return str(value).split("\n")[0]
