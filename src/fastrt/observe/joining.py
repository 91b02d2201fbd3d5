"""Joining a session from outside as a tool, which reads its tables and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastrt.errors import AttachError
from fastrt.store import join
from fastrt.store.client import Store
from fastrt.store.messages import MessageError


class Joined:
    """This process's part in a session as a tool.

    Args:
        path: of the session's node daemon.
        command: the name that other tools show for this process.
        patience_s: how long to wait for the daemon's answers.

    Attributes:
        store: the attachment.
        link: the connection to the daemon.
    Raises:
        AttachError: no daemon answers there, or it refuses.
    """

    def __init__(self, path: Path, command: str, patience_s: float = 3.0) -> None:
        self._path, self._patience_s = str(path), patience_s
        client, self.link = join.join(self._path, "tool", command, patience_s)
        self.store = Store(client, 0.0)
        self.store.socket_path = self._path

    def is_connected(self) -> bool:
        """Whether the daemon still holds its end of the connection."""
        try:
            while self.link.receive(0) is not None:
                pass
        except (EOFError, MessageError):
            return False
        return True

    def close(self) -> None:
        """Leave the session."""
        client = self.store.client
        self.store.close(keep_slot=True)
        with suppress(AttachError):  # the session has ended
            join.leave(self._path, client, self._patience_s)
        self.link.close()


@contextmanager
def joined(path: Path, command: str) -> Iterator[Store]:
    """Join a session as a tool during a `with` statement; arguments and errors as of `Joined`."""
    found = Joined(path, command)
    try:
        yield found.store
    finally:
        found.close()
