"""Marks of stability that libraries for Ray put on their own names. They change nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["Deprecated", "DeveloperAPI", "PublicAPI", "RayDeprecationWarning"]


class RayDeprecationWarning(DeprecationWarning):
    """A name that is deprecated."""


def PublicAPI(*args: Any, **options: Any) -> Any:
    """Return a function or class as it is: `@PublicAPI` or `@PublicAPI(stability="beta")`."""
    return args[0] if args else lambda thing: thing


DeveloperAPI = Deprecated = PublicAPI
