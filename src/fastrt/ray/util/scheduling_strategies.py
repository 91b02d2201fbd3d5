"""Values of `scheduling_strategy=`, under their path in Ray."""

from typing import Any

from fastrt.ray import refusals
from fastrt.tasks.placement_group import PlacementGroupSchedulingStrategy
from fastrt.tasks.resources import NodeAffinity as NodeAffinitySchedulingStrategy

__all__ = ["NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy"]


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
