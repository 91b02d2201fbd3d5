"""Advice: one warning for each cause when a program is slow for a reason that fastrt detects.

The checks run only where time is already lost (a large value is written, a process goes to sleep), so none is on a fast
path. `advice=False` or FASTRT_ADVICE=0 switches all of them off; Python's warning filters can select the category too.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.repair import inspect
from fastrt._core.tasks import calls
from fastrt._core.tasks import tasks as core_tasks
from fastrt.errors import PerformanceWarning
from fastrt.store.arrays import Strided
from fastrt.store.ref import ObjectRef

LARGE_BYTES = 1 << 20  # arguments from this size on are checked
_TIMES = 10
_REMEMBERED = 64
_EDGE_BYTES = 4096
_LONE_GETS, _LONE_S = 50, 1.0
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_enabled = True
_given: dict[str, str] = {}  # causes and texts
_arrays: dict[int, tuple[weakref.ref[Any], int]] = {}
_prints: dict[tuple[int, int, int], int] = {}


def configure(enabled: bool) -> None:
    """Begin a session with or without advice. Each cause may be reported again."""
    global _enabled
    _enabled = enabled
    for seen in (_given, _arrays, _prints):
        seen.clear()


def given() -> list[str]:
    """The advice that this process was given in this session."""
    return list(_given.values())


def give(cause: str, text: str) -> None:
    """Warn, once for each cause, at the user's line that led here."""
    if not _enabled or cause in _given:
        return
    _given[cause] = text
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, PerformanceWarning, stacklevel=level)


def array_passed(array: Any) -> None:
    """Count a large array that is passed by value; warn if the same one is passed repeatedly."""
    if not _enabled:
        return
    known, times = _arrays.get(id(array), (None, 0))
    times = times + 1 if known is not None and known() is array else 1
    if len(_arrays) >= _REMEMBERED:
        _arrays.clear()
    _arrays[id(array)] = (weakref.ref(array), times)
    if times == _TIMES:
        _repeated("array", array.nbytes)


def value_passed(nbytes: int, parts: Iterable[tuple[int, Any]]) -> None:
    """Count large arguments other than arrays that are passed by value; equal size and end bytes count as the same."""
    if not _enabled:
        return
    flat = [memoryview(part).cast("B") for _, part in parts if type(part) is not Strided]
    key = nbytes, zlib.crc32(flat[0][:_EDGE_BYTES]), zlib.crc32(flat[-1][-_EDGE_BYTES:])
    if len(_prints) >= _REMEMBERED:
        _prints.clear()
    times = _prints[key] = _prints.get(key, 0) + 1
    if times == _TIMES:
        _repeated("value", nbytes)


def _repeated(what: str, nbytes: int) -> None:
    give(
        "repeated argument",
        f"the same {what} of {nbytes / (1 << 20):.1f} MiB was passed by value {_TIMES} times, and copied each time; "
        "put it once, and pass the reference: ref = fastrt.put(value); f.remote(ref)",
    )


class LoneGets:
    """Detects a program that repeatedly submits one task and waits for it while workers are idle."""

    def __init__(self) -> None:
        self._count = 0
        self._slept_s = 0.0

    def before(self, client: Client, ref: ObjectRef) -> float:
        """Called before a `get` of one reference sleeps. Returns the time to pass to `after`, or 0 not to count it."""
        if not _enabled or "gets in turn" in _given:
            return 0.0
        idle = inspect.idle(client)  # includes workers that are about to be woken for queued tasks
        if not idle or core_tasks.queued(client) > idle or calls.is_call(client, ref):
            self._count, self._slept_s = self._count // 2, self._slept_s / 2
            return 0.0
        return time.monotonic()

    def after(self, began: float) -> None:
        """Count a `get` that has slept since `began`."""
        self._count += 1
        self._slept_s += time.monotonic() - began
        if self._count >= _LONE_GETS and self._slept_s >= _LONE_S:
            give(
                "gets in turn",
                f"the last {self._count} calls of fastrt.get each waited for one task ({self._slept_s:.1f} s in all) "
                "while workers had nothing to do; if the tasks do not need each other's results, submit all of them "
                "first: fastrt.get([f.remote(x) for x in many])",
            )
