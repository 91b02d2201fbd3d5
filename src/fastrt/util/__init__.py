"""Interfaces of Ray and the standard library on top of tasks and actors; each is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastrt.lazy import attach
from fastrt.runtime import driver as _driver  # noqa: F401  (it starts a session where there is none)
from fastrt.tasks.actor_handle import list_named_actors

# Imported at once: the function has the name of its module, and a later import of the module would replace it.
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
    "fastrt.util.actor_pool": "ActorPool",
    "fastrt.util.executor": "Executor",
    "fastrt.util.pool": "Pool",
    "fastrt.util.queue": "Empty Full Queue",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
