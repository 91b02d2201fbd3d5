"""`fastrt memory`: the use of the store's memory, by process and by line of code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import joined, look_at
from fastrt.config import size_text

if TYPE_CHECKING:
    from fastrt.observe.memory import Group, Summary

_WIDTH = 160  # when the output is not a terminal


@click.command(short_help="Show the store's memory by process and by line of code.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--growth", "growth_s", type=click.FloatRange(0, 3600), help="Show the growth over so many seconds.")
@click.option("--limit", default=20, show_default=True, help="How many lines at most; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, with every object.")
def memory(session: str | None, growth_s: float | None, limit: int, as_json: bool) -> None:
    """Show totals, the memory that each process holds, and the objects grouped by the line of code that created them.

    Lines are recorded only if FASTRT_RECORD_CALL_SITES=1 was set before the session started, or by
    init(record_call_sites=True): recording costs some microseconds for each put and call.
    \f
    Raises:
        click.ClickException: no session runs here.
    """
    import time

    from fastrt.observe import listing
    from fastrt.observe.memory import summary

    def look(path: Path) -> Summary:
        with joined(path, "fastrt memory") as store:
            before = None
            if growth_s is not None:
                before = listing.objects(store)
                time.sleep(growth_s)
            return summary(store, before)

    found = {path.parent.name: one for path, one in look_at(session, look).items()}
    if as_json:
        click.echo(json.dumps({name: one.to_json() for name, one in found.items()}, indent=2))
        return
    for name, one in found.items():
        _show(name, one, limit, growth_s is not None)


def _show(session: str, found: Summary, limit: int, grown: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    totals = found.totals
    console.print(
        f"[bold]session {session[:8]}[/]: {size_text(totals['bytes_used'])} used of {size_text(totals['bytes_max'])}"
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
        processes.add_row(str(row["pid"]), row["kind"], escape(row["name"]), f"{row['objects']:,}", *sizes)
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
    if limit and len(found.groups) > limit:
        console.print(f"the largest {limit} of {len(found.groups)} lines; --limit 0 shows all")


def _cells(group: Group, grown: bool) -> list[str]:
    from rich.markup import escape

    holders = ", ".join(f"{pid} ({count:,})" for pid, count in group.holders.most_common(3))
    growth = [f"{group.grown:+,}"] if grown else []
    return [
        escape(group.site), group.what, f"{group.count:,}", *growth, size_text(group.bytes),
        f"{group.pinned:,}", f"{group.spilled:,}", holders or "other values, tasks", escape(group.suspect),
    ]  # fmt: skip
