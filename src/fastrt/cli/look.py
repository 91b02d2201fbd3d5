"""Helpers of the commands that inspect sessions: choose the sessions, and join one as a tool."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from fastrt.store.client import Store

_STORE_BYTES_ANY = 64 << 20
_T = TypeVar("_T")


def runtime_folder() -> Path:
    """Return the folder of this user's sessions, which may not exist yet.

    Raises:
        click.ClickException: another user could change it, or a setting is invalid.
    """
    from fastrt.config import RUNTIME_FOLDER, Config
    from fastrt.errors import ConfigError
    from fastrt.folders import UnsafeFolderError, has_private_folder

    try:
        # Sizes are given, so that the command also works on a machine without room for another store.
        folder = Config.load(num_workers=1, object_store_memory=_STORE_BYTES_ANY).runtime_dir
        has_private_folder(folder, RUNTIME_FOLDER)
    except (ConfigError, UnsafeFolderError) as exc:
        raise click.ClickException(str(exc)) from exc
    return folder


def sockets(session: str | None) -> list[Path]:
    """Find the daemons' sockets of this user's sessions on this machine, and name dead sessions on standard error.

    Args:
        session: prefix of the session's name; None: any.
    Returns:
        At least one; a daemon listens at each.
    Raises:
        click.ClickException: there is none, or another user could have created it.
    """
    from fastrt.store.join import answers

    folder = runtime_folder()
    found = [path for path in sorted(folder.glob("*/node.sock")) if path.parent.name.startswith(session or "")]
    alive = [path for path in found if answers(str(path))]
    for path in found:
        if path not in alive and path.exists():
            leave_out(path, "its node daemon was killed; the next session that starts removes it")
    if not alive:
        named = f" whose name begins with {session!r}" if session else ""
        raise click.ClickException(f"no session{named} is running here (looked in {folder})")
    return alive


def leave_out(socket_path: Path, why: str) -> None:
    """Print on standard error why a session is not shown."""
    click.echo(f"fastrt: session {socket_path.parent.name[:8]} is left out: {why}", err=True)


def look_at(session: str | None, look: Callable[[Path], _T]) -> dict[Path, _T]:
    """Call `look` for each session, and name the sessions that it fails for on standard error.

    Args:
        session: as for `sockets`.
        look: called with the path of the daemon's socket; if it raises a `FastrtError`, the session is left out.
    Returns:
        The results of `look`, by path; at least one.
    Raises:
        click.ClickException: there is no session, or all are left out.
    """
    from fastrt.errors import FastrtError

    found: dict[Path, _T] = {}
    for path in sockets(session):
        try:
            found[path] = look(path)
        except FastrtError as exc:
            leave_out(path, str(exc))
    if not found:
        raise click.ClickException("no session answered")
    return found


@dataclass(frozen=True)
class Member:
    """A session to look at: one on this machine, or another node of its cluster.

    Attributes:
        path: of the daemon's socket: of the session itself, or of the node on this machine that asks the other one.
        id: of the session, which is its NodeID.
        name: of the node; "" for a session that is no node of a cluster.
        is_here: whether it is on this machine.
        address: the IP address of another node; "" for one that is here.
    """

    path: Path
    id: str
    name: str
    is_here: bool
    address: str = ""

    @property
    def title(self) -> str:
        """The words for people."""
        return f"session {self.id[:8]}{f' (node {self.name})' if self.name else ''}"


def members(session: str | None, node: str = "", this_node: bool = False) -> list[Member]:
    """Find the sessions of this user on this machine, and the other nodes of their clusters.

    Args:
        session: as for `sockets`.
        node: only the node with this name, or whose NodeID begins with this; empty: all.
        this_node: leave out the nodes on other machines.
    Returns:
        At least one; those on this machine first.
    Raises:
        click.ClickException: there is none.
    """
    from fastrt.errors import AttachError
    from fastrt.runtime.nodefile import nodes_here
    from fastrt.runtime.nodes import nodes_at

    here: dict[str, Member] = {}
    others: dict[str, Member] = {}
    paths = sockets(session)
    in_cluster = {one.socket_path: one.name for one in nodes_here(runtime_folder())}
    for path in paths:
        here[path.parent.name] = Member(path, path.parent.name, in_cluster.get(str(path), ""), True)
    for path in paths:
        if this_node or str(path) not in in_cluster:
            continue
        try:
            nodes = nodes_at(str(path), implied=True)
        except AttachError as exc:
            click.echo(f"fastrt: other nodes of {here[path.parent.name].title} are missing: {exc}", err=True)
            continue
        for one in nodes:
            if one["NodeID"] not in here:
                addresses = [name.partition(":")[2] for name in one["Resources"] if re.match("node:[^_]", name)]
                member = Member(path, one["NodeID"], one["NodeName"], False, *addresses[:1])
                others.setdefault(member.id, member)
    every = [*here.values(), *others.values()]
    found = [one for one in every if node in ("", one.name) or one.id.startswith(node)]
    if not found:
        there = ", ".join(one.name for one in every if one.name) or "no session here is a node of a cluster"
        raise click.ClickException(f"there is no node {node!r}; there are: {there}")
    return found


def ask_each(
    wanted: list[Member], here: Callable[[Member], _T | None], there: Callable[[str, str], _T], missing: str
) -> dict[Member, _T]:
    """Read something of each session: directly, or by the uplink of its node; nodes that do not answer are named.

    Args:
        wanted: from `members`.
        here: reads it of a session on this machine; None: it has named why there is nothing.
        there: asks another node: called with the socket of the daemon on this machine that asks, and the NodeID.
        missing: the words for a node that does not answer; `{}` stands for its name.
    """
    from fastrt.errors import FastrtError
    from fastrt.observe import elsewhere

    others = {one.id: str(one.path) for one in wanted if not one.is_here}
    answers = elsewhere.of_each(others, lambda node: there(others[node], node)) if others else {}
    found: dict[Member, _T] = {}
    for one in wanted:
        answer = here(one) if one.is_here else answers[one.id]
        if isinstance(answer, FastrtError):
            click.echo(f"fastrt: {missing.format(one.name)}: {answer}", err=True)
        elif answer is not None:
            found[one] = answer
    return found


def joined(socket_path: Path, command: str) -> AbstractContextManager[Store]:
    """Join a session as a tool during a `with` statement.

    Args:
        socket_path: of its node daemon.
        command: the name that other tools show for this process.
    Raises:
        AttachError: no daemon answers there.
    """
    from fastrt.observe import joining

    return joining.joined(socket_path, command)
