"""`ray.util`: its names, mapped to fastrt's; modules below it are imported at their first use."""

import importlib
from typing import TYPE_CHECKING, Any

from fastrt.ray import refusals
from fastrt.ray.util.addresses import get_node_instance_id, get_node_ip_address
from fastrt.ray.util.debug import disable_log_once_globally, enable_periodic_logging, log_once
from fastrt.ray.util.helpers import as_completed, map_unordered

# Imported at once: the function has the name of its module, and a later import of the module would replace it.
from fastrt.ray.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from fastrt.ray.util.serialization import deregister_serializer, register_serializer
from fastrt.tasks.actor_handle import list_named_actors

if TYPE_CHECKING:
    from fastrt.ray.util.check_serialize import inspect_serializability
    from fastrt.util.actor_pool import ActorPool

__all__ = [
    "ActorPool",
    "as_completed",
    "deregister_serializer",
    "disable_log_once_globally",
    "enable_periodic_logging",
    "get_current_placement_group",
    "get_node_instance_id",
    "get_node_ip_address",
    "get_placement_group",
    "inspect_serializability",
    "list_named_actors",
    "log_once",
    "map_unordered",
    "placement_group",
    "placement_group_table",
    "register_serializer",
    "remove_placement_group",
]

_HOMES = {
    "ActorPool": "fastrt.util.actor_pool",
    "inspect_serializability": "fastrt.ray.util.check_serialize",
}
_MODULES = (
    "accelerators", "actor_pool", "annotations", "check_serialize", "joblib", "metrics", "multiprocessing", "queue",
    "scheduling_strategies", "state",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("pdb", "rpdb"):  # two names for one module
        return importlib.import_module("fastrt.ray.util.rpdb")
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise refusals.missing(__name__, name)
