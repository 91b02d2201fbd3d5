"""`fastrt memory`: the use of the stores' memory, by process and by line of code."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from fastrt.cli.look import Member, ask_each, joined, leave_out, members
from fastrt.config import size_text

if TYPE_CHECKING:
    from fastrt.observe.memory import Group, Summary
    from fastrt.store.client import Store

_WIDTH = 160  # when the output is not a terminal


@click.command(short_help="Show the store's memory by process and by line of code.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--node", default="", metavar="NAME|ID", help="Only this node of the cluster.")
@click.option("--this-node", is_flag=True, help="Do not ask nodes of the cluster on other machines.")
@click.option("--growth", "growth_s", type=click.FloatRange(0, 3600), help="Show the growth over so many seconds.")
@click.option("--limit", default=20, show_default=True, help="How many lines at most; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, with every object of this machine.")
def memory(
    session: str | None, node: str, this_node: bool, growth_s: float | None, limit: int, as_json: bool
) -> None:  # fmt: skip
    """Show totals, the memory that each process holds, and the objects grouped by the line of code that created them.

    Lines are recorded only if FASTRT_RECORD_CALL_SITES=1 was set before the session started, or by
    init(record_call_sites=True): recording costs some microseconds for each put and call.

    If a session is a node of a cluster, nodes on other machines are asked too, and each answers with the lines and
    processes that hold the most. A node that does not answer within five seconds is named on standard error.
    \f
    Raises:
        click.ClickException: no session runs here.
    """
    from fastrt.observe import listing

    wanted = members(session, node, this_node)
    with contextlib.ExitStack() as stack:
        stores = _joined(stack, wanted)
        found = _summaries(wanted, stores)
        if growth_s is not None:
            before = found
            time.sleep(growth_s)
            found = _summaries(wanted, stores)
            for one, summary in found.items():
                if one in before:
                    summary.compare(before[one])
        if not found:
            raise click.ClickException("no session answered")
        if as_json:
            rows: dict[str, dict[str, Any]] = {}
            for one, summary in found.items():
                every = {"objects": listing.objects(stores[one])} if one in stores else {}
                rows[one.id] = {"node": one.name, **summary.to_json(), **every}
            click.echo(json.dumps(rows, indent=2))
            return
    for one, summary in found.items():
        _show(one, summary, limit, growth_s is not None)


def _joined(stack: contextlib.ExitStack, wanted: list[Member]) -> dict[Member, Store]:
    """Join the sessions on this machine, and name those that cannot be joined."""
    from fastrt.errors import FastrtError

    stores = {}
    for one in wanted:
        if one.is_here:
            try:
                stores[one] = stack.enter_context(joined(one.path, "fastrt memory"))
            except FastrtError as exc:
                leave_out(one.path, str(exc))
    return stores


def _summaries(wanted: list[Member], stores: dict[Member, Store]) -> dict[Member, Summary]:
    """The summaries of those that answer."""
    from fastrt.observe import elsewhere
    from fastrt.observe.memory import summary

    return ask_each(
        wanted, lambda one: summary(stores[one]) if one in stores else None,
        elsewhere.read_memory, "the memory of node {} is missing",
    )  # fmt: skip


def _show(member: Member, found: Summary, limit: int, grown: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    totals = found.totals
    console.print(
        f"[bold]{escape(member.title)}[/]: {size_text(totals['bytes_used'])} used of {size_text(totals['bytes_max'])}"
    )
    for state, more in (
        ("sealed", f"{totals.get('inline_objects', 0):,} of them in the table itself"),
        ("pinned", "in use by views or running tasks, so they cannot be spilled"),
        ("spilled", f"only in files in {found.spill_dir}"),
        ("remote", "kept by other nodes, with no copy here"),
        ("pending", "results to come"),
    ):
        if totals.get(f"{state}_objects"):
            nbytes = size_text(totals[f"{state}_bytes"])
            console.print(f"  {state:8}{totals[f'{state}_objects']:>10,} objects {nbytes:>12}  {more}", markup=False)
    processes = Table(box=box.SIMPLE)
    for name in ("pid", "kind", "name"):
        processes.add_column(name)
    for name in ("objects", "holds", "pinned"):
        processes.add_column(name, justify="right")
    for row in found.processes:
        sizes = (size_text(row["bytes"]), size_text(row["pinned"]))
        processes.add_row(str(row["pid"]), escape(row["kind"]), escape(row["name"]), f"{row['objects']:,}", *sizes)
    console.print(processes)
    groups = Table(box=box.SIMPLE)
    for name in ("made by", "what"):
        groups.add_column(name, overflow="fold")
    for name in ("objects", *["grown"] * grown, "bytes", "pinned", "spilled", "held by"):
        groups.add_column(name, justify="right")
    groups.add_column("suspicion", overflow="fold")
    for group in found.groups[: limit or None]:
        groups.add_row(*_cells(group, grown))
    console.print(groups)
    lines = len(found.groups) + found.more
    shown = min(limit or lines, len(found.groups))
    if shown < lines:
        hint = "; --limit 0 shows all" if not found.more else ""
        console.print(f"the largest {shown} of {lines} lines{hint}")


def _cells(group: Group, grown: bool) -> list[str]:
    from rich.markup import escape

    holders = ", ".join(f"{pid} ({count:,})" for pid, count in group.holders.most_common(3))
    growth = [f"{group.grown:+,}"] if grown else []
    return [
        escape(group.site), escape(group.what), f"{group.count:,}", *growth, size_text(group.bytes),
        f"{group.pinned:,}", f"{group.spilled:,}", holders or "other values, tasks", escape(group.suspect),
    ]  # fmt: skip
