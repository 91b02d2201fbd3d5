"""`ray.autoscaler`: the one call of it that programs make on clusters of a fixed size, too."""

from __future__ import annotations

from typing import Any

from fastrt.ray import refusals
from fastrt.ray.autoscaler import sdk

__all__ = ["sdk"]


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
