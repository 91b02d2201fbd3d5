"""The books of the counts that each peer holds, so that those of a dead one can be given back.

No request that counts has a field for its caller. But a program that registers a worker or a store makes its other
requests over the same connection, or names its worker over another one. All of these connections belong to one
`Holder`, and each count that changes over them is its. A holder is dead once all of its workers and stores are lost and
all of its connections are closed; then it gives back what it held.

Counts move as docs/scheduler.md says: those of a message are the caller's until `RemoteCall`, then the worker's that
has the message, until it drops them; those of contained references are the writer's until `AddContainedObjRefs`.

The books are kept in memory: a restarted scheduler knows no holder of an earlier count. A count that is missing here
stays counted, as does one of a client that registers nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Effect, Event

_FEW = 16  # references that are changed one by one
_Peer = tuple[str, int]  # "worker" or "store", and its number
_NAMES_A_WORKER = (ev.PushObj, ev.RequestObj, ev.WorkerReady, ev.RegisterFunction)


class Holder:
    """A program with workers or stores.

    Attributes:
        peers: its workers and stores that are not lost.
        connections: over which it makes requests.
        counts: by reference, what it has counted less what it has dropped.
    """

    __slots__ = ("connections", "counts", "peers")

    def __init__(self) -> None:
        self.peers: set[_Peer] = set()
        self.connections: set[Hashable] = set()
        self.counts: dict[int, int] = {}

    def change(self, refs: Any, by: int) -> None:
        """Note that each of a batch of references is counted `by` more often."""
        counts = self.counts
        for ref, times in Counter(refs).items() if len(refs) > _FEW else [(ref, 1) for ref in refs]:
            now = counts.get(ref, 0) + by * times
            if now:
                counts[ref] = now
            else:
                del counts[ref]


class Holdings:
    """The holders of one scheduler. Not thread-safe: the shell's lock serialises its calls."""

    def __init__(self) -> None:
        self._by_connection: dict[Hashable, Holder] = {}
        self._by_peer: dict[_Peer, Holder] = {}
        # By worker: the number of the call that it has, and the references in its message.
        self._messages: dict[int, tuple[int, Sequence[int]]] = {}
        self._leaving: list[Holder] = []  # all of their workers and stores are lost

    def note(self, event: Event, effects: Sequence[Effect], connection: Hashable, tasks: dict[int, Any]) -> None:
        """Note an event that was carried out.

        Args:
            event: a request, or a fact.
            effects: its effects.
            connection: over which the request came; None for a fact.
            tasks: the calls of the state machine, by number.
        """
        if isinstance(event, ev.InvokeRefused):
            self._take_back(event.worker, event.task)
        if connection is None and not effects:
            return
        answer: Any = effects[0].value if connection is not None and isinstance(effects[0], ev.Answer) else None
        if isinstance(event, ev.RegisterWorker):
            self._bind(connection, ("worker", answer))
        elif isinstance(event, ev.RegisterObjStore):
            self._bind(connection, ("store", answer))
        elif isinstance(event, ev.WorkerReady):
            self._messages.pop(event.worker, None)
        if not self._by_peer and not self._leaving:
            return
        if isinstance(event, _NAMES_A_WORKER) and connection not in self._by_connection:
            self._join(connection, ("worker", event.worker))
        holder = self._by_connection.get(connection)
        if holder is not None:
            _move(holder, event, answer)
        for effect in effects:
            if isinstance(effect, ev.InvokeCall):
                self._hand_over(effect.worker, tasks[effect.task])
            elif isinstance(effect, ev.ForgetWorker):
                self._lose(("worker", effect.worker))
            elif isinstance(effect, ev.ForgetStore):
                self._lose(("store", effect.store))

    def is_waiting(self) -> bool:
        """Whether a holder may be dead, so that `dead` has to be called again."""
        return bool(self._leaving)

    def dead(self, is_open: Callable[[Any], bool]) -> list[dict[int, int]]:
        """Remove the dead holders; returns the counts of each, by reference.

        Args:
            is_open: whether a connection is open.
        """
        found = []
        for holder in self._leaving[:]:
            holder.connections = {each for each in holder.connections if is_open(each)}
            if holder.connections:
                continue
            self._leaving.remove(holder)
            for connection, other in list(self._by_connection.items()):
                if other is holder:
                    del self._by_connection[connection]
            found.append({ref: count for ref, count in holder.counts.items() if count > 0})
        return found

    def _bind(self, connection: Hashable, peer: _Peer) -> None:
        holder = self._by_connection.get(connection)
        if holder is None:
            holder = self._by_connection[connection] = Holder()
            holder.connections.add(connection)
        holder.peers.add(peer)
        self._by_peer[peer] = holder
        if holder in self._leaving:
            self._leaving.remove(holder)

    def _join(self, connection: Hashable, peer: _Peer) -> None:
        """Note another connection of a peer's program."""
        holder = self._by_peer.get(peer)
        if holder is not None and connection is not None:
            self._by_connection[connection] = holder
            holder.connections.add(connection)

    def _lose(self, peer: _Peer) -> None:
        if peer[0] == "worker":
            self._messages.pop(peer[1], None)
        holder = self._by_peer.pop(peer, None)
        if holder is not None:
            holder.peers.discard(peer)
            if not holder.peers:
                self._leaving.append(holder)

    def _hand_over(self, worker: int, task: Any) -> None:
        """Note that a worker gets a message, and with it the counts of its references."""
        holder = self._by_peer.get(("worker", worker))
        if holder is not None:
            refs = [*task.args, *task.nested, *task.results()]
            self._messages[worker] = task.number, refs
            holder.change(refs, 1)

    def _take_back(self, worker: int, task: int) -> None:
        """Note that a worker has rejected its message."""
        holder = self._by_peer.get(("worker", worker))
        number, refs = self._messages.get(worker, (None, ()))
        if holder is not None and number == task:
            del self._messages[worker]
            holder.change(refs, -1)


def _move(holder: Holder, event: Event, answer: Any) -> None:
    """Note what a request of a holder counts and drops."""
    if isinstance(event, ev.DecrementRefs):
        holder.change(event.refs, -1)
    elif isinstance(event, ev.IncrementRefs):
        holder.change(event.refs, 1)
    elif isinstance(event, ev.RemoteCall):
        holder.change((*event.args, *event.nested), -1)
        holder.change(answer, 1)
    elif isinstance(event, ev.PushObj):
        holder.change((answer,), 1)
    elif isinstance(event, ev.AddContained):
        holder.change(event.contained, -1)
