"""Collecting Python's garbage while the store is full: reference cycles may hold the last references to large values.

Python collects by the number of objects, not by the bytes that they keep, so values that only cycles hold would be
spilled without bound. A process collects when it finds no room itself, and when the daemon, which others have asked for
room, asks it: a worker or actor reads that message when it has nothing to do.
"""

from __future__ import annotations

import gc
import threading
import time

_PAUSE_S = 2.0  # between two collections at least,
_PAUSE_TIMES = 50  # and so many times as long as the last one took: they take at most 2 % of a process's time
_due = [float("-inf")]
_lock = threading.Lock()


def collect() -> bool:
    """Collect this process's garbage, also while `gc` is disabled, unless that was done a moment ago.

    Returns:
        Whether it was collected.
    """
    if time.monotonic() < _due[0] or not _lock.acquire(blocking=False):
        return False
    try:
        began = time.monotonic()
        gc.collect()
        ended = time.monotonic()
        _due[0] = ended + max(_PAUSE_S, _PAUSE_TIMES * (ended - began))
    finally:
        _lock.release()
    return True
