"""Collecting Python's garbage while the store is full: reference cycles may hold the last references to large values.

Python collects by the number of objects, not by the bytes that they keep, so values that only cycles hold would be
spilled without bound. A process collects when it finds no room itself, and when the daemon, which others have asked for
room, asks it: a worker or actor reads that message when it has nothing to do.

A worker without a task collects also after it has dropped code: a function that calls itself is a cycle, and a handle
that it captures keeps an actor, perhaps on another node.
"""

from __future__ import annotations

import gc
import threading
import time

_PAUSE_S = 2.0  # between two collections at least,
_PAUSE_TIMES = 50  # and so many times as long as the last one took: they take at most 2 % of a process's time
_due = [float("-inf")]
_lock = threading.Lock()
_expected = threading.Event()


def expect() -> None:
    """Note that this process has dropped code, or will soon, which cycles may hold."""
    _expected.set()


def is_expected() -> bool:
    """Return whether code was dropped since the last collection."""
    return _expected.is_set()


def collect() -> bool:
    """Collect this process's garbage, also while `gc` is disabled, unless that was done a moment ago.

    Returns:
        Whether it was collected.
    """
    if time.monotonic() < _due[0] or not _lock.acquire(blocking=False):
        return False
    try:
        began = time.monotonic()
        _expected.clear()
        gc.collect()
        ended = time.monotonic()
        _due[0] = ended + max(_PAUSE_S, _PAUSE_TIMES * (ended - began))
    finally:
        _lock.release()
    return True
