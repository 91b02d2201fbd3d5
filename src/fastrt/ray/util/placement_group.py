"""Placement groups under their path in Ray, with the names of Ray's arguments and its ids of nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastrt.errors import FastrtError, NameTakenError, PlacementGroupNotFoundError, UnsupportedError
from fastrt.exceptions import RaySystemError
from fastrt.ids import NodeID
from fastrt.observe.elsewhere import of_each, read_groups
from fastrt.ray.refusals import refuse
from fastrt.runtime.nodes import nodes_at
from fastrt.store import client as store_client
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


class GroupNameTakenError(NameTakenError, RaySystemError):
    """Another placement group of the namespace has that name. Choose another one, or remove the group."""


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
        GroupNameTakenError: another group has the name.
    """
    if topology_strategy:
        words = refuse("option 'topology_strategy' of placement_group", "fastrt does not know how machines are wired")
        raise UnsupportedError(words)
    try:
        return ours.placement_group(bundles, strategy, name, lifetime, bundle_label_selector)
    except NameTakenError as exc:
        raise GroupNameTakenError(
            f"System error: Failed to create placement group because name {name!r} already exists: {exc}"
        ) from None


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Return the group that was made under that name, as `fastrt.get_placement_group` does.

    Raises:
        ValueError: there is none, or the name is empty.
    """
    if not placement_group_name:
        raise ValueError("Please supply a non-empty value to get_placement_group")
    try:
        return ours.get_placement_group(placement_group_name)
    except PlacementGroupNotFoundError as exc:
        words = f"Failed to look up placement group with name: {placement_group_name}: {exc}"
        raise PlacementGroupNotFoundError(words) from None


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Give the group's resources back, as `fastrt.remove_placement_group` does."""
    ours.remove_placement_group(placement_group)


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the state of a group, or of all of the cluster, with names and Ray's node ids.

    Groups that were made on a node that does not answer in time are left out.

    Source:
        The semantics of `ray.util.placement_group_table`.
    """
    found = ours.placement_group_table(placement_group)
    if placement_group is not None:
        return _in_rays_form(found, placement_group.name)
    store = store_client.require()
    names = ours.names_of_groups(store)
    table = {group: _in_rays_form(row, names.get(group, "")) for group, row in found.items()}
    others = [row["NodeID"] for row in nodes_at(store.socket_path) if not row["IsHere"]]
    for rows in of_each(others, lambda node: read_groups(store.socket_path, node)).values() if others else ():
        if not isinstance(rows, FastrtError):
            table |= {row["placement_group_id"]: _in_rays_form(row, row["name"]) for row in rows}
    return table


def _in_rays_form(row: dict[str, Any], name: str) -> dict[str, Any]:
    nodes = {index: NodeID.widened(node).hex() for index, node in row["bundles_to_node_id"].items()}
    return {**row, "name": name, "bundles_to_node_id": nodes}
