"""Values that other nodes keep for this one: where they are, how they are fetched, and what follows when they are lost.

A large result stays on the node that made it, and a large object that another node names stays there until a process of
this node reads it. The local object is sealed without bytes (`_core.objects.remote`). A read asks the daemon for them,
the daemon asks the uplink, and the uplink fetches them straight from a node that has them.

When the stream to a node ends, both nodes wait `CLAIM_S` for the next one. The node that keeps values holds them for so
long (`Kept`), and the other one claims them on the next stream: so neither a cut network nor a killed uplink loses a
value. The same holds for objects that do not exist yet: their stand-ins outlive the uplink, and the next one gets them
from the daemon (`node.kept`). An object is lost when its node leaves the cluster, does not come back in time, or does
not know it any more. Then a copy in memory here becomes an ordinary value, and a value without a copy is made again by
`lineage` or becomes an error.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastrt._core.memory import arena
from fastrt._core.objects import handles, remote, spill
from fastrt.cluster.absent_values import AbsentNode, Unclaimed
from fastrt.cluster.borrowing import AnyOf
from fastrt.cluster.claims import Absence
from fastrt.errors import FastrtError, ObjectLostError, ObjectStoreFullError, TaskCancelledError
from fastrt.node.restore_ahead import RestoreAhead
from fastrt.store.client import NO_ROOM, Store
from fastrt.store.messages import TaskRecord
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import Serialized, serialize

if TYPE_CHECKING:
    from fastrt.cluster.lineage import Origin
    from fastrt.cluster.peer_stream import Exchange
    from fastrt.cluster.references import StandIn

_AHEAD_SHARE = 4  # of the store: the most that is fetched ahead at once
_MOVES_MAX = 16  # values that are fetched at once from a node that leaves
_NO_SOURCE = "an object of another node is lost: the process that knew where its value is was killed"


@dataclass
class Source:
    """Where the bytes of a remote value are.

    Attributes:
        ref: the local object.
        exchange: the stream to the node that has named the value; it lasts as long as this source.
        objref: the object's number on that node.
        number: the number under which a native stream offers the value.
        holder: the address of that stream; empty: the named node's.
        same_as: the local object under which the peer's object is known here, which keeps the source valid; None: this.
        offered: the number under which this node offers its copy to other nodes; 0: it does not.
        is_wanted: whether the copy becomes an ordinary value once it is here.
    """

    ref: ObjectRef
    exchange: Exchange
    objref: int
    number: int
    holder: str
    same_as: ObjectRef | None = None
    offered: int = 0
    is_wanted: bool = False

    @property
    def address(self) -> str:
        """The address of the native stream that has the value."""
        values = self.exchange.traffic.values
        return self.holder or (values.address if values is not None else "")

    @property
    def origin(self) -> Origin | None:
        """How to make the value again; None: it cannot be made again, or the stream has ended."""
        standin = self.exchange.references.find(self.objref)
        return None if standin is None else standin.origin

    def shared_by(self, ref: ObjectRef) -> Source:
        """Return the same source for another local object."""
        first = self.ref if self.same_as is None else self.same_as
        return Source(ref, self.exchange, self.objref, self.number, self.holder, first)


@dataclass
class _Lost:
    """A value that is made again, or that others wait for: its origin, whose record must last until then; callbacks."""

    origin: Origin | None = None
    then: list[Callable[[], object]] = field(default_factory=list)


class RemoteValues:
    """The remote values of this node.

    Args:
        store: the uplink's attachment.

    Attributes:
        rebuild: called with a lost value's replacement, its origin, and how its node was lost.
        on_shared: called with the number of each object that shares another one's source, and that one's origin.
        is_ending: this node leaves the cluster: values that are lost from now on are not made again.
        needed: returns the numbers of the objects of this node that other nodes hold or wait for.
        promise: returns what seals a stand-in, from its task.
        wait_for: called with such a promise and the object whose value it gets once that exists.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = self.client = store.client
        self._sources: dict[int, Source] = {}
        self._offers: dict[tuple[Exchange, int], list[Source]] = {}  # by stream and number
        self._absent: dict[str, AbsentNode] = {}
        self._lost: dict[int, _Lost] = {}
        self._shared: dict[int, Source] = {}  # those that share another one's
        self._ahead = RestoreAhead(arena.room(store.client)[2], has_files=False, at_once=_AHEAD_SHARE)
        self.rebuild: Callable[[Any, Origin | None, str], None] = _refuse
        self.on_shared: Callable[[int, Origin | None], None] = lambda objref, origin: None
        self.is_ending = False
        self.needed: Callable[[], Container[int]] = set
        self.promise: Callable[[int], Any] = _no_promise
        self.wait_for: Callable[[Any, ObjectRef], None] = _no_promise

    def adopt(self) -> None:
        """Take over the values that an earlier uplink process of this node knew; they are claimed from their nodes."""
        for index, objref, node, there in remote.sources(self._client):
            with contextlib.suppress(FastrtError):  # dropped meanwhile
                ref = handles.acquire(self._client, objref, index)
                self._absent_node(node, "its stream to this node ended").add(there, Unclaimed(ref))

    def assign(self, origins: Mapping[int, Origin]) -> None:
        """Set how to make unclaimed values again, by their objects' numbers."""
        for one in itertools.chain(*self._absent.values()):
            one.origin = origins.get(one.ref.objref, one.origin)

    def add_detached(self, node: str, number: int, standin: StandIn, why: str) -> None:
        """Have a stand-in claimed from its node, because its stream has ended before its value came."""
        unclaimed = Unclaimed(standin.ref, standin.origin, standin=standin)
        self._absent_node(node, why).add(number, unclaimed)

    def promised(self) -> set[int]:
        """Return the tasks of the stand-ins that wait for their nodes."""
        every = itertools.chain(*self._absent.values())
        return {one.standin.task or 0 for one in every if one.standin is not None}

    def share(self, one: Unclaimed, ref: ObjectRef) -> None:
        """Give a stand-in the value of another object of this node, once that has one."""
        assert one.standin is not None
        assert one.standin.task is not None
        one.standin.lose(one.ref.objref)
        self.wait_for(self.promise(one.standin.task), ref)

    def add(self, source: Source) -> None:
        """Record where a value is that was just sealed as a remote one."""
        before = self._sources.get(source.ref.objref)
        if before is not None:
            self._remove(before)
        self._sources[source.ref.objref] = source
        self._offers.setdefault((source.exchange, source.number), []).append(source)
        if source.same_as is not None:
            self._shared[source.ref.objref] = source
            self.on_shared(source.ref.objref, source.origin)

    def _remove(self, source: Source) -> None:
        del self._sources[source.ref.objref]
        self._shared.pop(source.ref.objref, None)
        sharing = self._offers[source.exchange, source.number]
        sharing.remove(source)
        if not sharing:
            del self._offers[source.exchange, source.number]
        if source.offered and source.exchange.traffic.values is not None:
            source.exchange.traffic.values.withdraw_copy(source.offered)

    def find(self, objref: int) -> Source | None:
        """Return where an object's value is; None when it is not known, or is a value of this node."""
        return self._sources.get(objref)

    def find_offer(self, exchange: Exchange, number: int) -> list[Source]:
        """Return the sources of the objects whose value a peer offers under a number."""
        return list(self._offers.get((exchange, number), ()))

    def wanted(self, index: int, objref: int) -> None:
        """Fetch the bytes of a value that a process waits for.

        A value without a known source is lost: a process died when it was about to record where the value is.
        """
        if objref in self._sources or objref in self._lost or self._is_absent(objref):
            self.fetch(objref)
            return
        with contextlib.suppress(FastrtError):  # dropped meanwhile
            ref = handles.acquire(self._client, objref, index)
            if remote.is_missing(self._client, ref):
                Replacement(self._store, self, ref).fail(ObjectLostError(_NO_SOURCE))

    def _is_absent(self, objref: int) -> bool:
        return any(objref in absent for absent in self._absent.values())

    def fetch(self, objref: int, is_urgent: bool = True) -> None:
        """Fetch the bytes of a value if they are not here; `is_urgent`: a process waits for them."""
        source = self._sources.get(objref)
        if source is not None and remote.is_missing(self._client, source.ref):
            source.exchange.traffic.arrivals.fetch(source, is_urgent)

    def move(self, exchange: Exchange) -> bool:
        """Make the used values that a peer keeps ordinary ones of this node, because the peer leaves.

        They are fetched a few at a time. A value that is fetched is not fetched again, so this is called until it
        returns True.

        Returns:
            Whether none is left.
        """
        needed = self.needed()
        there = [one for one in self._sources.values() if one.exchange is exchange and self.is_used(one.ref, needed)]
        arrivals, fetching = exchange.traffic.arrivals, 0
        for source in there:
            source.is_wanted = True
            if arrivals.is_fetching(source.number):  # `detach` would wait for the end
                fetching += 1
            elif not remote.is_missing(self._client, source.ref) and remote.detach(self._client, source.ref):
                self.forget(source.ref.objref)
            elif fetching < _MOVES_MAX:
                fetching += 1
                self.fetch(source.ref.objref)
        return not there

    def fetch_ahead(self, tasks_most: int, tasks: list[TaskRecord]) -> None:
        """Begin to fetch arguments before a worker or resources are free.

        Args:
            tasks_most: of so many tasks in this node's queue, the next ones.
            tasks: and then of these, which wait for resources.
        """
        used, _, most = arena.room(self._client)
        wanted = spill.wanted_next(self._client, tasks_most, True) + spill.wanted_by(self._client, tasks)
        for step in self._ahead.decide(wanted, most - used, False):
            source = self._sources.get(step.objref)
            if source is None or not remote.is_missing(self._client, source.ref):
                continue
            if not source.exchange.traffic.arrivals.fetch_ahead(source):
                self._ahead.found_no_room(step.objref)

    def forget(self, objref: int) -> None:
        """Forget a value that this node does not need any more."""
        source = self._sources.get(objref)
        if source is not None:
            self._remove(source)
            if not self.find_offer(source.exchange, source.number):
                source.exchange.traffic.arrivals.cancel(source.number)

    # ---- streams that end, and begin again ----

    def detach(self, exchange: Exchange, why: str) -> None:
        """Handle the end of a stream, whose references are still known: its node may come back and have the values.

        Args:
            exchange: the stream.
            why: how the peer was lost.
        """
        for number, standin in exchange.references.unfinished():
            standin.detach(number)
            if exchange.references.node:
                self.add_detached(exchange.node, number, standin, why)
            else:  # the nodes do not keep anything for each other
                self.give_up([Unclaimed(standin.ref, standin.origin, standin=standin)], why)
        gone = [source for source in self._sources.values() if source.exchange is exchange]
        if not gone and exchange.node not in self._absent:
            return
        absent = self._absent_node(exchange.node, why)
        for source in gone:
            self._remove(source)
            absent.add(source.objref, Unclaimed(source.ref, source.origin, source.same_as))
        if self.is_ending:
            self.lose(exchange.node, why)

    def _absent_node(self, node: str, why: str) -> AbsentNode:
        absent = self._absent.get(node)
        if absent is None:
            absent = self._absent[node] = AbsentNode(node, why, time.monotonic())
        return absent

    def _is_claimed(self, node: str) -> None:
        self._absent.pop(node).claimed()

    def claims(self, node: str) -> list[int]:
        """Return the numbers of the values to claim from a node that has come back; unused ones are forgotten."""
        absent = self._absent.get(node)
        if absent is None:
            return []
        needed = AnyOf(self.needed(), self._lost)
        for number in absent.numbers:
            for one in absent.pop(number):
                if self.is_used(one.ref, needed):
                    absent.add(number, one)
                elif one.standin is not None:
                    self._drop(one.standin, number)
        if not absent:
            self._is_claimed(node)
        return absent.numbers

    def is_used(self, ref: ObjectRef, needed: Container[int]) -> bool:
        """Return whether anything but this process uses an object; `needed`: what other nodes hold or wait for."""
        return not remote.only_here(self._client, [ref]) or ref.objref in needed

    def tidy(self) -> set[int]:
        """Forget unused values that share another one's source; return the objects whose sources are shared."""
        needed = self.needed() if self._shared else set[int]()
        for source in list(self._shared.values()):
            if not self.is_used(source.ref, needed):
                self.forget(source.ref.objref)
        return {source.same_as.objref for source in self._shared.values() if source.same_as is not None}

    def claimed(self, node: str, number: int) -> list[Unclaimed]:
        """Return and remove the values that a node keeps under a number, because it has answered a claim."""
        absent = self._absent.get(node)
        values = [] if absent is None else absent.pop(number)
        if absent is not None and not absent:
            self._is_claimed(node)
        return values

    def absent(self) -> list[str]:
        """Return the nodes that must be connected to, to claim values from them."""
        return list(self._absent)

    def tend(self, members: Collection[str] | None) -> None:
        """Give up nodes that have left the cluster or did not come back in time; None: the members are not known."""
        now = time.monotonic()
        for node, absent in list(self._absent.items()):
            if absent.look(now, None if members is None else node in members):
                self.lose(node, absent.why)

    def lose(self, node: str, why: str) -> None:
        """Give up the values that a node keeps."""
        absent = self._absent.pop(node, None)
        if absent is not None:
            absent.lose()
            self.give_up(list(absent), why)

    def give_up(self, values: list[Unclaimed], why: str) -> None:
        """Make lost values ordinary ones where there are copies; have used ones made again, and forget the others."""
        needed = AnyOf(self.needed(), self._lost)
        for one in values:
            if one.standin is not None:
                self._lose(one, why, needed)
        missing: list[Unclaimed] = []
        here: list[Unclaimed] = []
        for one in values:
            if one.standin is None and remote.detach(self._client, one.ref):
                here.append(one)
            elif one.standin is None and self.is_used(one.ref, needed):
                missing.append(one)
        for one in missing:
            self._lost.setdefault(one.ref.objref, _Lost()).origin = one.origin
        for one in here:
            self.resolved(one.ref.objref)
        for one in missing:
            replacement = Replacement(self._store, self, one.ref)
            if self.is_ending:
                replacement.fail(ObjectLostError(f"an object of another node cannot be fetched any more: {why}"))
            elif one.same_as is not None and self._has_value(one.same_as):
                replacement.copy_of(one.same_as)
            else:
                self.rebuild(replacement, one.origin, why)

    def _has_value(self, ref: ObjectRef) -> bool:
        """Return whether the bytes of an object are here: not those of a stand-in that was lost or dropped itself."""
        if not handles.is_ready(self._client, ref) or remote.is_missing(self._client, ref):
            return False
        return not handles.describe(self._client, ref)["error"]

    def _lose(self, one: Unclaimed, why: str, needed: Container[int]) -> None:
        """Have the value of a stand-in made again, if anything uses it."""
        assert one.standin is not None
        assert one.standin.task is not None
        if not self.is_used(one.ref, needed):
            self._drop(one.standin, one.ref.objref)
            return
        one.standin.lose(one.ref.objref)
        made = self.promise(one.standin.task)
        if self.is_ending:
            made.fail(ObjectLostError(f"an object of another node cannot be fetched any more: {why}"))
        else:
            self.rebuild(made, one.origin or one.standin.origin, why)

    def _drop(self, standin: StandIn, number: int) -> None:
        """End a stand-in that nothing on this node uses."""
        assert standin.task is not None
        standin.give_up(number)
        self.promise(standin.task).fail(TaskCancelledError("no reference to this object is left"))

    def follow(self, made: Replacement | Any, ref: ObjectRef) -> bool:
        """Give a lost value the source of another object; wait for that one if it is lost too, or its stream has ended.

        Without a known source, the value becomes an error: the event loop cannot wait for bytes that only it can fetch.

        Args:
            made: the lost value's `Replacement`, or anything with its methods.
            ref: the other object, which is sealed.
        Returns:
            False when the other object is an ordinary value: the caller copies it.
        """
        if ref.objref in self._lost or self._is_absent(ref.objref):
            lost = self._lost.setdefault(ref.objref, _Lost())
            lost.then.append(lambda: self.follow(made, ref) or made.copy_of(ref))
            return True
        source = self._sources.get(ref.objref)
        if source is not None:
            made.point_at(source)
            return True
        if remote.is_missing(self._client, ref):
            made.fail(ObjectLostError(_NO_SOURCE))
            return True
        return False

    def resolved(self, objref: int) -> None:
        """Continue with the values that wait for this one, which has a source or bytes again."""
        lost = self._lost.pop(objref, None)
        for then in () if lost is None else lost.then:
            then()


class Replacement:
    """Fills the place of a lost remote value with bytes, an error, or another source.

    Args:
        store: this process's attachment.
        values: the remote values.
        ref: the local object.
    """

    def __init__(self, store: Store, values: RemoteValues, ref: ObjectRef) -> None:
        self._store = store
        self._values = values
        self.ref = ref

    def copy(self, kind: int, error: bool, data: Any, contains: list[ObjectRef]) -> None:
        """Use these bytes, in the form in which the arena stores them."""
        if contains:
            self.fail(ObjectLostError("an object of another node was made again, with references that it had not had"))
            return
        view = memoryview(data).cast("B")
        try:
            self._fill(view, kind, error, True)
        except ObjectStoreFullError as exc:
            self.fail(exc)

    def copy_of(self, ref: ObjectRef) -> None:
        """Use the bytes of another object of this node."""
        try:
            kind, error, data = self._store.read(ref, raw=True)
        except FastrtError as exc:
            self.fail(exc)
            return
        self.copy(kind, error, data, handles.contained(self._store.client, ref))

    def point_at(self, source: Source) -> None:
        """Use the source of another remote value."""
        self._values.add(source.shared_by(self.ref))
        remote.point_at(self._store.client, self.ref, source.exchange.node, source.objref)
        self._values.resolved(self.ref.objref)

    def fail(self, error: FastrtError) -> None:
        """Use an error; it never fails because the store is full."""
        parts: Serialized = serialize(error)
        try:
            self._fill(memoryview(parts.to_bytes()), parts.kind, True, False)
        except ObjectStoreFullError:
            self._fill(memoryview(NO_ROOM.to_bytes()), NO_ROOM.kind, True, True)

    def _fill(self, view: memoryview, kind: int, error: bool, patient: bool) -> None:
        client = self._store.client

        def make() -> remote.Fill | None:
            return remote.replace(client, self.ref, view.nbytes, kind, error)

        def make_file() -> remote.Fill | None:
            return self._store.files.replace(self.ref, view.nbytes, kind)

        fill = self._store.with_room(view.nbytes, make, patient, None if error else make_file)
        if fill is not None:
            fill.copy(0, view)
            fill.seal()
        self._values.resolved(self.ref.objref)


class Kept:
    """The objects of this node that other nodes held when their streams ended, and may claim on the next ones.

    Attributes:
        find: returns the object of a number that a node holds over a stream that has not ended here yet, or None.
        on_drop: called with the node and the number of each object that is not kept any more, and not held either.
    """

    def __init__(self) -> None:
        self._objects: dict[str, tuple[Absence, dict[int, ObjectRef]]] = {}
        self.find: Callable[[str, int], ObjectRef | None] = lambda node, objref: None
        self.on_drop: Callable[[str, int], None] = lambda node, objref: None

    def keep(self, node: str, refs: Iterable[ObjectRef]) -> None:
        """Hold objects for a node whose stream has ended; a stream without any leaves the others' time as it is."""
        new = {ref.objref: ref for ref in refs}
        if new:
            self._objects[node] = (Absence(node, "", time.monotonic()), self._held(node) | new)

    def _held(self, node: str) -> dict[int, ObjectRef]:
        return self._objects[node][1] if node in self._objects else {}

    def claim(self, node: str, objref: int) -> ObjectRef | None:
        """Return an object that a node claims; None when it is not held for that node.

        It stays here until the node has claimed all. The node may get the answer to an earlier claim later, on a stream
        whose end it has not noticed; then it uses that one, releases this one, and claims once more.
        """
        found = self._held(node).get(objref)
        return self.find(node, objref) if found is None else found

    def is_held(self, node: str, objref: int) -> bool:
        """Return whether a node may still use an object: it may claim it, or holds it over any of its streams.

        Two nodes can have several streams to each other. A release on one of them does not end what another one holds.
        """
        return objref in self._held(node) or self.find(node, objref) is not None

    def drop(self, node: str) -> None:
        """Drop the objects that a node has not claimed; it has claimed all that it needs."""
        absence, held = self._objects.pop(node, (None, {}))
        if absence is not None:
            absence.claimed()
        self._dropped(node, held)

    def _dropped(self, node: str, objrefs: Iterable[int]) -> None:
        for objref in objrefs:
            if not self.is_held(node, objref):
                self.on_drop(node, objref)

    @property
    def is_empty(self) -> bool:
        """Return whether no objects are held."""
        return not self._objects

    def tend(self, members: Collection[str] | None) -> None:
        """Drop objects that were not claimed in time, or whose node has left; None: the members are not known."""
        now = time.monotonic()
        for node, (absence, refs) in list(self._objects.items()):
            if absence.look(now, None if members is None else node in members):
                del self._objects[node]
                absence.lose()
                self._dropped(node, refs)


def _no_promise(*args: object) -> Any:
    raise AssertionError("stand-ins need the node's lineage")


def _refuse(made: Any, origin: Origin | None, why: str) -> None:
    """Make an error of a lost value, because this node has no lineage."""
    made.fail(ObjectLostError(why))
