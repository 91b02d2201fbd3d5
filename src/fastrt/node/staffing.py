"""Keeps as many workers as there should be: starts those that are missing, and stops those that are too many.

Workers that sleep in a get are replaced, so there are too many once they wake. After a while some of them are stopped.
If worker after worker ends before it has joined, the session is broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastrt._core.memory.clients import Client, want_workers
from fastrt._core.tasks import tasks
from fastrt.node.cpu_room import CpuRoom
from fastrt.node.members import Member
from fastrt.node.worker_pool import Pool
from fastrt.store.messages import Stop

_SURPLUS_PATIENCE_S = 2.0
_STILLBORN_MAX = 5


class Staffing:
    """The number of workers of a node.

    Args:
        client: the daemon's attachment.
        pool: counts the workers.
        cpu_room: says how many there should be, and parks some.
        able: returns the workers that do not sleep in a get.
        fork: starts a worker.

    Attributes:
        stillborn: how many workers in a row have ended before they joined.
    """

    def __init__(
        self,
        client: Client,
        pool: Pool,
        cpu_room: CpuRoom,
        able: Callable[[], list[Member]],
        fork: Callable[[], None],
    ) -> None:
        self._client = client
        self._pool = pool
        self._cpu_room = cpu_room
        self._able = able
        self._fork = fork
        self._surplus_since = 0.0
        self.stillborn = 0

    def start_missing(self) -> bool:
        """Start the workers that are missing; False when workers cannot start: then the session is poisoned."""
        self._pool.size = self._cpu_room.park()
        want_workers(self._client, self._pool.size)
        if self.stillborn >= _STILLBORN_MAX:
            why = "workers cannot start: each one ended before it joined; see their error output"
            self._client.segment.poison(why)
            return False
        for _ in range(self._pool.missing(tasks.queued(self._client) > 0)):
            self._fork()
        return True

    def stop_surplus(self) -> None:
        """Stop workers that were needed only while others slept, once they have been too many for a while."""
        now = time.monotonic()
        if self._pool.surplus() <= 0:
            self._surplus_since = 0.0
        elif not self._surplus_since:
            self._surplus_since = now
        elif now - self._surplus_since > _SURPLUS_PATIENCE_S:
            self._surplus_since = 0.0
            for member in sorted(self._able(), key=self._cpu_room.has_parked)[-self._pool.surplus() :]:
                if member.link is not None:
                    member.link.post(Stop())  # the worker reads it when it is idle
