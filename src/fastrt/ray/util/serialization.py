"""Serializers of a program's own for its classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastrt.store import reducers


def register_serializer(cls: type, *, serializer: Callable[[Any], Any], deserializer: Callable[[Any], Any]) -> None:
    """Pickle the values of a class by two functions, in this process; workers register theirs themselves.

    Args:
        cls: the class; its subclasses are not concerned.
        serializer: called with a value; returns one that can be pickled.
        deserializer: called with that one where the value is read; returns the value.
    Source:
        The semantics of `ray.util.register_serializer`.
    """
    reducers.register(cls, lambda value: (deserializer, (serializer(value),)))


def deregister_serializer(cls: type) -> None:
    """Pickle the values of a class as pickle does again."""
    reducers.register(cls, None)
