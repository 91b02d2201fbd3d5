"""Placement groups under their path in Ray, with the names of Ray's arguments and its ids of nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastrt.errors import UnsupportedError
from fastrt.ids import NodeID
from fastrt.ray.refusals import refuse
from fastrt.tasks import placement_group as ours
from fastrt.tasks.placement_group import PlacementGroup, get_current_placement_group

__all__ = [
    "PlacementGroup",
    "get_current_placement_group",
    "get_placement_group",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]


def placement_group(
    bundles: Sequence[Mapping[str, float]],
    strategy: str | None = "PACK",
    name: str = "",
    lifetime: str | None = None,
    bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
    topology_strategy: Any = None,
) -> PlacementGroup:
    """Reserve resources together, as `fastrt.placement_group` does.

    Raises:
        UnsupportedError: a topology_strategy is given.
    """
    if topology_strategy:
        words = refuse("option 'topology_strategy' of placement_group", "fastrt does not know how machines are wired")
        raise UnsupportedError(words)
    return ours.placement_group(bundles, strategy, name, lifetime, bundle_label_selector)


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Return the group that was made under that name, as `fastrt.get_placement_group` does."""
    return ours.get_placement_group(placement_group_name)


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Give the group's resources back, as `fastrt.remove_placement_group` does."""
    ours.remove_placement_group(placement_group)


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the state of a group, or of all, as `fastrt.placement_group_table` does, with Ray's ids of nodes.

    Source:
        The semantics of `ray.util.placement_group_table`.
    """
    found = ours.placement_group_table(placement_group)
    return _with_ids(found) if placement_group is not None else {name: _with_ids(row) for name, row in found.items()}


def _with_ids(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "bundles_to_node_id": {k: NodeID.widened(n).hex() for k, n in row["bundles_to_node_id"].items()}}
