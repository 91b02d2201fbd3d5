"""Finds why another process of the cluster cannot be reached, by a TLS handshake; reports each reason once."""

from __future__ import annotations

import asyncio
import sys
import time

from fastrt.net.grpc.identity import Identity

_AGAIN_S = 10.0  # between two handshakes with the same address
_HANDSHAKE_S = 2.0


class Reasons:
    """Finds and reports reasons. gRPC reports only UNAVAILABLE for every failure of the TLS handshake.

    Args:
        identity: the cluster's identity.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._found: dict[str, tuple[float, str | None]] = {}
        self._reported: dict[str, str] = {}

    async def find(self, address: str) -> str | None:
        """Return why the process at an address is not part of this cluster; an answer is reused for ten seconds.

        Args:
            address: `host:port`.
        Returns:
            The reason; None when the process is part of the cluster, or nothing answers at the address.
        """
        at, why = self._found.get(address, (0.0, None))
        if not at or time.monotonic() - at > _AGAIN_S:
            why = await asyncio.to_thread(self._identity.why_refused, address, _HANDSHAKE_S)
            self._found = {one: old for one, old in self._found.items() if time.monotonic() - old[0] <= _AGAIN_S}
            if why is not None:  # not cached otherwise: a process that is starting may be checked again at once
                self._found[address] = (time.monotonic(), why)
        return why

    def report(self, about: str, text: str) -> None:
        """Write to standard error, unless this was the last text about this subject. An empty text only resets it."""
        if text and self._reported.get(about) != text:
            sys.stderr.write(f"fastrt: {text}\n")
        self._reported[about] = text
