"""The mailboxes of actors whose processes are on other nodes: this process stands for them and passes their calls on.

One thread sleeps for all of them, as an actor's own process does for its one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import inbox
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.inbox import Inbox
from fastrt.cluster.sleeper import Sleeper

_NAP_S = 1.0


class Mailboxes:
    """Tells the actors' side of each stream what has come.

    Args:
        client: this process's attachment.
        loop: where callbacks run.
    """

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._open: dict[int, tuple[Inbox, Callable[[list[int]], None]]] = {}
        self._sleeper = Sleeper(client, loop, "fastrt-mailboxes", self._sleep, self._look)

    def open(self, actor: int, then: Callable[[list[int]], None]) -> None:
        """Have `then(calls)` called when there is something for an actor: claimed calls, or none and other news."""
        self._open[actor] = (Inbox(self._client, actor, True), then)
        self._sleeper.stir()

    def close_one(self, actor: int) -> None:
        """Look at an actor's mailbox no more."""
        self._open.pop(actor, None)

    def close(self) -> None:
        """End the thread."""
        self._sleeper.close()

    def _sleep(self) -> None:
        inbox.wait_any(self._client, [one for one, _ in list(self._open.values())], _NAP_S)

    def _look(self) -> None:
        for actor, entry in list(self._open.items()):
            if self._open.get(actor) is entry:  # what came before it may have closed it
                one, then = entry
                then([task for task in map(one.claim, one.look()) if task != core.NO_TASK])
