"""The tasks and calls in progress over one stream: those forwarded to the peer, and those accepted from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastrt.cluster.hosted_actors import HostedActor
from fastrt.cluster.lineage import Record
from fastrt.cluster.remote_actors import RemoteActor
from fastrt.store.ref import ObjectRef


@dataclass
class ForwardedTask:
    """A task or call of this node that the peer runs.

    Attributes:
        task: its index in this node's table.
        remote: the actor whose call it is; None: it is a task.
        done: its results are sealed, and this process has finished it.
        record: how to run it again; set once one of its results names an object whose value is missing here.
    """

    task: int
    remote: RemoteActor | None = None
    done: bool = False
    record: Record | None = None


@dataclass
class AcceptedTask:
    """A task or call of the peer that runs on this node.

    Attributes:
        results: its results.
        left: how many of them are still to be sent.
        hosted: the hosted actor whose call it is; None: it is a task, or a call of an actor that this node owns.
        is_call: whether it is a call of any actor.
    """

    results: list[ObjectRef]
    left: int
    hosted: HostedActor | None
    is_call: bool


class Ledger:
    """The tasks and calls of one stream, in both directions.

    The two counts are kept up to date, because they are read for every task that is forwarded.

    Attributes:
        forwarded: how many tasks of this node the peer has, without calls of actors.
        accepted: how many tasks of the peer this node has, without calls of actors.
    """

    def __init__(self) -> None:
        self.forwarded = self.accepted = 0
        self._out: dict[int, ForwardedTask] = {}
        self._in: dict[int, AcceptedTask] = {}
        self._numbers = 0

    def forward(self, task: int, remote: RemoteActor | None) -> int:
        """Record a task that is sent to the peer; return its number on this stream."""
        self._numbers += 1
        self._out[self._numbers] = ForwardedTask(task, remote)
        self.forwarded += remote is None
        return self._numbers

    def find(self, number: int) -> ForwardedTask | None:
        """Return the forwarded task with a number, until it has ended."""
        return self._out.get(number)

    def take(self, number: int) -> ForwardedTask | None:
        """Remove and return the forwarded task with a number; None when there is none."""
        forwarded = self._out.pop(number, None)
        self.forwarded -= forwarded is not None and forwarded.remote is None
        return forwarded

    def open(self) -> Iterator[tuple[int, ForwardedTask]]:
        """Return the forwarded tasks without results, with their numbers, oldest first; they may be taken meanwhile."""
        return ((number, forwarded) for number, forwarded in list(self._out.items()) if not forwarded.done)

    def accept(self, number: int, accepted: AcceptedTask) -> None:
        """Record a task of the peer that begins on this node."""
        self._in[number] = accepted
        self.accepted += not accepted.is_call

    def find_accepted(self, number: int) -> AcceptedTask | None:
        """Return the accepted task with a number, until it has ended."""
        return self._in.get(number)

    def all_accepted(self) -> list[AcceptedTask]:
        """Return all tasks and calls of the peer on this node."""
        return list(self._in.values())

    def settle(self, number: int) -> None:
        """Remove an accepted task: the peer has all its results, or its call was returned without one."""
        self.accepted -= not self._in.pop(number).is_call

    @property
    def is_empty(self) -> bool:
        """Return whether neither node runs tasks or calls of the other."""
        return not (self._out or self._in)

    def clear(self) -> None:
        """Forget all tasks, because the stream has ended."""
        self._out.clear()
        self._in.clear()
        self.forwarded = self.accepted = 0
