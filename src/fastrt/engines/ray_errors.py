"""Translate Ray's errors to fastrt's, so that `get` raises the same classes on both engines."""

from __future__ import annotations

import os
import re

import ray.exceptions as of_ray

from fastrt.errors import (
    ActorDiedError,
    ActorUnavailableError,
    FastrtError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfMemoryError,
    PendingCallsError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)

# The first match counts.
_CLASSES: tuple[tuple[str, type[FastrtError]], ...] = (
    ("GetTimeoutError", GetTimeoutError),
    ("TaskCancelledError", TaskCancelledError),
    ("NodeDiedError", NodeDiedError),
    ("ActorUnavailableError", ActorUnavailableError),
    ("RayActorError", ActorDiedError),
    ("WorkerCrashedError", WorkerCrashedError),
    ("OutOfMemoryError", OutOfMemoryError),
    ("ObjectStoreFullError", ObjectStoreFullError),
    ("ObjectLostError", ObjectLostError),
    ("PendingCallsLimitExceeded", PendingCallsError),
)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_HEAD = re.compile(r"ray::(?P<name>[^\s(]+).*?\(pid=(?P<pid>\d+)")
_FRAME = re.compile(r'  File "([^"]+)", line')
_NOT_THE_USERS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(of_ray.__file__))


def translated(exc: BaseException) -> FastrtError:
    """The error that `fastrt.get` raises if `ray.get` raised `exc`."""
    if isinstance(exc, of_ray.RayTaskError):
        cause: BaseException | None = exc.cause
        while isinstance(cause, of_ray.RayTaskError) and cause.cause is not cause:
            cause = cause.cause
        if isinstance(cause, of_ray.RayError):
            return translated(cause)
        text = _COLOURS.sub("", str(exc))
        head = _HEAD.search(text)
        name, pid = (head["name"], int(head["pid"])) if head else ("?", 0)
        text = _without_machinery(text)
        if isinstance(cause, BaseException):
            return TaskError.wrap(cause, task_name=name, pid=pid, traceback_text=text)
        return TaskError(name, pid, text)
    for name, error in _CLASSES:
        kind = getattr(of_ray, name, None)
        if kind is not None and isinstance(exc, kind):
            return error(str(exc))
    return FastrtError(f"{type(exc).__name__}: {exc}")


def _without_machinery(text: str) -> str:
    """Remove the frames of Ray and of fastrt from a traceback."""
    lines, keep = [], True
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame:
            keep = not frame[1].startswith(_NOT_THE_USERS)
        elif not line.startswith("    "):
            keep = not line.startswith("ray::")
        if keep:
            lines.append(line)
    return "Traceback (most recent call last):\n" + "\n".join(lines)
