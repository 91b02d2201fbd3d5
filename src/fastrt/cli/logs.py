"""`fastrt logs`: what tasks and actors have printed, also after the program's end."""

from __future__ import annotations

import json
import string
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from fastrt.cli.look import runtime_folder
from fastrt.config import size_text
from fastrt.ids import OWN_DIGITS

if TYPE_CHECKING:
    from fastrt.node.log_files import LogFolder, LogLine
    from fastrt.runtime.node_logs import Log

_PIPE_CLOSED = 141  # as the shell reports a program that SIGPIPE ended


def _task_digits(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value.strip(string.hexdigits):
        raise click.BadParameter(f"{value!r} is no id of a task; `fastrt list tasks` shows the ids, of up to 16 digits")
    return value[:OWN_DIGITS].lower()  # Ray's ids are longer, and begin with the same digits


@click.command(short_help="Show what tasks and actors have printed.")
@click.option(
    "--task", default="", metavar="ID", callback=_task_digits, help="Only of the task whose id begins with this."
)
@click.option("--actor", default="", metavar="NAME", help="Only of actors with this name, class or repr, or number.")
@click.option("--worker", default=0, metavar="PID", help="Only of the process with this number.")
@click.option("--node", default="", metavar="NAME|ID", help="Of the last session of this node, also on other machines.")
@click.option("--all-nodes", is_flag=True, help="Of all nodes of the cluster, by time.")
@click.option("--session", default="", help="Of the session whose name begins with this; see --sessions.")
@click.option("-f", "--follow", is_flag=True, help="Wait for further lines until the session ends.")
@click.option("-n", "--tail", "count", type=click.IntRange(0), help="Only the last lines, so many.")
@click.option("-t", "--time", "with_time", is_flag=True, help="Print the time of each line.")
@click.option("--raw", is_flag=True, help="Print the lines without their prefix.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each line.")
@click.option("--sessions", "lists", is_flag=True, help="List the sessions whose lines are kept.")
def logs(
    task: str, actor: str, worker: int, node: str, all_nodes: bool, session: str, follow: bool, count: int | None,
    with_time: bool, raw: bool, as_json: bool, lists: bool,
) -> None:  # fmt: skip
    """Show the lines of the session that printed last, oldest first. The lines of the last five sessions are kept.

    An option with several filters shows the lines that match all of them. Lines of stderr go to stderr. The lines of
    other nodes come over the network, also while their workers are busy and after the program's end. A node that does
    not answer within five seconds is named on standard error.
    \f
    Raises:
        click.ClickException: no session has log files, or none fits.
    """
    from fastrt.runtime import node_logs

    if lists:
        _show_sessions([one for one in _folders() if _fits(one, session, node)])
        return
    found = _logs(node, all_nodes, session, {"task": task, "actor": actor, "worker": worker})

    def on_silent(name: str, exc: Exception) -> None:
        click.echo(f"fastrt: lines of node {name} are missing: {exc}", err=True)

    try:
        _show(node_logs.read(found, on_silent, count=count, follow=follow), with_time, raw, as_json)
    except BrokenPipeError:  # `fastrt logs | head`
        sys.stderr.close()
        sys.exit(_PIPE_CLOSED)


def _logs(node: str, all_nodes: bool, session: str, wanted: dict[str, Any]) -> list[Log]:
    from fastrt.runtime.node_logs import LocalLog, logs_of
    from fastrt.runtime.nodefile import nodes_here

    found = [] if all_nodes else [one for one in _folders() if _fits(one, session, node)]
    if found:
        return [LocalLog("", found[0], wanted)]
    logs: list[Log] = []
    if all_nodes or node:
        logs = logs_of([one for one in nodes_here(runtime_folder()) if one.session.startswith(session)], node, wanted)
    if not logs:
        raise click.ClickException(
            f"no session has printed anything here{' that fits' if session or node else ''}; `fastrt logs --sessions` "
            "lists those whose lines are kept"
        )
    return logs


def _fits(one: LogFolder, session: str, node: str) -> bool:
    return one.session.startswith(session) and (node in ("", one.node) or one.session.startswith(node))


def _folders() -> list[LogFolder]:
    from fastrt.folders import UnsafeFolderError
    from fastrt.observe import log_files

    try:
        return log_files.sessions(runtime_folder())
    except UnsafeFolderError as exc:
        raise click.ClickException(str(exc)) from exc


def _show(batches: Iterable[list[tuple[str, LogLine]]], with_time: bool, raw: bool, as_json: bool) -> None:
    from fastrt.observe import log_files

    for lines in batches:
        for node, line in lines:
            if as_json:
                sys.stdout.write(json.dumps(log_files.as_row(line, node)) + "\n")
                continue
            stream, other = (sys.stderr, sys.stdout) if line.is_error else (sys.stdout, sys.stderr)
            other.flush()  # in one terminal the lines keep their order
            stream.write((line.text if raw else log_files.as_text(line, with_time, node)) + "\n")
        sys.stdout.flush()


def _show_sessions(found: list[LogFolder]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fastrt.cli.tables import table_console

    table = Table(box=box.SIMPLE)
    for name in ("session", "program", "node", "state", "first line", "last line", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for one in found:
        at = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) for when in (one.started, one.written)]
        state = "runs" if one.is_alive else "ended"
        table.add_row(
            one.session[:8], escape(one.program), escape(one.node), state, *at, size_text(one.nbytes)
        )  # fmt: skip
    table_console().print(table)
