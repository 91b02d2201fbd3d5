"""First values of parameters: the same for a key or place on every server and after every restart.

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
    """Doubles between 0 and 1, both excluded; one row for each key."""
    begin = _mix(keys.astype(np.uint64, copy=False) ^ _mix(np.array([seed], np.uint64) + _GOLDEN))
    counted = begin[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN
    units: Array = ((_mix(counted) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return units


@dataclass(frozen=True)
class Initial:
    """Base class of all kinds of first values."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}.{field.name} is {value!r}; it must be a finite number")

    def rows(self, keys: Array, dim: int) -> Array:
        """The first values (float32) of rows of `dim`, one for each key (uint64).

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The name and parameters, for a message or a file."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Constant(Initial):
    """One constant for all values."""

    value: float = 0.0

    def rows(self, keys: Array, dim: int) -> Array:
        """Rows filled with the constant."""
        return np.full((len(keys), dim), self.value, np.float32)


@dataclass(frozen=True)
class Normal(Initial):
    """Normally distributed values with mean 0."""

    std: float = 0.01
    seed: int = 0

    def rows(self, keys: Array, dim: int) -> Array:
        """Normally distributed rows."""
        pairs = (dim + 1) // 2
        units = _uniform(self.seed, keys, 2 * pairs)
        radius = np.sqrt(-2.0 * np.log(units[:, :pairs])) * self.std
        angle = units[:, pairs:] * (2.0 * np.pi)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return np.ascontiguousarray(both[:, :dim], np.float32)


@dataclass(frozen=True)
class Uniform(Initial):
    """Uniformly distributed values between two bounds."""

    low: float = -0.01
    high: float = 0.01
    seed: int = 0

    def rows(self, keys: Array, dim: int) -> Array:
        """Uniformly distributed rows."""
        return (self.low + (self.high - self.low) * _uniform(self.seed, keys, dim)).astype(np.float32)


_KINDS = {kind.__name__: kind for kind in (Constant, Normal, Uniform)}


def from_json(found: Any) -> Initial:
    """Return the object that `to_json` described.

    Raises:
        ValueError: the kind is unknown, or a number is invalid.
    """
    if not isinstance(found, dict) or found.get("name") not in _KINDS:
        raise ValueError(f"{found!r} is not a kind of first values; those are {', '.join(_KINDS)}")
    try:
        made: Initial = _KINDS[found["name"]](**{name: value for name, value in found.items() if name != "name"})
    except TypeError as error:
        raise ValueError(f"{found['name']}: {error}") from None
    return made
