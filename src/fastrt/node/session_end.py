"""The end of a session: orders workers and actors to end, for a limited time. They run cleanup code of users."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from fastrt._core.memory.clients import Client
from fastrt.node.members import Members
from fastrt.node.worker_pool import Pool

_WORKERS_END_S = 1.5  # for tasks that run at the end of the session: a worker exits after 1 s
_LATE_S = 0.5  # an actor's process exits when its time is over; the daemon waits a little longer


class SessionEnd:
    """The processes that must end with the session.

    Args:
        client: the daemon's attachment.
        pool: has the pids of workers and actors.
        members: those of them that have joined.
        cleanup_timeout_s: how long the cleanup code of actors may take.
    """

    def __init__(self, client: Client, pool: Pool, members: Members, cleanup_timeout_s: float) -> None:
        self._client = client
        self._pool = pool
        self._members = members
        self._timeout_s = cleanup_timeout_s + _LATE_S
        self._started_at = time.monotonic()
        self._ordered: set[int] = set()

    def wait_on(self) -> bool:
        """Order the processes to end that were not ordered yet; return whether the daemon should wait for some."""
        waited = time.monotonic() - self._started_at
        pids = set(self._pool.actors)
        if waited < _WORKERS_END_S:
            pids |= self._pool.pids
        if not pids or waited > self._timeout_s:
            return False
        for pid in pids - self._ordered:
            self._order(pid)
        self._ordered |= pids
        return True

    def _order(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
        member = self._members.get(pid)
        if member is not None:  # its sleep may have begun after the signal came
            self._client.wake(member.index)
