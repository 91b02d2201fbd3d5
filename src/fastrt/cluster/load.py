"""Wakes an event loop when this node's load changes: when tasks begin to wait, or workers become idle or busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError

_LOOK_S = 0.125  # eight looks a second cost 0.02 % of a processor
_WAIT_S = 0.25  # how long `close` may take


class LoadWatch:
    """One thread that sleeps in the arena.

    Args:
        client: the process's attachment.
        loop: where `news` is called.
        news: called after each change.
    """

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, news: Callable[[], object]) -> None:
        self._client = client
        self._loop = loop
        self._news = news
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fastrt-load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        seen = 0
        while not self._closed:
            try:
                now = core.wait_load(self._client, seen, _WAIT_S, _LOOK_S)
                if now != seen and not self._closed:
                    self._loop.call_soon_threadsafe(self._news)
            except (FastrtError, RuntimeError):
                return  # the session is broken, or the loop closed: the process ends by what it meets itself
            seen = now
