"""Helpers of the commands that inspect sessions: choose the sessions, and join one as a tool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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
        click.ClickException: another user could change it.
    """
    from fastrt.config import RUNTIME_FOLDER, Config
    from fastrt.folders import UnsafeFolderError, has_private_folder

    # Sizes are given, so that the command also works on a machine without room for another store.
    folder = Config.load(num_workers=1, object_store_memory=_STORE_BYTES_ANY).runtime_dir
    try:
        has_private_folder(folder, RUNTIME_FOLDER)
    except UnsafeFolderError as exc:
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
