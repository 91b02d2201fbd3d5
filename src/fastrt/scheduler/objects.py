"""Where objects are, who waits for them, and what is on its way: the part of the state that knows references.

A reference is resolved once its chain of aliases ends at an object that some store has. It is lost when nobody will
make that object any more, or its last store is gone; an `ObjReady` brings it back.

Invariants: only canonical references have stores; no delivery goes to a store that has the object; each delivery under
way holds its object alive; who waits, waits for a live reference that is not resolved.

Source: early Ray's `objtable_`, `pull_queue_` and `alias_notification_queue_`, searched anew at each call there, kept
by reference here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from fastrt._core.refcount import RefTable
from fastrt._core.refcount_audit import check_invariants
from fastrt.scheduler.events import DeallocateObject, DeliverObj, Effect, NotifyAlias, RequestFailed

# Stores compared as sources of a delivery, in turn.
_SOURCES_COMPARED = 8
# Stores looked at for how many bytes of an argument they have: enough to find a good place, however many have it.
_PLACES_MAX = 16
_DELIVERY_TRIES = 4


@dataclass(slots=True)
class Delivery:
    """An object on its way.

    Attributes:
        source: the store that sends it.
        tries: how often it was begun.
        aliases: what the target is to be told once it is there.
        workers: who asked for it, and by which reference.
    """

    source: int
    tries: int = 1
    aliases: dict[int, None] = field(default_factory=dict)
    workers: list[tuple[int, int]] = field(default_factory=list)


class Objects:
    """References and their objects.

    Args:
        emit: takes effects.
        on_resolved: called with what waited for a reference that is now resolved.
        on_lost: called with what waited for a reference that is now lost.
    """

    def __init__(
        self,
        emit: Callable[[Effect], None],
        on_resolved: Callable[[int], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.refs = RefTable()
        self.stores: dict[int, dict[int, None]] = {}  # by canonical reference; the one used last as a source is last
        self.at_store: dict[int, dict[int, None]] = {}  # canonical references by store
        self.nbytes: dict[int, int] = {}
        self.lost: dict[int, str] = {}  # why, by the end of its chain
        self.makers: dict[int, tuple[int | None, int]] = {}  # worker and store that are to make a pending reference
        self.deliveries: dict[tuple[int, int], Delivery] = {}
        self.sending: dict[int, int] = {}  # deliveries under way, by source
        self.requests: dict[int, list[tuple[int, int]]] = {}  # worker and store, by reference
        self._tasks: dict[int, list[int]] = {}  # by reference
        self.told: dict[int, set[int]] = {}  # stores that know an alias
        self._emit = emit
        self._on_resolved = on_resolved
        self._on_lost = on_lost

    def add_store(self, store: int) -> None:
        """A store has come, empty."""
        self.at_store[store] = {}

    def is_resolved(self, ref: int) -> bool:
        """Whether a live reference's object can be had from a store."""
        canonical = self.refs.canonical(ref)
        return canonical is not None and canonical in self.stores

    def why_lost(self, ref: int) -> str | None:
        """Why a live reference's object will not come, None when it is there or may come."""
        return self.lost.get(self.refs.end(ref)) if self.lost else None

    def places(self, refs: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Bytes of these objects by store; an object of unknown size counts as one byte."""
        found: dict[int, int] = {}
        canonical_of, all_stores, nbytes = self.refs.canonical, self.stores, self.nbytes
        for ref in refs:
            canonical = canonical_of(ref)
            if canonical is not None:
                stores = all_stores.get(canonical, ())
                size = nbytes.get(canonical, 1)
                for store in stores if len(stores) <= _PLACES_MAX else islice(stores, _PLACES_MAX):
                    found[store] = found[store] + size if store in found else size
        return tuple(found.items())

    def wait_for(self, ref: int, task: int) -> None:
        """A task is told when an unresolved reference is resolved or lost."""
        self._tasks.setdefault(ref, []).append(task)

    def request(self, ref: int, worker: int, store: int) -> None:
        """A worker wants an object in its store: now, or as soon as it exists."""
        if self.is_resolved(ref):
            self.bring(ref, store, worker)
        else:
            self.requests.setdefault(ref, []).append((worker, store))

    def bring(self, ref: int, store: int, worker: int | None = None) -> None:
        """See to it that a store gets a resolved reference's object, and knows it by this name."""
        canonical = self.refs.canonical(ref)
        assert canonical is not None
        if store in self.stores[canonical]:
            if ref != canonical:
                self._tell(store, ref, canonical)
            return
        delivery = self.deliveries.get((canonical, store))
        if delivery is None:
            delivery = self.deliveries[canonical, store] = Delivery(self._source(canonical))
            self.refs.hold(canonical)
            self._send(canonical, store, delivery)
        if ref != canonical:
            delivery.aliases[ref] = None
        if worker is not None:
            delivery.workers.append((worker, ref))

    def ready(self, ref: int, store: int, nbytes: int) -> None:
        """A store has an object, of its own making or delivered.

        Raises:
            ReferenceCountError: the reference is unknown, deallocated, or an alias.
        """
        if not self.refs.is_alive(ref) and ref < len(self.refs):
            self._emit(DeallocateObject(store, ref))  # a delivery that was given up, and went through after all
        freed = self.refs.ready(ref)
        first = ref not in self.stores
        self.stores.setdefault(ref, {})[store] = None
        self.at_store[store][ref] = None
        self.makers.pop(ref, None)
        if nbytes:
            self.nbytes[ref] = nbytes
        if freed:
            self.drop(freed)
            return
        delivery = self.deliveries.pop((ref, store), None)
        if delivery is not None:
            self._sent(delivery)
            for alias in delivery.aliases:
                self._tell(store, alias, ref)
        self.lost.pop(ref, None)
        if first:
            self._resolved(self.refs.members(ref))
        if delivery is not None:
            self.drop(self.refs.release(ref))

    def alias(self, alias: int, target: int) -> None:
        """A reference becomes an alias.

        Raises:
            ReferenceCountError: it cannot; see `RefTable.alias`.
        """
        known = self.refs.is_alive(alias) and self.refs.is_alive(target)
        settled = known and (self.is_resolved(target) or self.why_lost(target) is not None)
        names = self.refs.members(alias) if settled else []
        self.refs.alias(alias, target)
        self.makers.pop(alias, None)
        self.lost.pop(alias, None)
        if not names:
            return
        if self.is_resolved(target):
            self._resolved(names)
        else:
            self._tell_lost(names, self.why_lost(target) or "")

    def abandon(self, ref: int, reason: str) -> None:
        """Nobody will make the object of a pending reference."""
        self.makers.pop(ref, None)
        if not self.refs.is_pending(ref):
            return
        self.lost[ref] = reason
        self._tell_lost(self.refs.members(ref), reason)
        self.drop(self.refs.abandon(ref))

    def drop(self, freed: list[int]) -> None:
        """References are deallocated: so are their objects, in every store."""
        for ref in freed:
            for store in self.stores.pop(ref, ()):
                del self.at_store[store][ref]
                self._emit(DeallocateObject(store, ref))
            self.nbytes.pop(ref, None)
            self.lost.pop(ref, None)
            self.makers.pop(ref, None)
            self.told.pop(ref, None)
            self._tasks.pop(ref, None)
            for worker, _ in self.requests.pop(ref, ()):
                self._emit(RequestFailed(worker, ref, "It was deallocated: nobody counted it any more."))

    def remove_store(self, store: int) -> None:
        """A store is gone: deliveries from it are begun anew elsewhere, and what only it had is lost."""
        reason = f"Object store {store}, which had its last copy, is gone."
        held = self.at_store.pop(store)
        for ref in held:
            del self.stores[ref][store]
            if not self.stores[ref]:
                del self.stores[ref]
                self.lost[ref] = reason
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[1] != store]
        for names in self.told.values():
            names.discard(store)
        for (ref, target), delivery in list(self.deliveries.items()):
            if target == store:
                self._give_up(ref, target, None)
            elif delivery.source == store:
                self.delivery_failed(ref, store, target, reason)
        for ref in held:
            if ref in self.lost:
                self._tell_lost(self.refs.members(ref), reason)
        for ref, (_, where) in list(self.makers.items()):
            if where == store:
                self.abandon(ref, f"Object store {store}, where it was to be made, is gone.")

    def forget_worker(self, worker: int) -> None:
        """A worker is gone: it wants nothing more, and pushes nothing."""
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[0] != worker]
        for ref, (maker, _) in list(self.makers.items()):
            if maker == worker:
                self.abandon(ref, f"Worker {worker}, which was to make it, is gone.")

    def delivery_failed(self, ref: int, source: int, target: int, reason: str) -> None:
        """A delivery is begun anew from another store, or the same, or given up after some tries."""
        delivery = self.deliveries.get((ref, target))
        if delivery is None or delivery.source != source:
            return
        self._sent(delivery)
        if delivery.tries >= _DELIVERY_TRIES or ref not in self.stores:
            self._give_up(ref, target, reason, sent=True)
            return
        delivery.tries += 1
        delivery.source = self._source(ref, source)
        self._send(ref, target, delivery)

    def _source(self, canonical: int, avoid: int | None = None) -> int:
        """The store that sends least, of those next in turn."""
        stores = self.stores[canonical]
        if len(stores) == 1:
            (source,) = stores
            return source
        turn = [store for store in islice(stores, _SOURCES_COMPARED) if store != avoid] or [next(iter(stores))]
        source = min(turn, key=lambda store: self.sending.get(store, 0))
        del stores[source]
        stores[source] = None
        return source

    def _send(self, ref: int, target: int, delivery: Delivery) -> None:
        self.sending[delivery.source] = self.sending.get(delivery.source, 0) + 1
        self._emit(DeliverObj(ref, delivery.source, target))

    def _sent(self, delivery: Delivery) -> None:
        left = self.sending[delivery.source] - 1
        if left:
            self.sending[delivery.source] = left
        else:
            del self.sending[delivery.source]

    def _give_up(self, ref: int, target: int, reason: str | None, sent: bool = False) -> None:
        delivery = self.deliveries.pop((ref, target))
        if not sent:
            self._sent(delivery)
        if reason is not None:
            for worker, name in delivery.workers:
                self._emit(RequestFailed(worker, name, f"Its delivery failed {delivery.tries} times: {reason}"))
        self.drop(self.refs.release(ref))

    def _tell(self, store: int, alias: int, canonical: int) -> None:
        """Tell a store that has an object one of its other names, once."""
        told = self.told.setdefault(alias, set()) if alias != canonical else None
        if told is not None and store not in told:
            told.add(store)
            self._emit(NotifyAlias(store, alias, canonical))

    def _resolved(self, names: Iterable[int]) -> None:
        if not self.requests and not self._tasks:
            return
        for ref in names:
            for worker, store in self.requests.pop(ref, ()):
                self.bring(ref, store, worker)
            for task in self._tasks.pop(ref, ()):
                self._on_resolved(task)

    def _tell_lost(self, names: Iterable[int], reason: str) -> None:
        for ref in names:
            for worker, _ in self.requests.pop(ref, ()):
                self._emit(RequestFailed(worker, ref, reason))
            for task in self._tasks.pop(ref, ()):
                self._on_lost(task)

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        check_invariants(self.refs)
        for ref, stores in self.stores.items():
            assert self.refs.canonical(ref) == ref, f"{ref} has stores and is not canonical"
            assert stores, f"{ref} is in the table without a store"
            assert ref not in self.lost, f"{ref} is lost and at a store"
            for store in stores:
                assert ref in self.at_store[store], f"store {store} has {ref} in one table only"
        for store, held in self.at_store.items():
            for ref in held:
                assert store in self.stores[ref], f"store {store} has {ref} in one table only"
        sending: dict[int, int] = {}
        for (ref, target), delivery in self.deliveries.items():
            assert self.refs.is_alive(ref), f"{ref} is on its way and deallocated"
            assert target not in self.stores[ref], f"{ref} is on its way to where it is"
            assert delivery.source in self.stores[ref], f"{ref} is sent by a store that has it not"
            sending[delivery.source] = sending.get(delivery.source, 0) + 1
        assert sending == self.sending, "deliveries are miscounted"
        for ref in [*self.requests, *self._tasks]:
            if self.requests.get(ref) or self._tasks.get(ref):
                assert not self.is_resolved(ref), f"somebody waits for {ref}, which is there"
        for ref in self.makers:
            assert self.refs.is_pending(ref), f"{ref} has a maker and waits for none"
