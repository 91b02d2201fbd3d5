"""`ray.experimental`: the parts of it that fastrt has."""

from __future__ import annotations

from typing import Any

from fastrt.ray import refusals
from fastrt.ray.experimental.locations import get_local_object_locations, get_object_locations

__all__ = ["get_local_object_locations", "get_object_locations"]


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
