"""A consistent cut through all servers, for checkpoints: what one server does for it.

The head has all servers hold pushes back, and each says which were the last of each client. Those that have begun at
any server are let through to all, and then each writes what it has. A cut has a name, which a server forgets when it
dies: one that has begun anew may have taken more pushes, so it says that the cut is lost, and the head begins again.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fastrt.ps.endpoint import Answer, Caller
from fastrt.ps.errors import CutLostError, TableTimeoutError
from fastrt.ps.wire import Meta

if TYPE_CHECKING:
    from fastrt.ps.server import Server

_GRACE_S = 5.0  # for a client without a connection to come again; one that is dead never acknowledged its push


class Cut:
    """The handlers of one server.

    Args:
        server: whose.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._name: str | None = None
        self._last: dict[str, dict[str, int]] = {}  # by table and client: the last push that goes on
        self._connections: Counter[int] = Counter()  # by client
        self.handlers = {"hold": self._hold, "limits": self._limits, "release": self._release}

    def came(self, client: int, change: int) -> None:
        """A client's connection has begun (1) or ended (-1)."""
        self._connections[client] += change
        if not self._connections[client]:
            del self._connections[client]

    def stops(self, table: str, client: int, number: int) -> bool:
        """Whether a push must wait."""
        return self._name is not None and number > self._last.get(table, {}).get(str(client), 0)

    def require(self, name: Any) -> None:
        """Refuse to act for a cut that is not held.

        Raises:
            CutLostError: this server has begun anew, or there is another cut by now.
        """
        if name != self._name:
            raise CutLostError(f"server {self._server.index} does not hold this cut")

    def _hold(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Let no new push begin; says which were the last of each client."""
        server = self._server
        with server.turn:
            self._name = str(meta["cut"])
            self._last = {name: shard.pace.latest() for name, shard in server.shards.items()}
            return Answer({"latest": self._last, "incarnation": server.incarnation})

    def _limits(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Let those go on that have begun at any server, and wait until they are here."""
        server = self._server
        until, grace = time.monotonic() + float(meta["timeout"]), time.monotonic() + _GRACE_S
        with server.turn:
            self.require(meta["cut"])
            self._last = meta["latest"]
            server.turn.notify_all()
            while True:
                late = self._late()
                now = time.monotonic()
                is_there = any(self._connections[client] for client in late)
                if not late or (now >= grace and not is_there):
                    return Answer({})
                if now >= until:
                    raise TableTimeoutError(
                        f"a push that other servers have did not come to server {server.index} within "
                        f"{meta['timeout']:g} s"
                    )
                server.turn.wait((until if is_there else min(until, grace)) - now)
                self.require(meta["cut"])

    def _late(self) -> set[int]:
        """The clients whose last push has not come to all parts here."""
        shards = self._server.shards
        return {
            int(client)
            for table, clients in self._last.items()
            if table in shards
            for client, number in clients.items()
            if shards[table].pace.fresh(int(client), number).any()
        }

    def _release(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        with self._server.turn:
            self._name, self._last = None, {}
            self._server.turn.notify_all()
            return Answer({})
