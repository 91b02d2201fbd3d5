"""Values of `scheduling_strategy=`, under their path in Ray."""

from typing import Any

from fastrt.ray import refusals
from fastrt.tasks.label_strategy import DoesNotExist, Exists, In, NodeLabelSchedulingStrategy, NotIn
from fastrt.tasks.placement_group import PlacementGroupSchedulingStrategy
from fastrt.tasks.resources import NodeAffinity as NodeAffinitySchedulingStrategy

__all__ = [
    "DoesNotExist",
    "Exists",
    "In",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroupSchedulingStrategy",
]


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
