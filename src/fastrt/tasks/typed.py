"""Type variables and the decorator of `.remote` methods; the types themselves are in the stub beside this module.

A stub, because reading them would make every import of fastrt slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Out = TypeVar("Out", covariant=True)
Handle = TypeVar("Handle", covariant=True)
Instance = TypeVar("Instance", covariant=True)


def submits(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give a `remote` method its types: a decorator that returns the method itself."""
    return method
