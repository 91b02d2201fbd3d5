"""What members have sent to this one for a collective operation, by sender, in the order in which it came."""

from __future__ import annotations

import threading
from collections import deque

from fastrt.cluster.events import Role


class Mailbox:
    """Bytes by sender's role and rank. Any thread may put and take."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came: dict[tuple[Role, int], deque[bytes]] = {}

    def put(self, source: tuple[Role, int], data: bytes) -> None:
        """Bytes have come."""
        with self._changed:
            self._came.setdefault(source, deque()).append(data)
            self._changed.notify_all()

    def take(self, source: tuple[Role, int], timeout_s: float) -> bytes | None:
        """The next bytes of a sender, None when none have come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._came.get(source), timeout_s):
                return None
            return self._came[source].popleft()
