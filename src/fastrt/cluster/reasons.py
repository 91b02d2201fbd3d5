"""Why another process of the cluster cannot be reached: found by a TLS handshake, said once for each reason."""

from __future__ import annotations

import asyncio
import sys
import time

from fastrt.net.grpc.identity import Identity

_AGAIN_S = 10.0  # between two handshakes with the same address
_HANDSHAKE_S = 2.0


class Reasons:
    """Finds and says reasons. gRPC says only UNAVAILABLE for every failure of the TLS handshake.

    Args:
        identity: of the cluster.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._found: dict[str, tuple[float, str | None]] = {}
        self._reported: dict[str, str] = {}

    async def find(self, address: str) -> str | None:
        """Say why the process at an address is not part of this cluster, as of at most ten seconds ago.

        Args:
            address: `host:port`.
        Returns:
            The reason in words; None when it is part of the cluster, or nothing answers there.
        """
        at, why = self._found.get(address, (0.0, None))
        if not at or time.monotonic() - at > _AGAIN_S:
            why = await asyncio.to_thread(self._identity.why_refused, address, _HANDSHAKE_S)
            self._found = {one: old for one, old in self._found.items() if time.monotonic() - old[0] <= _AGAIN_S}
            if why is not None:  # a process that is only starting may be asked again at once
                self._found[address] = (time.monotonic(), why)
        return why

    def report(self, about: str, text: str) -> None:
        """Write to standard error, unless it was the last thing said about the same; an empty text says nothing."""
        if text and self._reported.get(about) != text:
            sys.stderr.write(f"fastrt: {text}\n")
        self._reported[about] = text
