"""Values for which a node waits until the node that keeps them has come back: its stream has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastrt.cluster.claims import Absence
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:
    from fastrt.cluster.lineage import Origin
    from fastrt.cluster.references import StandIn


@dataclass
class Unclaimed:
    """An object of another node whose stream has ended.

    Attributes:
        ref: the local object.
        origin: how to make its value again.
        same_as: an object of this node with its value.
        standin: its stand-in, if its value has not arrived; None: it is a remote value.
    """

    ref: ObjectRef
    origin: Origin | None = None
    same_as: ObjectRef | None = None
    standin: StandIn | None = None


class AbsentNode(Absence):
    """A node whose stream has ended, and what it keeps for this node, by number."""

    def __init__(self, node: str, why: str, now: float) -> None:
        super().__init__(node, why, now)
        self._values: dict[int, list[Unclaimed]] = {}
        self._objects: Counter[int] = Counter()  # the local objects, and under how many numbers each is

    def __bool__(self) -> bool:
        return bool(self._values)

    def __contains__(self, objref: int) -> bool:
        return objref in self._objects

    def __iter__(self) -> Iterator[Unclaimed]:
        return (one for values in self._values.values() for one in values)

    @property
    def numbers(self) -> list[int]:
        """Return the numbers under which the node keeps something."""
        return list(self._values)

    def add(self, number: int, one: Unclaimed) -> None:
        """Note one more object under a number."""
        self._values.setdefault(number, []).append(one)
        self._objects[one.ref.objref] += 1

    def pop(self, number: int) -> list[Unclaimed]:
        """Remove what the node keeps under a number, and return it."""
        values = self._values.pop(number, [])
        for one in values:
            self._objects[one.ref.objref] -= 1
            if not self._objects[one.ref.objref]:
                del self._objects[one.ref.objref]
        return values
