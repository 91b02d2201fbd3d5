"""Keys of the records that the daemon places on nodes: tasks with demands, actors, and bundles of placement groups.

Records are reused; the id or generation says which task or actor is meant. Named tuples compare by value, so each
kind of key has a tag: a task and an actor with equal numbers have different keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fastrt.tasks.resources import Demand


class TaskKey(NamedTuple):
    """A task: the index of its record, and its id."""

    record: int
    id: int
    tag: Literal["task"] = "task"


class ActorKey(NamedTuple):
    """An actor: the index of its record, and its generation."""

    record: int
    gen: int
    tag: Literal["actor"] = "actor"


class BundleKey(NamedTuple):
    """A bundle of a placement group: the index of its record in the table of actors, and its generation."""

    record: int
    gen: int
    tag: Literal["bundle"] = "bundle"


Key = TaskKey | ActorKey | BundleKey


class Order(NamedTuple):
    """One decision about a task, an actor or a bundle.

    Attributes:
        key: the task, actor or bundle.
        what: "admit" here, "forward" to `node`, "refuse" (it can never run), "return" (to the node that sent it here),
            "warn" (it cannot run as things are), or "ask" (only the node that made its placement group knows).
        devices: of "admit": a bit for each device that it gets.
    """

    key: Key
    what: str
    demand: Demand
    node: str = ""
    devices: int = 0


def key_of(actor: int, gen: int, info: Mapping[str, Any]) -> ActorKey | BundleKey:
    """Return the key of a record in the table of actors, given its `actors.info`: a bundle has no process."""
    return BundleKey(actor, gen) if info["bare"] else ActorKey(actor, gen)


def pair_of(key: Key) -> tuple[int, int]:
    """Return the index of a key's record and its id or generation, as the core takes them."""
    return key[:2]
