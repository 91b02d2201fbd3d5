"""`fastrt stack` and `fastrt flame`: where workers, actors and drivers are in their code, read from outside."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import joined, look_at

if TYPE_CHECKING:
    from fastrt.observe.stacks import Process, Stack


@click.command(short_help="Show the stacks of workers, actors and drivers.")
@click.argument("pid", type=click.IntRange(1), required=False)
@click.option("--all", "every", is_flag=True, help="Of all workers, actors and drivers, also of idle ones.")
@click.option("--full", is_flag=True, help="Show the frames of fastrt that have called user code, too.")
@click.option("--native", is_flag=True, help="Show the frames of C, C++ and Cython code, too.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def stack(pid: int | None, every: bool, full: bool, native: bool, session: str | None, as_json: bool) -> None:
    """Show where a process is in its code: the worker, actor or driver PID, or all that run a task or a call.

    The process need not do anything for it: it may hang in C or in a loop. It stops for some milliseconds.
    \f
    Raises:
        click.ClickException: PID is no such process of a session of this user, or no stack could be read.
    """
    from fastrt.observe import stacks

    if pid is not None and every:
        raise click.UsageError("give PID or --all")
    found = _processes(session)
    wanted = [_chosen(found, pid)] if pid is not None else [one for one in found if every or one.tasks]
    if not wanted:
        click.echo("no process runs a task or a call; --all shows idle ones, too", err=True)
    rows, failed = [], 0
    for process in wanted:
        try:
            read = stacks.read(process, native=native)
        except stacks.StackError as exc:
            if len(wanted) == 1:
                raise click.ClickException(str(exc)) from exc
            click.echo(f"fastrt: {exc}", err=True)
            failed += 1
            continue
        if as_json:
            rows.append({**dataclasses.asdict(process), "threads": [dataclasses.asdict(one) for one in read]})
        else:
            _show(process, read, full)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    if failed and failed == len(wanted):
        raise click.ClickException("no stack could be read")


@click.command(short_help="Draw a flame graph of a worker, actor or driver.")
@click.argument("pid", type=click.IntRange(1))
@click.option("-d", "--seconds", type=click.IntRange(1, 3600), default=5, show_default=True, help="For how long.")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: flame-PID.svg.")
@click.option("--idle", is_flag=True, help="Count threads that sleep, too.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
def flame(pid: int, seconds: int, out: Path | None, idle: bool, session: str | None) -> None:
    """Sample the stacks of process PID 100 times a second and write a flame graph, which a browser shows.

    The file is an SVG, or for https://www.speedscope.app if its name ends with .json.
    \f
    Raises:
        click.ClickException: PID is no worker, actor or driver of this user's sessions, or it cannot be sampled.
    """
    from fastrt.observe import stacks

    process = _chosen(_processes(session), pid)
    out = out or Path(f"flame-{pid}.svg")
    try:
        stacks.record(process, seconds, out, idle=idle)
    except OSError as exc:
        raise click.ClickException(f"{out} cannot be written: {exc}") from exc
    except stacks.StackError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(str(out))


def _processes(session: str | None) -> list[Process]:
    """The processes of this user's sessions that run user code."""
    from fastrt.observe import stacks

    def look(path: Path) -> list[Process]:
        with joined(path, "fastrt stack") as store:
            return stacks.processes(store)

    return [process for found in look_at(session, look).values() for process in found]


def _chosen(found: list[Process], pid: int) -> Process:
    for process in found:
        if process.pid == pid:
            return process
    there = ", ".join(str(process.pid) for process in found)
    raise click.ClickException(
        f"process {pid} is no worker, actor or driver of a session of this user on this machine; there are: {there}"
    )


def _show(process: Process, read: list[Stack], full: bool) -> None:
    from fastrt.observe import stacks

    runs = ", ".join(f"{name} ({task})" for task, name in process.tasks.items())
    click.echo(f"{process.kind} {process.pid}{': ' if runs else ''}{runs}")
    for one in read:
        click.echo(textwrap.indent(stacks.as_text(one, full=full), "  "))
    click.echo()
