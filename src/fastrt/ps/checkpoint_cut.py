"""A server's part in a consistent cut through all servers, which a checkpoint is made at.

The head has all servers hold back new pushes, and each reports the last push of each client. Pushes that have begun at
any server are let through at all servers, and then each server writes its state. A cut has a name, which a server
forgets when it dies: its successor may have accepted more pushes, so it reports that the cut is lost, and the head
starts over.
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

_GRACE_S = 5.0  # for a client without a connection to reconnect; a dead client's push was never acknowledged


class Cut:
    """Handlers of one server for the head's cuts.

    Args:
        server: the server that they belong to.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._name: str | None = None
        self._last: dict[str, dict[str, int]] = {}  # by table and client: number of the last push that may pass
        self._connections: Counter[int] = Counter()  # by client
        self.handlers = {"hold": self._hold, "limits": self._limits, "release": self._release}

    def came(self, client: int, change: int) -> None:
        """Count a client's connections: one more (1) or one less (-1)."""
        self._connections[client] += change
        if not self._connections[client]:
            del self._connections[client]

    def stops(self, table: str, client: int, number: int) -> bool:
        """Whether the cut holds a push back."""
        return self._name is not None and number > self._last.get(table, {}).get(str(client), 0)

    def require(self, name: Any) -> None:
        """Check that this server still holds a cut.

        Raises:
            CutLostError: the server was restarted, or another cut has begun.
        """
        if name != self._name:
            raise CutLostError(f"server {self._server.index} does not hold this cut")

    def _hold(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Hold back new pushes, and report the last one of each client."""
        server = self._server
        with server.turn:
            self._name = str(meta["cut"])
            self._last = {name: shard.pace.latest() for name, shard in server.shards.items()}
            return Answer({"latest": self._last, "incarnation": server.incarnation})

    def _limits(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Let pushes pass that have begun at any server, and wait until they are complete here."""
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
                        f"a push that other servers received did not come to server {server.index} within "
                        f"{meta['timeout']:g} s"
                    )
                server.turn.wait((until if is_there else min(until, grace)) - now)
                self.require(meta["cut"])

    def _late(self) -> set[int]:
        """The clients whose last push has not come to all parts of this server."""
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
