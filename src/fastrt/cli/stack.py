"""`fastrt stack` and `fastrt flame`: where workers, actors and drivers are in their code, read from outside."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import Member, ask_each, joined, leave_out, members

if TYPE_CHECKING:
    from fastrt.observe.stacks import Process, Stack


@click.command(short_help="Show the stacks of workers, actors and drivers.")
@click.argument("pid", type=click.IntRange(1), required=False)
@click.option("--all", "every", is_flag=True, help="Of all workers, actors and drivers, also of idle ones.")
@click.option("--full", is_flag=True, help="Show the frames of fastrt that have called user code, too.")
@click.option("--native", is_flag=True, help="Show the frames of C, C++ and Cython code, too.")
@click.option("--session", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--node", default="", metavar="NAME|ID", help="Only processes of this node of the cluster.")
@click.option("--this-node", is_flag=True, help="Do not ask nodes of the cluster on other machines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def stack(
    pid: int | None, every: bool, full: bool, native: bool, session: str | None, node: str, this_node: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Show where a process is in its code: the worker, actor or driver PID, or all that run a task or a call.

    The process need not do anything for it: it may hang in C or in a loop. It stops for some milliseconds.

    If a session is a node of a cluster, nodes on other machines are asked too; each reads the stacks of its processes.
    \f
    Raises:
        click.ClickException: PID is no such process of a session of this user, or no stack could be read.
    """
    from fastrt.errors import FastrtError

    if pid is not None and every:
        raise click.UsageError("give PID or --all")
    found = _processes(members(session, node, this_node))
    wanted = [_chosen(found, pid)] if pid is not None else [one for one in found if every or one[1].tasks]
    if not wanted:
        click.echo("no process runs a task or a call; --all shows idle ones, too", err=True)
    rows, failed = [], 0
    for member, process in wanted:
        try:
            read = _read(member, process, native)
        except FastrtError as exc:
            if len(wanted) == 1:
                raise click.ClickException(str(exc)) from exc
            click.echo(f"fastrt: {_of_node(member)}{exc}", err=True)
            failed += 1
            continue
        if as_json:
            threads = [dataclasses.asdict(one) for one in read]
            rows.append({**dataclasses.asdict(process), "node": member.name, "threads": threads})
        else:
            _show(member, process, read, full)
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

    _, process = _chosen(_processes(members(session, this_node=True)), pid)
    out = out or Path(f"flame-{pid}.svg")
    try:
        stacks.record(process, seconds, out, idle=idle)
    except OSError as exc:
        raise click.ClickException(f"{out} cannot be written: {exc}") from exc
    except stacks.StackError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(str(out))


def _processes(wanted: list[Member]) -> list[tuple[Member, Process]]:
    """The processes that run user code, and their nodes; nodes that do not answer are named."""
    from fastrt.errors import FastrtError
    from fastrt.observe import elsewhere, stacks

    def here(member: Member) -> list[Process] | None:
        try:
            with joined(member.path, "fastrt stack") as store:
                return stacks.processes(store)
        except FastrtError as exc:
            leave_out(member.path, str(exc))
            return None

    found = ask_each(wanted, here, elsewhere.read_processes, "the processes of node {} are missing")
    return [(member, process) for member, some in found.items() for process in some]


def _read(member: Member, process: Process, native: bool) -> list[Stack]:
    from fastrt.observe import elsewhere, stacks

    if member.is_here:
        return stacks.read(process, native=native)
    return elsewhere.read_stack(str(member.path), member.id, process.pid, native=native)


def _chosen(found: list[tuple[Member, Process]], pid: int) -> tuple[Member, Process]:
    fitting = [one for one in found if one[1].pid == pid]
    if len(fitting) > 1:
        names = ", ".join(member.name or member.id[:8] for member, _ in fitting)
        raise click.ClickException(f"there is a process {pid} on several nodes; choose one by --node: {names}")
    if fitting:
        return fitting[0]
    there = ", ".join(f"{process.pid}{f' on {member.name}' * (not member.is_here)}" for member, process in found)
    raise click.ClickException(
        f"process {pid} is no worker, actor or driver of a session of this user on this machine, or of its cluster; "
        f"there are: {there}"
    )


def _of_node(member: Member) -> str:
    return f"node {member.name}: " if not member.is_here else ""


def _show(member: Member, process: Process, read: list[Stack], full: bool) -> None:
    from fastrt.observe import stacks

    runs = ", ".join(f"{name} ({task})" for task, name in process.tasks.items())
    where = f" on node {member.name}" * (not member.is_here)
    click.echo(f"{process.kind} {process.pid}{where}{': ' if runs else ''}{runs}")
    for one in read:
        click.echo(textwrap.indent(stacks.as_text(one, full=full), "  "))
    click.echo()
