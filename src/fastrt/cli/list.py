"""`fastrt list`: tasks, actors, objects and workers of the sessions on this machine, and of their clusters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastrt.cli.look import bytes_in_words, joined, look_at

if TYPE_CHECKING:
    from fastrt.observe.reading import Rows
    from fastrt.runtime.nodefile import NodeFile

_BYTES = ("bytes", "stored", "bytes_held", "rss")
# Columns of the tables; `--json` has all.
_SHOWN = {
    "tasks": ("task_id", "name", "state", "pid", "attempt", "waits_for", "priority"),
    "actors": ("actor", "class", "name", "state", "pid", "calls", "restarts", "reason"),
    "objects": ("object_id", "what", "type", "state", "bytes", "refs", "pins", "counted", "site", "kept_by"),
    "workers": ("pid", "kind", "name", "state", "running", "tasks_done", "bytes_held", "rss"),
}
_WIDTH = 160  # when the output is not a terminal


@click.command("list", short_help="List tasks, actors, objects or workers.")
@click.argument("what", type=click.Choice(list(_SHOWN)))
@click.option("--state", help="Only rows in this state, such as running; * and ? are wildcards.")
@click.option("--name", help="Only rows with this name (of a class: for actors); * and ? are wildcards.")
@click.option("--filter", "filters", multiple=True, metavar="COLUMN=VALUE", help="Only matching rows; may be repeated.")
@click.option("--limit", default=100, show_default=True, help="How many rows at most; 0: all.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--this-node", is_flag=True, help="Do not ask the other nodes of a cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, with all columns.")
def list_(
    what: str, state: str | None, name: str | None, filters: tuple[str, ...], limit: int, session: str | None,
    this_node: bool, as_json: bool,
) -> None:  # fmt: skip
    """List the unfinished tasks, the actors, the objects or the processes of the sessions on this machine.

    If a session is a node of a cluster, the other nodes are asked too. A node needs a free worker to answer; one that
    has none within five seconds is left out, with a message on standard error.
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

    try:
        check_columns(what, wanted)
    except ValueError as exc:
        raise click.ClickException(str(exc)) from None
    heads: set[str] = set()  # heads of the clusters that were asked; one node answers for its whole cluster
    found = look_at(session, lambda path: _rows(path, what, wanted, limit, None if this_node else heads))
    every: list[dict[str, Any]] = []
    for path, more in found.items():
        every += [{"session": path.parent.name[:8], **row} for row in more] if len(found) > 1 else more
    totals = [more.total for more in found.values() if more.total is not None]
    rows = Rows(every[:limit] if limit else every, sum(totals) if len(totals) == len(found) else None)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show(what, rows)
    if rows.note:
        click.echo(f"{rows.note}{f'; --limit 0 shows all {what}' if limit else ''}", err=as_json)


def _rows(path: Path, what: str, wanted: dict[str, Any], limit: int, heads: set[str] | None) -> Rows:
    """The rows of a session's cluster, once per cluster (`heads`); of the session alone if `heads` is None."""
    from fastrt.observe import reading
    from fastrt.runtime.nodefile import nodes_here

    node = next((node for node in nodes_here(path.parent.parent) if node.socket_path == str(path)), None)
    try:
        if node is not None and heads is not None:
            if node.head in heads:
                return reading.Rows([], 0)
            rows = _of_the_cluster(node, what, wanted, limit)
            heads.add(node.head)
            return rows
        with joined(path, "fastrt list") as store:
            return reading.rows(store, what, wanted, limit)
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc


def _of_the_cluster(node: NodeFile, what: str, wanted: dict[str, Any], limit: int) -> Rows:
    """Collect the rows of all nodes as a driver: other nodes are asked by tasks, which only drivers can submit."""
    from fastrt.observe.reading import Rows
    from fastrt.runtime.driver import init, shutdown
    from fastrt.runtime.state_api import rows_of

    try:
        init(address=node.head, log_to_driver=False)
        found = rows_of(what, limit=limit, all_nodes=True, timeout=5.0, **wanted)
        others = [row for row in found if not _is_me(row)]
        return Rows(others, None if found.total is None else found.total - len(found) + len(others))
    finally:
        shutdown()


def _is_me(row: dict[str, Any]) -> bool:
    return row.get("kind") == "driver" and row["pid"] == os.getpid()


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
        return bytes_in_words(value)
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    if name == "site":
        return os.path.relpath(value) if value.startswith(os.getcwd() + os.sep) else str(value)
    return str(value).split("\n")[0]
