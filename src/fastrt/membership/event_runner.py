"""Runs a user's functions for one member, on threads of their own, so that a slow one costs no heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastrt.membership.events import Phase, Role
from fastrt.membership.options import MemberEvent, MemberOptions

_log = logging.getLogger(__name__)
_DATA_THREADS = 4


class EventRunner:
    """Calls the functions in a member's options.

    Events and messages run one at a time and in order, and so do the functions around a scaling round. Handlers of
    data run at once in up to four threads.

    Args:
        options: of the member.
    """

    def __init__(self, options: MemberOptions) -> None:
        self._options = options
        self._events = ThreadPoolExecutor(1, "fastrt-member-events")
        self._scaling = ThreadPoolExecutor(1, "fastrt-member-scaling")
        self._data = ThreadPoolExecutor(_DATA_THREADS, "fastrt-member-data")

    def notify(self, event: MemberEvent) -> None:
        """Queue a call of `on_event`."""
        if self._options.on_event is not None:
            self._events.submit(_guarded, self._options.on_event, event)

    def deliver(self, number: int) -> None:
        """Queue a call of `on_message` with a published number."""
        if self._options.on_message is not None:
            self._events.submit(_guarded, self._options.on_message, number)

    async def before_scale(self, phase: Phase) -> None:
        """Call `before_scale` and wait for its end."""
        await self._scale(self._options.before_scale, phase)

    async def after_scale(self, phase: Phase) -> None:
        """Call `after_scale` and wait for its end."""
        await self._scale(self._options.after_scale, phase)

    async def answer(self, user_command: int, role: Role, rank: int, data: bytes) -> bytes:
        """Return what `on_data` answers.

        Raises:
            Exception: raised by that function.
        """
        handler = self._options.on_data
        assert handler is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._data, handler, user_command, role, rank, data)

    def close(self) -> None:
        """Drop the queued functions; a function that is running continues to its end."""
        for pool in (self._events, self._scaling, self._data):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _scale(self, function: Callable[[Phase], None] | None, phase: Phase) -> None:
        if function is not None:
            await asyncio.get_running_loop().run_in_executor(self._scaling, _guarded, function, phase)


def _guarded(function: Callable[[Any], None], argument: Any) -> None:
    """Call a user's function; an exception of it is logged and ends nothing else."""
    try:
        function(argument)
    except Exception:
        _log.exception("a function of the user's failed")
