"""Placement groups under their path in Ray."""

from typing import Any

from fastrt.ids import NodeID
from fastrt.tasks import placement_group as ours
from fastrt.tasks.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

__all__ = [
    "PlacementGroup",
    "get_current_placement_group",
    "get_placement_group",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]


def placement_group_table(group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the state of a group, or of all, as `fastrt.placement_group_table` does, with Ray's ids of nodes.

    Source:
        The semantics of `ray.util.placement_group_table`.
    """
    found = ours.placement_group_table(group)
    return _with_ids(found) if group is not None else {name: _with_ids(row) for name, row in found.items()}


def _with_ids(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "bundles_to_node_id": {k: NodeID.widened(n).hex() for k, n in row["bundles_to_node_id"].items()}}
