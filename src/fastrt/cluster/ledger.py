"""The tasks and calls in progress over one stream: those forwarded to the peer, and those accepted from it.

Pure state, without I/O, clock or arena: `peer_stream` carries out what follows from a move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastrt.transitions import Transitions

if TYPE_CHECKING:
    from fastrt.cluster.hosted_actors import HostedActor
    from fastrt.cluster.lineage import Record
    from fastrt.cluster.remote_actors import RemoteActor
    from fastrt.store.ref import ObjectRef


# States of a task or call of this node that the peer runs. Texts: an Enum's hash is a function in Python.
SENT = "SENT"
SEALED = "SEALED"  # its results are here, and this process has finished it
ENDED = "ENDED"  # the peer has forgotten it
TAKEN_BACK = "TAKEN_BACK"  # this node ends it, or runs it elsewhere
# States of a task or call of the peer that runs here.
RUNNING = "RUNNING"
ANSWERED = "ANSWERED"  # the peer has all its results
RETURNED = "RETURNED"  # without a result: its actor's process has ended, or this node leaves and has not begun it

FORWARDED = Transitions[str](
    "forwarded task",
    {
        SENT: {"seal": SEALED, "end": ENDED, "take_back": TAKEN_BACK},
        SEALED: {"end": ENDED, "take_back": TAKEN_BACK},
        ENDED: {},
        TAKEN_BACK: {},
    },
)
ACCEPTED = Transitions[str](
    "accepted task",
    {
        RUNNING: {"answer": ANSWERED, "return": RETURNED},
        ANSWERED: {},
        RETURNED: {},
    },
)


class ForwardedTask:
    """A task or call of this node that the peer runs.

    Attributes:
        task: its index in this node's table.
        remote: the actor whose call it is; None: it is a task.
        fetches: bytes of its arguments that the peer did not have.
        record: how to run it again; set once one of its results names an object whose value is missing here.
        state, moves: see `FORWARDED`.
    """

    __slots__ = ("fetches", "moves", "record", "remote", "state", "task")

    def __init__(self, task: int, remote: RemoteActor | None = None) -> None:
        self.task = task
        self.remote = remote
        self.fetches = 0
        self.record: Record | None = None
        self.state: str = SENT
        self.moves = 0

    @property
    def done(self) -> bool:
        """Return whether its results are sealed, and this process has finished it."""
        return self.state is not SENT


class _Accepted:
    """The defaults of each accepted task; they cost nothing when one is made."""

    state: str = RUNNING
    moves: int = 0


@dataclass
class AcceptedTask(_Accepted):
    """A task or call of the peer that runs on this node.

    Attributes:
        results: its results.
        left: how many of them are still to be sent.
        hosted: the hosted actor whose call it is; None: it is a task, or a call of an actor that this node owns.
        is_call: whether it is a call of any actor.
        state, moves: see `ACCEPTED`.
    """

    results: list[ObjectRef]
    left: int
    hosted: HostedActor | None
    is_call: bool


class Ledger:
    """The tasks and calls of one stream, in both directions.

    The counts are kept up to date, because they are read for every task that is forwarded.

    Attributes:
        forwarded: how many tasks of this node the peer has, without calls of actors.
        fetching: bytes that the peer has to fetch for them.
        accepted: how many tasks of the peer this node has, without calls of actors.
    """

    def __init__(self) -> None:
        self.forwarded = self.fetching = self.accepted = 0
        self._out: dict[int, ForwardedTask] = {}
        self._in: dict[int, AcceptedTask] = {}
        self._numbers = 0

    def forward(self, task: int, remote: RemoteActor | None) -> int:
        """Record a task that is sent to the peer; return its number on this stream."""
        self._numbers += 1
        self._out[self._numbers] = ForwardedTask(task, remote)
        self.forwarded += remote is None
        return self._numbers

    def fetch(self, number: int, nbytes: int) -> None:
        """Record how many bytes the peer has to fetch for a forwarded task."""
        self._out[number].fetches = nbytes
        self.fetching += nbytes

    def find(self, number: int) -> ForwardedTask | None:
        """Return the forwarded task with a number, until it has ended."""
        return self._out.get(number)

    def seal(self, number: int) -> None:
        """Record that all results of a forwarded task are here, and that it is finished."""
        FORWARDED.move(self._out[number], "seal", number)

    def end(self, number: int) -> tuple[ForwardedTask, bool] | None:
        """Remove a forwarded task that the peer has ended, unless it was taken back before.

        Returns:
            The task, and whether it was sealed before; else the caller finishes it.
        """
        forwarded = self._out.pop(number, None)
        if forwarded is None:
            return None
        was_sealed = forwarded.state is SEALED
        FORWARDED.move(forwarded, "end", number)
        self._uncount(forwarded)
        return forwarded, was_sealed

    def take(self, number: int) -> ForwardedTask | None:
        """Remove and return the forwarded task with a number, to end it or to run it elsewhere; None: there is none."""
        forwarded = self._out.pop(number, None)
        if forwarded is not None:
            FORWARDED.move(forwarded, "take_back", number)
            self._uncount(forwarded)
        return forwarded

    def take_open(self, number: int) -> ForwardedTask | None:
        """Remove the forwarded task with a number; return it if it had no results yet."""
        forwarded = self._out.get(number)
        is_open = forwarded is not None and not forwarded.done
        self.take(number)
        return forwarded if is_open else None

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

    def all_accepted(self) -> dict[int, AcceptedTask]:
        """Return all tasks and calls of the peer on this node, by number."""
        return dict(self._in)

    def returnable(self) -> list[tuple[int, AcceptedTask]]:
        """Return the tasks of the peer on this node, without calls, with their numbers."""
        return [(number, accepted) for number, accepted in self._in.items() if not accepted.is_call]

    @property
    def has_sent(self) -> bool:
        """Return whether the peer has tasks or calls of this node."""
        return bool(self._out)

    def awaited(self) -> set[int]:
        """Return the numbers of the results that the peer waits for: only this process may hold them until it has them.

        They can be stand-ins for values of other nodes, or of the peer itself: a task can be forwarded on, and back.
        """
        return {ref.objref for accepted in self._in.values() for ref in accepted.results}

    def result_sent(self, number: int) -> bool:
        """Count a result that the peer has; return whether it was the last one, with which the task is removed."""
        accepted = self._in.get(number)
        if accepted is None:
            return False
        accepted.left -= 1
        if accepted.left == 0:
            ACCEPTED.move(self._in.pop(number), "answer", number)
            self.accepted -= not accepted.is_call
        return accepted.left == 0

    def give_back(self, number: int) -> None:
        """Remove an accepted call or task that is returned without a result."""
        accepted = self._in.pop(number)
        ACCEPTED.move(accepted, "return", number)
        self.accepted -= not accepted.is_call

    @property
    def is_empty(self) -> bool:
        """Return whether neither node runs tasks or calls of the other."""
        return not (self._out or self._in)

    def clear(self) -> None:
        """Forget all tasks, because the stream has ended."""
        self._out.clear()
        self._in.clear()
        self.forwarded = self.fetching = self.accepted = 0

    def _uncount(self, forwarded: ForwardedTask) -> None:
        self.forwarded -= forwarded.remote is None
        self.fetching -= forwarded.fetches
