"""Maps the store's fresh memory into a driver before its first put.

The daemon gives memory to the store (`node.populator`); each process still maps it page by page as it writes there,
which costs as much again where pages are small. One thread maps what the daemon has committed, and ends with it.
It pauses while threads wait for a processor, because a driver may never put what it maps.
"""

from __future__ import annotations

import threading
import time

from fastrt._core.memory import arena, background, populate
from fastrt._core.memory.clients import Client, ForkedHandle
from fastrt.errors import FastrtError
from fastrt.node.populator import has_free_processor

_STORE_MIN = 64 << 20  # smaller stores are committed at once
_STEP_S = 0.05
_PAUSE_MAX_S = 0.3  # while threads wait for a processor
_PATIENCE_S = 10.0  # without anything new to map


def map_ahead(client: Client, ahead: int) -> None:
    """Start the thread.

    Args:
        client: the driver's attachment.
        ahead: how much to map, in bytes.
    """
    if ahead and arena.room(client)[2] > _STORE_MIN:
        threading.Thread(target=_run, args=[client, ahead], name="fastrt-map", daemon=True).start()


def _run(client: Client, ahead: int) -> None:
    background.stand_back(19)
    at, moved_at = 0, time.monotonic()
    went_on_at = moved_at
    try:
        end = min(ahead, arena.room(client)[2])
        while at < end and time.monotonic() - moved_at < _PATIENCE_S:
            may_run = has_free_processor() or time.monotonic() > went_on_at + _PAUSE_MAX_S
            step = populate.map_committed(client, at) if may_run else 0
            if step:
                at, moved_at = at + step, time.monotonic()
            else:
                time.sleep(_STEP_S)
            if may_run:
                went_on_at = time.monotonic()
    except (FastrtError, ForkedHandle):  # the session has ended
        return
