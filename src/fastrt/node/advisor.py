"""Advice about causes of slowness that only the daemon can see; drivers print it once for each cause."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.repair import pages
from fastrt._core.tasks import tasks
from fastrt.node.worker_pool import Pool

_TINY_MANY = 50_000
_TINY_BYTES = 1024
_SAMPLE = 500  # entries
_EXHAUSTED_S = 1.0
_EVERY_S = 0.5


class Advisor:
    """Examines the arena and the pool twice a second.

    Args:
        client: the daemon's attachment.
        pool: the workers.
        say: prints a line at the drivers.
    """

    def __init__(self, client: Client, pool: Pool, say: Callable[[str], None]) -> None:
        self._client = client
        self._pool = pool
        self._say = say
        self._looked_at = 0.0
        self._exhausted_since = 0.0
        self._given: set[str] = set()

    def look(self, now: float | None = None) -> None:
        """Examine the arena and the pool, unless the last time was less than half a second ago.

        Args:
            now: monotonic time, in seconds.
        """
        now = time.monotonic() if now is None else now
        if now - self._looked_at < _EVERY_S:
            return
        self._looked_at = now
        self._tiny_values()
        self._blocked_workers(now)

    def _give(self, cause: str, text: str) -> None:
        if cause not in self._given:
            self._given.add(cause)
            self._say(f"fastrt: {text} (FASTRT_ADVICE=0 keeps such advice away)\n")

    def _tiny_values(self) -> None:
        if "tiny" not in self._given and (text := on_tiny_values(self._client)):
            self._give("tiny", text)

    def _blocked_workers(self, now: float) -> None:
        pool = self._pool
        few = pool.may_grow() or not pool.blocked or 2 * len(pool.blocked) < len(pool.pids)
        if few or not tasks.queued(self._client):
            self._exhausted_since = 0.0
        elif not self._exhausted_since:
            self._exhausted_since = now
        elif now - self._exhausted_since >= _EXHAUSTED_S:
            self._give(
                "blocked",
                f"{len(pool.blocked)} of {len(pool.pids)} workers sleep in fastrt.get inside their tasks, while tasks "
                "are queued and no more workers can be started in their place. Pass references as arguments instead of "
                "getting them inside (a task whose arguments are not ready needs no worker)",
            )


def on_tiny_values(client: Client) -> str:
    """Advice for a program with very many small values; "" if there are few, by a sample of the objects."""
    there = pages.small_values(client, _SAMPLE, _TINY_BYTES, _TINY_MANY)
    if there < _TINY_MANY:
        return ""
    return (
        f"about {there:,} small values that were put one by one are alive; each is an object of its own. Put "
        "lists of them, or pass them as arguments: small ones travel with the task"
    )
