"""Decorators that give operations of groups their types; the types themselves are in the stub beside this module.

A stub, because reading the overloads would make every import slower. At run time a decorator returns the method itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method."""
    return method


waits = combines = combines_on_one = combines_shared = divides = collects = collects_on_one = as_it_is
copies = scatters = sends = receives = as_it_is
