"""The handle of a collective operation in the background."""

from __future__ import annotations

from fastrt.errors import CollectiveTimeout
from fastrt.net import background


class Handle(background.Handle):
    """A collective operation that runs in the background. `wait` for it, ask `done`, or `await` it.

    Its exceptions are raised there; `wait` raises `CollectiveTimeout` at the end of its own timeout. Arrays that were
    passed to it must not be used until it is done.
    """

    timeout_error = CollectiveTimeout
