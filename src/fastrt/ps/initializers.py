"""First values of parameters: the same for a key or place wherever and whenever it is made.

Random values are a function of seed, key and column alone (SplitMix64 as a counter-based generator), so a row has the
same first values on any number of servers and after any restart.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014; Box, Muller, 1958.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Array = np.ndarray[Any, Any]


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


def _uniform(seed: int, keys: Array, dim: int) -> Array:
    """Doubles from 0 to 1, both excluded, a row for each key."""
    begin = _mix(keys.astype(np.uint64, copy=False) ^ _mix(np.array([seed], np.uint64) + _GOLDEN))
    counted = begin[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN
    units: Array = ((_mix(counted) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return units


@dataclass(frozen=True)
class Initial:
    """What all kinds have."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}.{field.name} is {value!r}; it must be a finite number")

    def rows(self, keys: Array, dim: int) -> Array:
        """The first values (float32) of rows of `dim`, one for each key (uint64).

        Raises:
            NotImplementedError: always, here.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Name and numbers, for a message or a file."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Constant(Initial):
    """All values the same."""

    value: float = 0.0

    def rows(self, keys: Array, dim: int) -> Array:
        """See `Initial.rows`."""
        return np.full((len(keys), dim), self.value, np.float32)


@dataclass(frozen=True)
class Normal(Initial):
    """Normally distributed around 0."""

    std: float = 0.01
    seed: int = 0

    def rows(self, keys: Array, dim: int) -> Array:
        """See `Initial.rows`."""
        pairs = (dim + 1) // 2
        units = _uniform(self.seed, keys, 2 * pairs)
        radius = np.sqrt(-2.0 * np.log(units[:, :pairs])) * self.std
        angle = units[:, pairs:] * (2.0 * np.pi)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return np.ascontiguousarray(both[:, :dim], np.float32)


@dataclass(frozen=True)
class Uniform(Initial):
    """Equally distributed between two values."""

    low: float = -0.01
    high: float = 0.01
    seed: int = 0

    def rows(self, keys: Array, dim: int) -> Array:
        """See `Initial.rows`."""
        return (self.low + (self.high - self.low) * _uniform(self.seed, keys, dim)).astype(np.float32)


_KINDS = {kind.__name__: kind for kind in (Constant, Normal, Uniform)}


def from_json(found: Any) -> Initial:
    """What `to_json` described.

    Raises:
        ValueError: it is nothing that is known, or a number is out of range.
    """
    if not isinstance(found, dict) or found.get("name") not in _KINDS:
        raise ValueError(f"{found!r} is no first value; there are {', '.join(_KINDS)}")
    try:
        made: Initial = _KINDS[found["name"]](**{name: value for name, value in found.items() if name != "name"})
    except TypeError as error:
        raise ValueError(f"{found['name']}: {error}") from None
    return made
