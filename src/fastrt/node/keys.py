"""Keys of the records that the daemon places on nodes: tasks with demands, actors, and bundles of placement groups.

Records are reused; the id or generation says which task or actor is meant. Named tuples compare by value, so each
kind of key has a tag: a task and an actor with equal numbers have different keys.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class TaskKey(NamedTuple):
    """A task: the index of its record, and its id."""

    record: int
    id: int
    tag: Literal["task"] = "task"

    @property
    def pair(self) -> tuple[int, int]:
        """Index and id, as the core takes them."""
        return self.record, self.id


class ActorKey(NamedTuple):
    """An actor: the index of its record, and its generation."""

    record: int
    gen: int
    tag: Literal["actor"] = "actor"

    @property
    def pair(self) -> tuple[int, int]:
        """Index and generation, as the core takes them."""
        return self.record, self.gen


class BundleKey(NamedTuple):
    """A bundle of a placement group: the index of its record in the table of actors, and its generation."""

    record: int
    gen: int
    tag: Literal["bundle"] = "bundle"

    @property
    def pair(self) -> tuple[int, int]:
        """Index and generation, as the core takes them."""
        return self.record, self.gen


Key = TaskKey | ActorKey | BundleKey
