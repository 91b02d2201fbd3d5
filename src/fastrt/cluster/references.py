"""Objects that two nodes have named to each other over one stream.

Exports are objects of this node that the peer holds: they are kept alive for it, and each counts how often it was
named. Imports are objects of the peer that this node holds: each has a stand-in, a local object that gets the same
value once it has arrived, or that says where it is (`remote_values`). A stand-in that only this process holds is
released. The release message says how many times the peer had named the object. If the peer has named it once more
meanwhile, the two counts differ, and the peer sends the value again. So neither side waits for a message, and nothing
is released too early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastrt._core.objects import handles, remote, spill
from fastrt._core.tasks import actors, generators
from fastrt._core.tasks import tasks as core
from fastrt.cluster.borrowing import ARRIVED, WAITING, Effect, Exports, Imported
from fastrt.cluster.lineage import Origin
from fastrt.errors import FastrtError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

# Stand-ins that are looked at in one go, and of these the most that are given up: some milliseconds each.
LOOKS, RELEASES = 20_000, 1000
HELD_BYTES_MIN = 1 << 16  # smaller objects do not influence the choice of the node for a task


class PeerError(FastrtError):
    """The peer sent something invalid; the stream to it is closed."""


@dataclass
class StandIn(Imported):
    """The local object that represents one of the peer: `task` seals it; None once it is sealed.

    The value of a sealed one is a copy, or it is remote: the peer keeps the bytes.
    """

    ref: ObjectRef
    task: int | None
    named: int = 0
    state: str = WAITING
    moves: int = 0
    origin: Origin | None = None  # how to rebuild it
    cancelled: tuple[bool, bool] | None = None  # (force, alone) of the last cancellation sent to the peer


def to_source(node: str, objref: int) -> bytes:
    """Return the text that names an object of a node in the arena, for a promise of its value."""
    return f"{node} {objref:x}".encode()


def from_source(source: bytes) -> tuple[str, int]:
    """Return the node and the number of the object that `to_source` has named."""
    node, _, objref = source.decode().partition(" ")
    return node, int(objref, 16)


class References:
    """The exports and the imports of one stream.

    Args:
        store: this process's attachment.
        send: called for each object whose value the peer does not have and should get once it is ready.
        make: creates the message that names an object, from its number and whether the receiver owns it.

    Attributes:
        on_held: called with the number and the bytes of each large object of this node whose value the peer also has,
            and with 0 bytes once the peer no longer has it.
        on_again: called for each object that is named again: if the peer releases it before this name arrives, its
            value is sent again later, and the peer may have to claim it.
        on_stream: called with the number of each generator's stream of the peer, and with the local stream.
        node: the peer's session once stand-ins may outlive this stream; else empty.
    """

    def __init__(self, store: Store, send: Callable[[ObjectRef], None], make: Callable[..., Any]) -> None:
        self._store = store
        self._send = send
        self._make = make
        self._exports = Exports[ObjectRef]()
        self._imports: dict[int, StandIn] = {}
        self._waiting: dict[int, StandIn] = {}  # of the imports: those whose values have not arrived
        self._unlooked: list[int] = []  # imports that this pass of `given_up` has not looked at yet
        self._peer_objrefs: dict[int, int] = {}  # stand-in's objref -> the objref on the peer
        self.on_held: Callable[[int, int], None] = lambda objref, nbytes: None
        self.on_again: Callable[[ObjectRef], None] = lambda ref: None
        self.on_stream: Callable[[int, ObjectRef], None] = lambda objref, ref: None
        self.node = ""

    def name(self, ref: ObjectRef) -> Any:
        """Return the message that names an object of this node to the peer."""
        theirs = self._peer_objrefs.get(ref.objref)
        if theirs is not None:
            return self._make(objref=theirs, yours=True)
        if self._exports.name(ref.objref, ref):
            self._send(ref)
            self._held(ref)
        else:
            self.on_again(ref)
        return self._make(objref=ref.objref, stream=generators.is_stream(self._store.client, ref))

    def theirs(self, ref: ObjectRef) -> int:
        """Return the number of the peer's object that a local object stands for; 0: for none."""
        return self._peer_objrefs.get(ref.objref, 0)

    def keep(self, ref: ObjectRef) -> bool:
        """Name a result to the peer that stays here until the peer releases it; False if the peer knows it already."""
        if ref.objref in self._exports or ref.objref in self._peer_objrefs:
            return False
        return self._exports.name(ref.objref, ref)

    def name_again(self, ref: ObjectRef) -> None:
        """Name an object to the peer that it has claimed: it held the object on an earlier stream."""
        self._exports.name(ref.objref, ref)

    def kept(self, objref: int, ref: ObjectRef, origin: Origin | None) -> bool:
        """Use a local result as the stand-in for an object that the peer keeps; False if there is one already."""
        if objref in self._imports:
            return False
        self._add(objref, StandIn(ref, None, 1, ARRIVED, origin=origin))
        self._held(ref)
        return True

    def claimed(self, objref: int, standin: StandIn) -> bool:
        """Use a stand-in of an earlier stream again; False if the peer's object has another one here already."""
        if objref in self._imports:
            return False
        standin.claim(objref)
        self._add(objref, standin)
        return True

    def resolve(self, message: Any) -> ObjectRef:
        """Return the object that the peer has named: an object of this node, or the stand-in for one of the peer.

        Raises:
            PeerError: it names an object of this node that the peer does not hold.
            ObjectStoreFullError: there is no room for another stand-in.
        """
        if message.yours:
            ref = self._exports.find(message.objref)
            if ref is None:
                raise PeerError(f"the peer names object {message.objref:#x} of this node, which it does not hold")
            return ref
        found = self._imports.get(message.objref)
        if found is None:
            task: int | None = None
            if message.stream:
                ref = generators.create(self._store.client, generators.ELSEWHERE)
            else:
                source = to_source(self.node, message.objref) if self.node else b""
                task, ref = core.promise(self._store.client, source)
            state = ARRIVED if task is None else WAITING
            found = self._add(message.objref, StandIn(ref, task, state=state))
            if message.stream:
                self.on_stream(message.objref, ref)
        found.named += 1
        return found.ref

    def _add(self, objref: int, standin: StandIn) -> StandIn:
        self._imports[objref] = standin
        self._peer_objrefs[standin.ref.objref] = objref
        if standin.task is not None:
            self._waiting[objref] = standin
        return standin

    def settled(self, objref: int) -> None:
        """Record that the value of an object of the peer has arrived."""
        standin = self._waiting.pop(objref, None)
        if standin is not None:
            standin.task = None
            standin.arrive(objref)
            if not remote.is_remote(self._store.client, standin.ref.index, standin.ref.objref):
                standin.origin = None
            self._held(standin.ref)

    def _held(self, ref: ObjectRef) -> None:
        """Report a large object whose value both nodes have, or will have soon."""
        if handles.is_ready(self._store.client, ref):
            nbytes = spill.size(self._store.client, ref.index)
            if nbytes >= HELD_BYTES_MIN:
                self.on_held(ref.objref, nbytes)

    def imported(self, objref: int) -> StandIn:
        """Return the stand-in for an object of the peer."""
        return self._imports[objref]

    def find(self, objref: int) -> StandIn | None:
        """Return the stand-in for an object of the peer; None when there is none."""
        return self._imports.get(objref)

    def waiting(self, objref: int) -> StandIn | None:
        """Return the stand-in that waits for the value of the peer's object; None when no stand-in waits for it."""
        return self._waiting.get(objref)

    def find_missing(self, ref: ObjectRef) -> StandIn | None:
        """Return the record of a stand-in whose value is not on this node; None for any other object."""
        found = self._imports.get(self._peer_objrefs.get(ref.objref, -1))
        is_here = found is None or (found.task is None and not remote.is_missing(self._store.client, ref))
        return None if is_here else found

    def released(self, objref: int, named: int) -> None:
        """Handle the peer's release of an object of this node; the peer had received its name `named` times."""
        ref = self._exports.find(objref)
        effect = self._exports.release(objref, named)
        if effect is Effect.SEND_AGAIN and ref is not None:
            self._send(ref)
        elif effect is Effect.DROP:
            self.on_held(objref, 0)

    def claimable(self) -> list[ObjectRef]:
        """Return the objects of this node that the peer may claim on its next stream: not actors and generators."""
        refs = [self._exports.find(objref) for objref in self._exports]
        client = self._store.client
        return [
            ref
            for ref in refs
            if ref is not None and not actors.is_actor(client, ref) and not generators.is_stream(client, ref)
        ]

    @property
    def exported(self) -> Collection[int]:
        """Return the numbers of the objects of this node that the peer holds, as they are from now on."""
        return self._exports

    def has(self, objref: int) -> bool:
        """Return whether the peer has an object of this node: it was sent to the peer, or came from it."""
        return objref in self._exports or objref in self._peer_objrefs

    def exported_ref(self, objref: int) -> ObjectRef | None:
        """Return an object of this node that the peer holds; None when it does not."""
        return self._exports.find(objref)

    def adopt(self, message: Any, ref: ObjectRef) -> None:
        """Use a local object as the stand-in for an object that the peer has named."""
        found = self._imports.get(message.objref)
        if found is None:
            self._add(message.objref, StandIn(ref, None, 1, ARRIVED))
        else:
            found.named += 1  # holders of the earlier stand-in continue to use it

    def given_up(
        self, needed: Container[int], is_used: Callable[[int], bool], most: int
    ) -> Iterator[tuple[int, StandIn]]:
        """Remove the imports that this node does not use any more, among the next ones.

        A node may hold a million objects of another one. So a call looks at some of them, and the next call goes on
        from there; when `has_unlooked` is False, all were looked at.

        Args:
            needed: numbers of stand-ins to keep.
            is_used: says whether a stand-in has a use that its references do not show; called last.
            most: how many imports to look at; `RELEASES` of them are removed at most.
        Returns:
            For each removed import: (the peer's object, its stand-in).
        """
        if not self._unlooked:
            self._unlooked = list(self._imports)
        looked_at = [objref for objref in self._unlooked[-most:] if objref in self._imports]
        del self._unlooked[-most:]
        standins = [self._imports[objref] for objref in looked_at]
        left = RELEASES
        for k in remote.only_here(self._store.client, [one.ref for one in standins]):
            objref, one = looked_at[k], standins[k]
            if not left:
                self._unlooked += looked_at[k:]
                return
            if self._imports.get(objref) is one and one.ref.objref not in needed and not is_used(one.ref.objref):
                left -= 1
                del self._imports[objref], self._peer_objrefs[one.ref.objref]
                self._waiting.pop(objref, None)
                self.on_held(one.ref.objref, 0)
                one.give_up(objref)
                yield objref, one

    @property
    def has_unlooked(self) -> bool:
        """Return whether `given_up` has not looked at all imports yet."""
        return bool(self._unlooked)

    @property
    def has_stand_ins(self) -> bool:
        """Return whether this node holds objects of the peer."""
        return bool(self._imports)

    def stand_ins(self) -> Iterable[StandIn]:
        """Return all stand-ins."""
        return self._imports.values()

    def unfinished(self) -> list[tuple[int, StandIn]]:
        """Return the stand-ins that wait for their values, by the peer's objects; used when the stream has ended."""
        return list(self._waiting.items())

    def newly_cancelled(self) -> Iterator[tuple[int, bool, bool]]:
        """Yield (objref, force, alone) for objects of the peer whose tasks were cancelled since the last call."""
        for objref, one in self._waiting.items():
            assert one.task is not None
            terms = core.cancel_terms(self._store.client, one.task)
            if terms is not None and terms != one.cancelled:
                one.cancelled = terms
                yield objref, *terms

    def clear(self) -> None:
        """Release all objects: the stream has ended, but callbacks may keep this table alive for a while."""
        self._exports.clear()
        self._imports.clear()
        self._waiting.clear()
        self._peer_objrefs.clear()
