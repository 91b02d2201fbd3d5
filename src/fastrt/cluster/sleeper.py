"""A thread that sleeps in the arena for an event loop, which nothing in the arena can wake.

What has come is looked at on the loop's thread, while the other waits until that is done: whatever they share is used
by one thread at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError

_AGAIN_S = 0.01


class Sleeper:
    """Sleeps and looks in turns, from the first `stir` on.

    Args:
        client: this process's attachment.
        loop: where is looked.
        name: of the thread.
        sleep: returns when there is something to look at, or when it has slept for long enough.
        look: does what there is to do.
    """

    def __init__(
        self,
        client: Client,
        loop: asyncio.AbstractEventLoop,
        name: str,
        sleep: Callable[[], object],
        look: Callable[[], None],
    ) -> None:
        self._client = client
        self._loop = loop
        self._name = name
        self._sleep, self._look = sleep, look
        self._turn = threading.Semaphore(0)  # of the thread: it may sleep
        self._thread: threading.Thread | None = None
        self._closed = False

    def stir(self) -> None:
        """There is more to sleep for than before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            self._turn.release()
        else:
            self._client.wake(self._client.index)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._turn.release()
        if self._thread is not None:
            self._client.wake(self._client.index)
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._turn.acquire()
            if self._closed:
                return
            try:
                self._sleep()
            except FastrtError:  # something that it sleeps for has ended meanwhile: it must not miss all the rest
                time.sleep(_AGAIN_S)
            try:
                core.queued(self._client)
                self._loop.call_soon_threadsafe(self._look_once)
            except (FastrtError, RuntimeError):
                return  # the session is broken, or the loop closed: the process ends by what it meets itself

    def _look_once(self) -> None:
        try:
            self._look()
        finally:
            self._turn.release()
