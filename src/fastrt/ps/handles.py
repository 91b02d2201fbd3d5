"""Handles for operations in the background, and the check for gradients with NaN or infinite values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastrt.net import background
from fastrt.net.background import T
from fastrt.ps.errors import NotFiniteError, TableTimeoutError

Array = np.ndarray[Any, Any]


class Handle(background.Handle[T]):
    """A push or pull that runs in the background. `wait` for it, poll `done`, or `await` it.

    Made by `async_op=True` of a push or pull.

    Waiting raises the operation's error, and `TableTimeoutError` at the end of the wait's own timeout. Do not use its
    arrays before it is done.
    """

    timeout_error = TableTimeoutError


class Background:
    """Runs operations one after the other, in a thread that starts with the first of them."""

    def __init__(self) -> None:
        self._line = background.Line("fastrt-ps-async", Handle)

    def run(self, async_op: bool, function: Callable[..., Any], *args: Any) -> Any:
        """Run a call: in the background for a handle, or in this thread once no background call is pending."""
        if not (async_op or self._line.count):
            return function(*args)
        handle = self._line.submit(function, *args)
        return handle if async_op else handle.wait()

    def close(self) -> None:
        """Wait for the queued operations, and accept no more."""
        self._line.close(wait=True)


def is_finite(array: Array) -> bool:
    """Whether all values are finite. Checks their sum first, which reads the array once and makes no copy."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def refuse_not_finite(name: str, array: Array) -> None:
    """Apply the policy "raise".

    Raises:
        NotFiniteError: the gradient contains NaN or infinity.
    """
    if not is_finite(array):
        count = int(array.size - np.isfinite(array).sum())
        raise NotFiniteError(
            f"{count} of {array.size} values of a gradient for {name!r} are NaN or infinite; nothing was pushed. "
            'Create the table with nan="drop" or nan="pass" to allow them'
        )
