"""Marks of stability that libraries for Ray put on their own names."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["Deprecated", "DeveloperAPI", "PublicAPI", "RayDeprecationWarning"]

_WORDS = "This API is deprecated and may be removed in future Ray releases."
_SUPPRESS = 'You could suppress this warning by setting env variable PYTHONWARNINGS="ignore::DeprecationWarning"'


class RayDeprecationWarning(DeprecationWarning):
    """A name that is deprecated."""


def PublicAPI(*args: Any, **options: Any) -> Any:
    """Return a function or class as it is: `@PublicAPI` or `@PublicAPI(stability="beta")`."""
    return args[0] if args else lambda thing: thing


DeveloperAPI = PublicAPI


def Deprecated(*args: Any, message: str = "", warning: bool = False, **more: Any) -> Any:
    """Say in the docstring of a function or class that it is deprecated: `@Deprecated` or `@Deprecated(message=...)`.

    Args:
        *args: the function or class, where there are no options.
        message: what to use in its place.
        warning: whether its calls give a `RayDeprecationWarning`, too.
        **more: refused.
    Raises:
        ValueError: another option.
    """
    if len(args) == 1 and callable(args[0]) and not (message or warning or more):
        return _deprecated(args[0], "", False)
    if more:
        raise ValueError(f"Unknown kwargs: {more.keys()}")
    return lambda thing: _deprecated(thing, message, warning)


def _deprecated(thing: Any, message: str, warning: bool) -> Any:
    lines = [f"**DEPRECATED**: {_WORDS}", *message.splitlines()]
    doc = (thing.__doc__ or "").rstrip()
    inner = [line for line in doc.splitlines() if line][1:2]
    indent = " " * (len(inner[0]) - len(inner[0].lstrip()) if inner else 0)
    text = "\n".join(f"{indent}    {line}" for line in lines)
    thing.__doc__ = f"{doc}\n\n{indent}.. warning::\n\n{text}\n{indent}"
    if not warning:
        return thing
    words = "\n".join(filter(None, (f"{_WORDS} {_SUPPRESS}", message)))
    if not inspect.isclass(thing):
        return _warning(thing, words)
    thing.__init__ = _warning(thing.__init__, words)  # type: ignore[method-assign]  # of the class, as Ray does
    return thing


def _warning(function: Callable[..., Any], words: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def warn(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(words, RayDeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warn
