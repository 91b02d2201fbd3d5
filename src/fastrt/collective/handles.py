"""The handle of a collective operation in the background."""

from __future__ import annotations

from fastrt.errors import CollectiveTimeout
from fastrt.net import background
from fastrt.net.background import T


class Handle(background.Handle[T]):
    """A collective operation that runs in the background. `wait` for it, poll `done`, or `await` it.

    Made by `async_op=True` of an operation.

    Waiting raises the operation's error, and `CollectiveTimeout` at the end of the wait's own timeout. Do not use its
    arrays before it is done.
    """

    timeout_error = CollectiveTimeout
