"""An event loop in a thread, which runs coroutines for other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, which runs until `stop`.

    Args:
        name: the thread's name.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and return its result; any other thread may call this.

        A timeout, or an interrupt of the caller, cancels the coroutine.

        Args:
            work: the coroutine.
            timeout_s: seconds; None: no limit.
        Raises:
            concurrent.futures.TimeoutError: it has not ended in time.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self, patience_s: float | None = None) -> None:
        """End the thread and close the loop.

        Args:
            patience_s: seconds to wait at most until the thread has ended; None: no limit.
        """
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(patience_s)
        self.loop.close()
