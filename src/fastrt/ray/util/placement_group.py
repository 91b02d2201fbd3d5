"""Placement groups under their path in Ray, with the names of Ray's arguments and its ids of nodes."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastrt._core.tasks import actors
from fastrt.errors import PlacementGroupNotFoundError, UnsupportedError
from fastrt.ids import NodeID
from fastrt.ray.refusals import refuse
from fastrt.store import client as store_client
from fastrt.tasks import placement_group as ours
from fastrt.tasks.actor_handle import GROUP_NAME
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
    """Return the state of a group, or of all, as `fastrt.placement_group_table` does, with names and Ray's node ids.

    Source:
        The semantics of `ray.util.placement_group_table`.
    """
    found = ours.placement_group_table(placement_group)
    if placement_group is not None:
        return _in_rays_form(found, placement_group.name)
    names = _names()
    return {group: _in_rays_form(row, names.get(group, "")) for group, row in found.items()}


def _in_rays_form(row: dict[str, Any], name: str) -> dict[str, Any]:
    nodes = {index: NodeID.widened(node).hex() for index, node in row["bundles_to_node_id"].items()}
    return {**row, "name": name, "bundles_to_node_id": nodes}


def _names() -> dict[str, str]:
    """The names of this node's groups that have one, by their ids."""
    client = store_client.require().client
    names = [whole.removeprefix(GROUP_NAME) for whole in actors.names(client) if whole.startswith(GROUP_NAME)]
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PlacementGroupNotFoundError):  # it was removed meanwhile
            found[ours.get_placement_group(name).id] = name
    return found
