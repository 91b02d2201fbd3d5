"""What an operation in the background gives: something to wait for, and what a gradient that is not finite leads to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastrt.net import background
from fastrt.ps.errors import NotFiniteError, TableTimeoutError

Array = np.ndarray[Any, Any]


class Handle(background.Handle):
    """A push or pull that runs in the background. `wait` for it, ask `done`, or `await` it.

    Its exceptions are raised there; `wait` raises `TableTimeoutError` at the end of its own timeout. Arrays that were
    passed to it must not be used until it is done.
    """

    timeout_error = TableTimeoutError


class Background:
    """Runs operations one after the other, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._line = background.Line("fastrt-ps-async", Handle)

    def run(self, async_op: bool, function: Callable[..., Any], *args: Any) -> Any:
        """Make a call: in the background, for a handle, or now, after those that are under way there."""
        if not (async_op or self._line.count):
            return function(*args)
        handle = self._line.submit(function, *args)
        return handle if async_op else handle.wait()

    def close(self) -> None:
        """Take no more, and wait for queued operations."""
        self._line.close(wait=True)


def is_finite(array: Array) -> bool:
    """Whether all values are numbers: by their sum first, which reads the array once and makes no other."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def refuse_not_finite(name: str, array: Array) -> None:
    """What the policy "raise" does.

    Raises:
        NotFiniteError: there is NaN or infinity.
    """
    if not is_finite(array):
        count = int(array.size - np.isfinite(array).sum())
        raise NotFiniteError(
            f"{count} of {array.size} values of a gradient for {name!r} are NaN or infinite; nothing was pushed. "
            'Make the table with nan="drop" or nan="pass" if they may be'
        )
