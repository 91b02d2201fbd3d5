"""What `scheduling_strategy=` takes, under the names that Ray gives it."""

from fastrt.tasks.demand import NodeAffinity as NodeAffinitySchedulingStrategy
from fastrt.tasks.placement import PlacementGroupSchedulingStrategy

__all__ = ["NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy"]
