"""`fastrt stop`: end cluster nodes that `fastrt start` runs on this machine."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from fastrt.cli.look import runtime_folder

if TYPE_CHECKING:
    from fastrt.runtime.nodefile import NodeFile

_END_S = 15.0  # for the processes of a node
_STEP_S = 0.05
_SESSION_MIN = 4  # characters of a session's name; fewer could match by chance


@click.command(short_help="End this user's nodes on this machine.")
@click.argument("which", required=False, metavar="[ADDRESS|NAME]")
@click.option("--all", "every", is_flag=True, help="End the nodes of all clusters without asking.")
@click.option("--now", is_flag=True, help="Do not wait until no other node needs them.")
def stop(which: str | None, every: bool, now: bool) -> None:
    """End this user's nodes on this machine that `fastrt start` runs.

    ADDRESS is the address of a cluster's head: all nodes of the cluster on this machine end. NAME is the name of a
    node, or the beginning of its session's name (see fastrt status): this node ends. Without either, the nodes of the
    only cluster end; if nodes of several clusters run, the command asks, or, without a terminal, ends none.

    A node leaves in order: it gets no more work, and ends once no other node needs it, or its grace (`fastrt start
    --grace`) is over. A node whose head ends, too, ends at once.

    \f
    Raises:
        click.ClickException: the choice of nodes is ambiguous, or one does not end in time.
    """
    from fastrt.runtime.nodefile import nodes_here

    if which is not None and every:
        raise click.UsageError("Give either --all, or the address of a cluster or the name of a node.")
    nodes = nodes_here(runtime_folder())
    if which is not None:
        nodes = _named(nodes, which)
    if not every and len({node.head for node in nodes}) > 1:
        _ask(nodes, which)
    _end(nodes, now)
    click.echo(f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ended" if nodes else "no node runs here")


def _named(nodes: list[NodeFile], which: str) -> list[NodeFile]:
    """Choose the nodes that match an address or a name."""
    from fastrt.net.address import is_same

    for found in (
        [node for node in nodes if is_same(which, node.head)],
        [node for node in nodes if which == node.name or is_same(which, node.address)],
        [node for node in nodes if len(which) >= _SESSION_MIN and node.session.startswith(which)],
    ):
        if found:
            return found
    there = f"; these run:\n{_listed(nodes)}" if nodes else ""
    raise click.ClickException(f"no node or cluster {which!r} runs here{there}")


def _ask(nodes: list[NodeFile], which: str | None) -> None:
    """Ask the user whether to end nodes of several clusters."""
    what = "Nodes" if which is None else f"Nodes named {which!r}"
    click.echo(f"{what} of several clusters run here:\n{_listed(nodes)}", err=True)
    if not sys.stdin.isatty():
        raise click.ClickException("no node was ended: give the address of a cluster, the name of a session, or --all")
    click.confirm("End all of them?", abort=True, err=True)


def _listed(nodes: list[NodeFile]) -> str:
    lines = [
        f"  cluster {node.head}: node {node.name}, session {node.session[:8]}{', the head' if node.is_head else ''}"
        for node in sorted(nodes, key=lambda node: (node.head, not node.is_head))
    ]
    return "\n".join(lines)


def _end(nodes: list[NodeFile], now: bool) -> None:
    heads = {node.head for node in nodes if node.is_head}
    grace_s = 0.0
    for node in sorted(nodes, key=lambda node: node.is_head):  # the head last
        leaves = not node.is_head and not now and node.head not in heads
        node.terminate(signal.SIGTERM if leaves or node.is_head else signal.SIGINT)
        grace_s = max(grace_s, node.grace_s if leaves else 0.0)
    until = time.monotonic() + grace_s + _END_S
    while any(node.is_alive for node in nodes):
        if time.monotonic() > until:
            alive = ", ".join(str(node.pid) for node in nodes if node.is_alive)
            raise click.ClickException(f"after {grace_s + _END_S:.0f} s these processes still run: {alive}")
        time.sleep(_STEP_S)
