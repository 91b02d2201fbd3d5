"""Interfaces that programs know from elsewhere, over tasks and actors; each is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastrt.tasks.actor_handle import list_named_actors

# Not when it is first used: the function has its module's name, which would take its place here.
from fastrt.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from fastrt.util.actor_pool import ActorPool
    from fastrt.util.executor import Executor
    from fastrt.util.pool import Pool
    from fastrt.util.queue import Empty, Full, Queue

__all__ = [
    "ActorPool",
    "Empty",
    "Executor",
    "Full",
    "Pool",
    "Queue",
    "get_current_placement_group",
    "get_placement_group",
    "list_named_actors",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]

_HOMES = {
    "ActorPool": "fastrt.util.actor_pool",
    "Empty": "fastrt.util.queue",
    "Executor": "fastrt.util.executor",
    "Full": "fastrt.util.queue",
    "Pool": "fastrt.util.pool",
    "Queue": "fastrt.util.queue",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
