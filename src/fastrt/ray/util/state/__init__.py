"""`ray.util.state`: lists of tasks, actors, nodes and other things, as objects with Ray's attributes."""

from typing import Any

from fastrt.ray import refusals
from fastrt.ray.util.state.api import (
    get_actor,
    get_node,
    get_objects,
    get_placement_group,
    get_task,
    get_worker,
    list_actors,
    list_jobs,
    list_nodes,
    list_objects,
    list_placement_groups,
    list_tasks,
    list_workers,
    summarize_actors,
    summarize_objects,
    summarize_tasks,
)
from fastrt.ray.util.state.logs import get_log, list_logs

__all__ = [
    "get_actor",
    "get_log",
    "get_node",
    "get_objects",
    "get_placement_group",
    "get_task",
    "get_worker",
    "list_actors",
    "list_jobs",
    "list_logs",
    "list_nodes",
    "list_objects",
    "list_placement_groups",
    "list_tasks",
    "list_workers",
    "summarize_actors",
    "summarize_objects",
    "summarize_tasks",
]


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
