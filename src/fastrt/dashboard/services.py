"""The services beside a session that a dashboard shows: a coordinator for JAX, and parameter servers.

They are no part of a session, so their addresses come from the command line. Each is asked in a thread while its page
is open, because an answer can take seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError

_EVERY_S = 2.0
_LEASE_S = 5.0  # asking ends so long after the last look
_ANSWER_S = 5.0
_LISTED = 100  # keys and barriers


@dataclass(frozen=True, slots=True)
class Addresses:
    """The services to show; an empty address: there is none.

    Attributes:
        coordinator: `host:port`.
        coordinator_tls: PEM files for it: its CA, and the certificate and key to show; all None: in the clear.
        servers: `host:port` of the HTTP endpoints of parameter servers.
        token_file: the token of the parameter servers; None: they have none.
    """

    coordinator: str = ""
    coordinator_tls: tuple[Path | None, Path | None, Path | None] = (None, None, None)
    servers: str = ""
    token_file: Path | None = None


class Polled:
    """Reads a value again and again in a thread, while it is looked at. A single thread calls the methods.

    Args:
        read: returns the value.

    Attributes:
        value: the last one; None before the first.
        why: why the last attempt failed; "" if it did not.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self.value: Any = None
        self.why = ""
        self._looked_at = 0.0
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Go on reading: a page is open."""
        self._looked_at = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._poll, name="fastrt-service", daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        pause = threading.Event()
        while time.monotonic() - self._looked_at < _LEASE_S:
            try:
                self.value, self.why = self._read(), ""
            except (FastrtError, OSError, ValueError) as exc:
                self.why = str(exc)
            pause.wait(_EVERY_S)


def coordinator(address: str, tls: tuple[Path | None, Path | None, Path | None]) -> Any:
    """A snapshot of a coordinator: a SnapshotResponse with at most 100 barriers, and no keys.

    Raises:
        FastrtError: it does not answer.
        OSError: a PEM file cannot be read.
    """
    from fastrt.coordination.snapshot import credentials, fetch

    return fetch(address, credentials(*tls), _ANSWER_S, with_barriers=True, limit=_LISTED)


def servers(address: str, token_file: Path | None) -> dict[str, Any]:
    """The state of parameter servers: state, nodes, and for each rank the statistics of its tables.

    Raises:
        FastrtError: they do not answer, or the token file cannot be used.
        ValueError: an answer is malformed.
    """
    from fastrt.foreign_text import read_object
    from fastrt.membership import http
    from fastrt.net.grpc.auth import read_token
    from fastrt.net.grpc.trust import trust_of

    trust = None if token_file is None else trust_of(read_token(token_file))
    _, state = http.request(address, trust, "GET", "/state", timeout_s=_ANSWER_S)
    _, nodes = http.request(address, trust, "GET", "/nodes", timeout_s=_ANSWER_S)
    status, found = http.request(address, trust, "POST", "/queryInstance", b"{}", timeout_s=_ANSWER_S)
    ranks = found.get("result", {}) if status == 200 and isinstance(found, dict) else {}
    stats = {rank: read_object(text.encode(), "the statistics of a server") for rank, text in ranks.items()}
    return {"state": str(state.get("cluster_state", "")), "nodes": nodes.get("node_ids", []), "stats": stats}


class Services:
    """The readers of the services that a dashboard shows.

    Args:
        addresses: where they are.

    Attributes:
        addresses: as given.
        coordinator, servers: None where there is no address.
    """

    def __init__(self, addresses: Addresses) -> None:
        self.addresses = addresses
        self.coordinator = (
            Polled(lambda: coordinator(addresses.coordinator, addresses.coordinator_tls))
            if addresses.coordinator
            else None
        )
        self.servers = Polled(lambda: servers(addresses.servers, addresses.token_file)) if addresses.servers else None
