"""Advice: one warning for each cause, when a program is slow for a reason that fastrt can see.

Looked for only where time is lost already (a large value is written, a process goes to sleep), so nothing here is on a
fast path. `advice=False` or FASTRT_ADVICE=0 switches all of it off; Python's own filters know the category, too.
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
from fastrt.store.ref import ObjectRef

LARGE_BYTES = 1 << 20  # arguments from here on are worth a look
_TIMES = 10
_REMEMBERED = 64
_EDGE_BYTES = 4096
_LONE_GETS, _LONE_S = 50, 1.0
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_enabled = True
_given: set[str] = set()
_arrays: dict[int, tuple[weakref.ref[Any], int]] = {}
_prints: dict[tuple[int, int, int], int] = {}


def configure(enabled: bool) -> None:
    """A session begins: whether there is advice in it. Each cause may be told of again."""
    global _enabled
    _enabled = enabled
    for seen in (_given, _arrays, _prints):
        seen.clear()


def give(cause: str, text: str) -> None:
    """Warn, once for each cause, at the user's line that led here."""
    if not _enabled or cause in _given:
        return
    _given.add(cause)
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, PerformanceWarning, stacklevel=level)


def array_passed(array: Any) -> None:
    """A large array goes by value: say so when it is the same one again and again."""
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
    """Large arguments that are no arrays go by value; the same by their size and the bytes at both ends."""
    if not _enabled:
        return
    flat = [memoryview(part).cast("B") for _, part in parts]
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
    """Sees a program that submits a task and waits for it, again and again, while workers have nothing to do."""

    def __init__(self) -> None:
        self._count = 0
        self._slept_s = 0.0

    def before(self, client: Client, ref: ObjectRef) -> float:
        """A `get` of one reference is about to sleep; what to give to `after`, or 0."""
        if not _enabled or "gets in turn" in _given:
            return 0.0
        idle = inspect.idle(client)  # those who are about to be woken for what is queued, too
        if not idle or core_tasks.queued(client) > idle or calls.is_call(client, ref):
            self._count, self._slept_s = self._count // 2, self._slept_s / 2
            return 0.0
        return time.monotonic()

    def after(self, began: float) -> None:
        """It has slept."""
        self._count += 1
        self._slept_s += time.monotonic() - began
        if self._count >= _LONE_GETS and self._slept_s >= _LONE_S:
            give(
                "gets in turn",
                f"the last {self._count} calls of fastrt.get each waited for one task ({self._slept_s:.1f} s in all) "
                "while workers had nothing to do; if the tasks do not need each other's results, submit all of them "
                "first: fastrt.get([f.remote(x) for x in many])",
            )
