"""Values of `scheduling_strategy=`, under their names in Ray."""

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
