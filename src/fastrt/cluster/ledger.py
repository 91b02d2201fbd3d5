"""Who owes what to whom over one stream: tasks and calls that were lent to the other node, and those taken from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastrt.cluster.hosted_actors import Guest
from fastrt.cluster.lineage import Record
from fastrt.cluster.remote_actors import Line
from fastrt.store.ref import ObjectRef


@dataclass
class Lent:
    """A task or call of this node's that the other one runs.

    Attributes:
        task: of this node's table.
        line: the actor whose call it is; None: it is a task.
        done: sealed and given back already.
        record: how to run it again, if it has made what is missing here.
    """

    task: int
    line: Line | None = None
    done: bool = False
    record: Record | None = None


@dataclass
class Borrowed:
    """A task or call of the other node's that runs here.

    Attributes:
        results: what it makes.
        left: how many of them are still to be sent.
        guest: the other node's actor whose call it is.
        is_call: of an actor, whosoever.
    """

    results: list[ObjectRef]
    left: int
    guest: Guest | None
    is_call: bool


class Ledger:
    """Both sides of one stream. Whoever lends looks here for each task how many there are: nothing is counted anew.

    Attributes:
        lent: how many of this node's tasks the other one has; calls of actors are not among them.
        borrowed: how many of its tasks this node has.
    """

    def __init__(self) -> None:
        self.lent = self.borrowed = 0
        self._out: dict[int, Lent] = {}
        self._in: dict[int, Borrowed] = {}
        self._numbers = 0

    def lend(self, task: int, line: Line | None) -> int:
        """The other node is sent a task; by which number it knows it."""
        self._numbers += 1
        self._out[self._numbers] = Lent(task, line)
        self.lent += line is None
        return self._numbers

    def find(self, number: int) -> Lent | None:
        """What was lent under a number, until it has ended."""
        return self._out.get(number)

    def take(self, number: int) -> Lent | None:
        """What was lent under a number is not any more; None when it was not."""
        lent = self._out.pop(number, None)
        self.lent -= lent is not None and lent.line is None
        return lent

    def open(self) -> Iterator[tuple[int, Lent]]:
        """What was lent and has no result yet, by number, the oldest first; it may be taken meanwhile."""
        return ((number, lent) for number, lent in list(self._out.items()) if not lent.done)

    def borrow(self, number: int, borrowed: Borrowed) -> None:
        """A task of the other node's begins here."""
        self._in[number] = borrowed
        self.borrowed += not borrowed.is_call

    def owed(self, number: int) -> Borrowed | None:
        """The other node's task of that number, until it has ended."""
        return self._in.get(number)

    def all_owed(self) -> list[Borrowed]:
        """All that the other node has here."""
        return list(self._in.values())

    def settle(self, number: int) -> None:
        """The other node has all of a task, or it has fallen."""
        self.borrowed -= not self._in.pop(number).is_call

    def clear(self) -> None:
        """The stream has ended."""
        self._out.clear()
        self._in.clear()
        self.lent = self.borrowed = 0
