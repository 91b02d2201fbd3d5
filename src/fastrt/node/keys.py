"""Keys of the records that the daemon places on nodes: tasks with demands, actors, and bundles of placement groups.

A record's place in its table is used again; the id or generation tells its users apart. Named tuples compare by value,
so each kind of key has a tag: a task and an actor with equal numbers are different keys.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class TaskKey(NamedTuple):
    """The record of a task: its index and the task's id."""

    index: int
    id: int
    tag: Literal["task"] = "task"

    @property
    def pair(self) -> tuple[int, int]:
        """Index and id, as the core takes them."""
        return self.index, self.id


class ActorKey(NamedTuple):
    """The record of an actor: its index and generation."""

    index: int
    gen: int
    tag: Literal["actor"] = "actor"

    @property
    def pair(self) -> tuple[int, int]:
        """Index and generation, as the core takes them."""
        return self.index, self.gen


class BundleKey(NamedTuple):
    """The record of a placement group's bundle, which lies in the table of actors: its index and generation."""

    index: int
    gen: int
    tag: Literal["bundle"] = "bundle"

    @property
    def pair(self) -> tuple[int, int]:
        """Index and generation, as the core takes them."""
        return self.index, self.gen


Key = TaskKey | ActorKey | BundleKey
