"""Sources of the uplink's `LoopWaiter`: changes of this node's load, and tasks that other nodes should run."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks as core
from fastrt.store.waiter import NEVER_S

_PACE_S = 0.125  # between two reports of changes: at most 8 per second


class LoadWatch:
    """Reports when tasks begin to wait, or workers become idle or busy. A change wakes this process.

    Args:
        client: the process's attachment.
        report: called after a change, not more often than eight times a second.
    """

    def __init__(self, client: Client, report: Callable[[], object]) -> None:
        self._client = client
        self._report = report
        self._seen = 0
        self._next_at = 0.0

    def look(self) -> None:
        """Report a change since the last report."""
        now = time.monotonic()
        if now < self._next_at:
            return
        load = core.load(self._client)
        if load != self._seen:
            self._seen, self._next_at = load, now + _PACE_S
            self._report()

    def arm(self) -> float:
        """Have the next change wake this process, once the next report is due."""
        left = self._next_at - time.monotonic()
        if left > 0:
            return left
        return NEVER_S if core.load(self._client, True) == self._seen else 0.0


class Claims:
    """Claims tasks on a node without workers, as an idle worker does: a push wakes this process.

    Args:
        client: the process's attachment.
        take: called with the tasks that were claimed.

    Attributes:
        room: how many tasks other nodes have room for.
    """

    def __init__(self, client: Client, take: Callable[[list[int]], None]) -> None:
        self._client = client
        self._take = take
        self._stands_by = False
        self.room = 0

    def stop(self) -> None:
        """Claim no more until other nodes have room again."""
        self.room = 0

    def look(self) -> None:
        """Claim what other nodes have room for."""
        tasks: list[int] = []
        while len(tasks) < self.room and core.queued(self._client):
            task = core.next_task(self._client, 0.0, 0.0)
            if task < 0:
                break
            tasks.append(task)
        if tasks:
            self._take(tasks)

    def arm(self) -> float:
        """Have the next push wake this process, while another node has room."""
        stands_by, self._stands_by = self._stands_by, self.room > 0
        if self._stands_by:
            return 0.0 if core.stand_by(self._client, True) else NEVER_S
        if stands_by:
            core.stand_by(self._client, False)
        return NEVER_S
