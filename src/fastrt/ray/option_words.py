"""Options of `ray.remote` and `.options` that Ray refuses: with its words, where fastrt's own API has others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrt.config import RESOURCE_PARTS
from fastrt.tasks.options import CLASSES, FUNCTIONS

_COUNT = (int, type(None))
_POSITIVE = "only accepts None, 0 or a positive integer"
_ENDLESS = "only accepts None, 0, -1 or a positive integer, where -1 represents infinity."
_RETURNS = 'only accepts None, a non-negative integer, "streaming" (for generators), or "dynamic"'
# By option: the types of its values, the least number, and what Ray says about a smaller one.
_VALUES: dict[str, tuple[tuple[type, ...], int, str]] = {
    "max_calls": (_COUNT, 0, _POSITIVE),
    "max_retries": (_COUNT, -1, _ENDLESS),
    "max_restarts": (_COUNT, -1, _ENDLESS),
    "max_task_retries": (_COUNT, -1, _ENDLESS),
    "num_returns": ((int, str, type(None)), 0, _RETURNS),
    "_metadata": ((dict, type(None)), 0, ""),
}
_ONLY_DECLARED = {FUNCTIONS: "max_calls", CLASSES: "concurrency_groups"}
_AMOUNTS = ("num_cpus", "num_gpus")


def check(options: Mapping[str, Any]) -> None:
    """Refuse values that Ray refuses.

    Args:
        options: by name.
    Raises:
        TypeError: a value is of another type.
        ValueError: a number is too small, or an amount of resources has too many digits.
    """
    for name, value in options.items():
        types, least, words = _VALUES.get(name, ((), 0, ""))
        if types and not isinstance(value, types):
            raise TypeError(f"The type of keyword '{name}' must be {types}, but received type {type(value)}")
        if types and isinstance(value, int) and value < least:
            raise ValueError(f"The keyword '{name}' {words}")
        if name in _AMOUNTS:
            _check_amount(name, value)
    resources = options.get("resources")
    for name, value in resources.items() if isinstance(resources, Mapping) else ():
        _check_amount(name, value)


def check_changes(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that only the declaration takes.

    Args:
        kind: FUNCTIONS or CLASSES.
        options: those of `.options(...)`, by name.
    Raises:
        ValueError: one is refused there.
    """
    name = _ONLY_DECLARED[kind]
    if options.get(name) is not None:
        raise ValueError(f"Setting '{name}' is not supported in '.options()'.")


def _check_amount(name: str, value: Any) -> None:
    if isinstance(value, float) and 0 < value < 1 / RESOURCE_PARTS:
        raise ValueError(
            f"The precision of the fractional quantity of resource {name} cannot go beyond {1 / RESOURCE_PARTS:g}"
        )
