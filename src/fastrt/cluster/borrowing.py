"""The objects that two nodes have named to each other over one stream: pure state, without I/O, clock or arena.

`references` is the shell: it keeps the arena's references in these records, without which nothing here could be tested
on its own, and carries out the effects that the calls return. Each naming only adds to a count, so the path of a task
costs no move.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

from fastrt.transitions import Transitions

T = TypeVar("T")


# States of an object of this node that the peer holds. Texts: an Enum's hash is a function in Python.
HELD = "HELD"
# States of an object of the peer that this node holds.
WAITING = "WAITING"
ARRIVED = "ARRIVED"
DETACHED = "DETACHED"  # the stream has ended before the value came; the next one claims it
LOST = "LOST"  # its node does not have it any more
RELEASED = "RELEASED"  # of both


class AnyOf(Container[int]):
    """The numbers that are in any of some containers, which are not copied.

    Args:
        parts: the containers.
    """

    def __init__(self, *parts: Container[int]) -> None:
        self._parts = parts

    def __contains__(self, objref: object) -> bool:
        return any(objref in part for part in self._parts)


class Effect(IntEnum):
    """The work of the shell after a release."""

    NOTHING = 0
    SEND_AGAIN = 1
    DROP = 2


EXPORT = Transitions[str](
    "exported object",
    {HELD: {"release_some": HELD, "release_all": RELEASED}, RELEASED: {}},
)
IMPORT = Transitions[str](
    "imported object",
    {
        WAITING: {"arrive": ARRIVED, "give_up": RELEASED, "detach": DETACHED},
        ARRIVED: {"give_up": RELEASED},
        DETACHED: {"claim": WAITING, "give_up": RELEASED, "lose": LOST},
        LOST: {},
        RELEASED: {},
    },
)


class Exported(Generic[T]):
    """One exported object: the reference that keeps it alive, and how often the peer was sent its name."""

    __slots__ = ("moves", "named", "ref", "state")

    def __init__(self, ref: T) -> None:
        self.ref = ref
        self.named = 1
        self.state: str = HELD
        self.moves = 0


class Exports(Collection[int], Generic[T]):
    """The objects of this node that the peer holds, by number."""

    def __init__(self) -> None:
        self._held: dict[int, Exported[T]] = {}

    def name(self, objref: int, ref: T) -> bool:
        """Count one more naming; return whether it is the first, so that the peer must get the value."""
        held = self._held.get(objref)
        if held is not None:
            held.named += 1
            return False
        self._held[objref] = Exported(ref)
        return True

    def release(self, objref: int, named: int) -> Effect:
        """Handle the peer's release: it had received the name `named` times.

        If it was named more often, a name is on its way: the peer makes another stand-in, which needs the value.
        """
        held = self._held.get(objref)
        if held is None:
            return Effect.NOTHING  # of an earlier stream, or the peer releases it twice
        if named < held.named:
            EXPORT.move(held, "release_some", hex(objref))
            held.named -= named
            return Effect.SEND_AGAIN
        EXPORT.move(held, "release_all", hex(objref))
        del self._held[objref]
        return Effect.DROP

    def find(self, objref: int) -> T | None:
        """Return the reference to an object that the peer holds; None when it does not."""
        held = self._held.get(objref)
        return None if held is None else held.ref

    def __contains__(self, objref: object) -> bool:
        return objref in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def clear(self) -> None:
        """Forget all: the stream has ended."""
        self._held.clear()


class Imported:
    """The part of a stand-in that is pure: its state, and how often the peer has named its object."""

    state: str = WAITING
    moves: int = 0
    named: int = 0

    @property
    def is_waiting(self) -> bool:
        """Return whether the value has not arrived."""
        return self.state is WAITING

    def arrive(self, objref: int) -> None:
        """Record that the value is here, or where it is."""
        IMPORT.move(self, "arrive", hex(objref))

    def give_up(self, objref: int) -> int:
        """Record that this node does not use the object; return how many namings the release message gives back."""
        IMPORT.move(self, "give_up", hex(objref))
        return self.named

    def detach(self, objref: int) -> None:
        """Record that the stream has ended before the value came."""
        IMPORT.move(self, "detach", hex(objref))
        self.named = 0

    def claim(self, objref: int) -> None:
        """Record that the peer has answered a claim: it has named the object once on this stream."""
        IMPORT.move(self, "claim", hex(objref))
        self.named = 1

    def lose(self, objref: int) -> None:
        """Record that the object's node does not have it any more."""
        IMPORT.move(self, "lose", hex(objref))
