"""What `scheduling_strategy=` takes, under the names that Ray gives it."""

from fastrt.tasks.placement_group import PlacementGroupSchedulingStrategy
from fastrt.tasks.resources import NodeAffinity as NodeAffinitySchedulingStrategy

__all__ = ["NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy"]
