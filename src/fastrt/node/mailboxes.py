"""The mailboxes of actors whose processes are on other nodes: this process stands for them and passes their calls on.

One thread sleeps for all of them, as an actor's own process does for its one. What has come is looked at on the loop's
thread, while the other waits until that is done: an inbox is used by one thread at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from fastrt._core import inbox
from fastrt._core import tasks as core
from fastrt._core.clients import Client
from fastrt._core.inbox import Inbox
from fastrt.errors import FastrtError

_NAP_S = 1.0


class Mailboxes:
    """Tells the actors' side of each stream what has come.

    Args:
        client: this process's attachment.
        loop: where callbacks run.
    """

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._open: dict[int, tuple[Inbox, Callable[[list[int]], None]]] = {}
        self._turn = threading.Semaphore(0)  # of the thread: it may use the inboxes
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, actor: int, then: Callable[[list[int]], None]) -> None:
        """Have `then(calls)` called when there is something for an actor: claimed calls, or none and other news."""
        self._open[actor] = (Inbox(self._client, actor, True), then)
        if self._thread is None:
            self._thread = threading.Thread(target=self._listen, name="fastrt-mailboxes", daemon=True)
            self._thread.start()
            self._turn.release()
        else:
            self._client.wake(self._client.index)

    def close_one(self, actor: int) -> None:
        """Look at an actor's mailbox no more."""
        self._open.pop(actor, None)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._turn.release()
        if self._thread is not None:
            self._client.wake(self._client.index)
            self._thread.join()

    def _listen(self) -> None:
        while True:
            self._turn.acquire()
            if self._closed:
                return
            try:
                inbox.wait_any(self._client, [one for one, _ in list(self._open.values())], _NAP_S)
                self._loop.call_soon_threadsafe(self._look)
            except (FastrtError, RuntimeError):
                return  # the session is broken, or the loop closed: the process ends by what it meets itself

    def _look(self) -> None:
        try:
            for actor, entry in list(self._open.items()):
                if self._open.get(actor) is entry:  # what came before it may have closed it
                    one, then = entry
                    then([task for task in map(one.claim, one.look()) if task != core.NO_TASK])
        finally:
            self._turn.release()
