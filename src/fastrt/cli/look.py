"""What `fastrt list`, `fastrt memory` and `fastrt timeline` share: which session is meant, and joining it as a tool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fastrt.store.client import Store

_JOIN_S = 3.0
_STORE_BYTES_ANY = 64 << 20


def runtime_folder() -> Path:
    """Return the folder of this user's sessions, which may not be there yet.

    Raises:
        click.ClickException: another user could change it.
    """
    from fastrt.config import RUNTIME_FOLDER, Config
    from fastrt.folders import UnsafeFolderError, has_private_folder

    # Sizes are given so that a machine with no room for another store can still be looked at.
    folder = Config.load(num_workers=1, object_store_memory=_STORE_BYTES_ANY).runtime_dir
    try:
        has_private_folder(folder, RUNTIME_FOLDER)
    except UnsafeFolderError as exc:
        raise click.ClickException(str(exc)) from exc
    return folder


def sockets(session: str | None) -> list[Path]:
    """The daemons' sockets of this user's sessions on this machine.

    Args:
        session: how the session's name must begin; None: any.
    Raises:
        click.ClickException: there is none, or another user could have made it.
    """
    folder = runtime_folder()
    found = [path for path in sorted(folder.glob("*/node.sock")) if path.parent.name.startswith(session or "")]
    if not found:
        named = f" whose name begins with {session!r}" if session else ""
        raise click.ClickException(f"no session{named} is running here (looked in {folder})")
    return found


@contextmanager
def joined(socket_path: Path) -> Iterator[Store]:
    """A session, joined as a tool for the length of a `with` statement.

    Raises:
        click.ClickException: nobody answers there, or the session ends meanwhile.
    """
    from fastrt.errors import FastrtError
    from fastrt.store import attach
    from fastrt.store.client import Store

    try:
        client, link = attach.join(str(socket_path), "tool", "fastrt list", _JOIN_S)
    except FastrtError as exc:
        raise click.ClickException(f"session {socket_path.parent.name[:8]}: {exc}") from exc
    try:
        store = Store(client, 0.0)
        store.socket_path = str(socket_path)
        yield store
    except FastrtError as exc:
        raise click.ClickException(f"session {socket_path.parent.name[:8]}: {exc}") from exc
    finally:
        client.close()
        link.send(op="bye")
        link.close()


def bytes_in_words(nbytes: int) -> str:
    """For a table: "1.5 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} B"
