"""Objects that two nodes have named to each other over one stream.

Exports are objects here that the peer holds: kept alive for it, and counted by how often they were named.
Imports are objects there that this node holds: each has a stand-in here, an object of this node's that becomes the
same value once it has come. A stand-in that only this process holds is released, and the release says how many times
the peer had named the object: when that node has named it once more meanwhile, the two counts differ, and it
sends the value again. So neither side waits for a message, and nothing is released too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastrt._core.objects import handles
from fastrt._core.tasks import generators
from fastrt._core.tasks import tasks as core
from fastrt.cluster.lineage import Origin
from fastrt.errors import FastrtError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

HELD_BYTES_MIN = 1 << 16  # smaller objects do not influence where a task runs


class PeerError(FastrtError):
    """The peer sent something that makes no sense; the stream to it is closed."""


@dataclass
class StandIn:
    """The object that represents one of the peer here: `task` seals it, None once it is sealed."""

    ref: ObjectRef
    task: int | None
    named: int = 0
    origin: Origin | None = None  # how to make it again
    cancelled: tuple[bool, bool] | None = None  # on which terms the peer was asked to cancel its task


@dataclass
class _Export:
    ref: ObjectRef
    named: int = 0


class References:
    """The two tables of one stream.

    Args:
        store: this process's attachment.
        send: called for each object whose value the peer does not have and should get once it is ready.
        make: makes the message that names an object, from its number and whether it is the receiver's own.

    Attributes:
        on_held: called with the number and the bytes of each large object of this node's that the other one has the
            value of, too, and with 0 once it has not.
        on_stream: called with the number of each stream of the peer's, and with the one that stands for it.
    """

    def __init__(self, store: Store, send: Callable[[ObjectRef], None], make: Callable[..., Any]) -> None:
        self._store = store
        self._send = send
        self._make = make
        self._exports: dict[int, _Export] = {}
        self._imports: dict[int, StandIn] = {}
        self._standing: dict[int, int] = {}  # stand-in's objref -> the peer's
        self.on_held: Callable[[int, int], None] = lambda objref, nbytes: None
        self.on_stream: Callable[[int, ObjectRef], None] = lambda objref, ref: None

    def name(self, ref: ObjectRef) -> Any:
        """The message that names an object of this node to the other one."""
        theirs = self._standing.get(ref.objref)
        if theirs is not None:
            return self._make(objref=theirs, yours=True)
        export = self._exports.get(ref.objref)
        if export is None:
            export = self._exports[ref.objref] = _Export(ref)
            self._send(ref)
            self._held(ref)
        export.named += 1
        return self._make(objref=ref.objref, stream=generators.is_stream(self._store.client, ref))

    def resolve(self, message: Any) -> ObjectRef:
        """Return the object that the peer has named: one of this node, or a stand-in for one of that node.

        Raises:
            PeerError: it names an object of ours that it does not hold.
            ObjectStoreFullError: no room for another stand-in.
        """
        if message.yours:
            export = self._exports.get(message.objref)
            if export is None:
                raise PeerError(f"the peer names object {message.objref:#x} of this one, which it does not hold")
            return export.ref
        found = self._imports.get(message.objref)
        if found is None:
            task: int | None = None
            if message.stream:
                ref = generators.create(self._store.client, generators.ELSEWHERE)
            else:
                task, ref = core.promise(self._store.client)
            found = self._imports[message.objref] = StandIn(ref, task)
            self._standing[ref.objref] = message.objref
            if message.stream:
                self.on_stream(message.objref, ref)
        found.named += 1
        return found.ref

    def settled(self, objref: int) -> None:
        """The value of the peer's object has come."""
        standin = self.waiting(objref)
        if standin is not None:
            standin.task = standin.origin = None
            self._held(standin.ref)

    def _held(self, ref: ObjectRef) -> None:
        """The peer has the value of an object here, or will soon."""
        if handles.is_ready(self._store.client, ref):
            nbytes = handles.describe(self._store.client, ref)["bytes"]
            if nbytes >= HELD_BYTES_MIN:
                self.on_held(ref.objref, nbytes)

    def imported(self, objref: int) -> StandIn:
        """The stand-in for an object of the peer."""
        return self._imports[objref]

    def waiting(self, objref: int) -> StandIn | None:
        """The stand-in that waits for the value of the peer's object; None when it is not wanted any more."""
        found = self._imports.get(objref)
        return found if found is not None and found.task is not None else None

    def standing(self, ref: ObjectRef) -> StandIn | None:
        """The stand-in that an object of this node is, while it waits for its value; None for every other."""
        return self.waiting(self._standing.get(ref.objref, -1))

    def released(self, objref: int, named: int) -> None:
        """The peer has released an object of this node that was named to it this many times."""
        export = self._exports.get(objref)
        if export is None:
            return
        export.named -= named
        if export.named > 0:
            self._send(export.ref)  # it was named again before we knew; there it is a new stand-in
        else:
            del self._exports[objref]
            self.on_held(objref, 0)

    @property
    def exported(self) -> set[int]:
        """Numbers of the objects of this node that the other one holds."""
        return set(self._exports)

    def has(self, objref: int) -> bool:
        """Whether the peer has an object of this node: it was sent there, or came from there."""
        return objref in self._exports or objref in self._standing

    def exported_ref(self, objref: int) -> ObjectRef | None:
        """An object of this node that the other one holds; None when it does not."""
        export = self._exports.get(objref)
        return None if export is None else export.ref

    def adopt(self, message: Any, ref: ObjectRef) -> None:
        """Let an object here be the stand-in for an object that the peer has named."""
        found = self._imports.get(message.objref)
        if found is None:
            self._imports[message.objref] = StandIn(ref, None, named=1)
            self._standing[ref.objref] = message.objref
        else:
            found.named += 1  # holders of the earlier stand-in go on using it

    def given_up(self, needed: set[int], is_used: Callable[[int], bool]) -> Iterator[tuple[int, StandIn]]:
        """Take out the imports that are not used here any more, and whose stand-ins are not `needed` either.

        Args:
            needed: numbers of stand-ins.
            is_used: whether one of them has a use that its references do not show; called last.
        Returns:
            (the peer's object, its stand-in) of each.
        """
        mine = [self._store.client.index]
        for objref, one in list(self._imports.items()):
            about = handles.describe(self._store.client, one.ref)
            held = about["refs"] != mine or about["counted"] or one.ref.objref in needed
            if not held and not is_used(one.ref.objref):
                del self._imports[objref], self._standing[one.ref.objref]
                self.on_held(one.ref.objref, 0)
                yield objref, one

    @property
    def has_stand_ins(self) -> bool:
        """Whether objects of the peer are named here."""
        return bool(self._imports)

    def unfinished(self) -> list[StandIn]:
        """Stand-ins that still wait for their value, when the stream has ended."""
        return [one for one in self._imports.values() if one.task is not None]

    def newly_cancelled(self) -> Iterator[tuple[int, bool, bool]]:
        """Objects of the peer whose tasks were cancelled here since the last call: (objref, force, alone)."""
        for objref, one in self._imports.items():
            terms = None if one.task is None else core.cancel_terms(self._store.client, one.task)
            if terms is not None and terms != one.cancelled:
                one.cancelled = terms
                yield objref, *terms

    def clear(self) -> None:
        """Let go of everything: the stream has ended, and callbacks may keep this object for a while."""
        self._exports.clear()
        self._imports.clear()
        self._standing.clear()
