"""Where objects are, who waits for them, and what is on its way: the part of the state that knows references.

A reference is resolved once its chain of aliases ends at an object that some store has. It is lost when nobody will
make that object any more, or its last store is gone; an `ObjReady` brings it back.

Each live reference has one entry with all that an event usually needs, found once. What few references have (a reason
why they are lost, somebody who waits) is in tables of its own, most often empty.

Invariants: a reference has an entry exactly while it is alive; only canonical references have stores; no delivery
goes to a store that has the object; each delivery under way holds its object alive; who waits, waits for a live
reference that is not resolved. The loss of a store looks at every entry.

Compiled with the types in objects.pxd when the package is built; ADR 5 says why.

Source: early Ray's `objtable_`, `pull_queue_` and `alias_notification_queue_`, searched anew at each call there, kept
by reference here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastrt._core.refcount import RefTable
from fastrt._core.refcount_audit import check_invariants
from fastrt.scheduler.events import DeallocateObject, DeliverObj, Effect, NotifyAlias, RequestFailed

# Stores compared as sources of a delivery, in turn.
_SOURCES_COMPARED = 8
# Stores looked at for how many bytes of an argument they have: enough to find a good place, however many have it.
_PLACES_MAX = 16
_DELIVERY_TRIES = 4
NOBODY = -1
# Makes a NamedTuple without its constructor in Python, which takes twice as long as all the rest of an effect.
_new: Any = tuple.__new__


class Delivery:
    """An object on its way.

    Attributes:
        source: the store that sends it.
        tries: how often it was begun.
        aliases: what the target is to be told once it is there.
        workers: who asked for it, and by which reference.
    """

    __slots__ = ("aliases", "source", "tries", "workers")

    def __init__(self, source: int) -> None:
        self.source = source
        self.tries = 1
        self.aliases: dict[int, None] = {}
        self.workers: list[tuple[int, int]] = []


class Entry:
    """A live reference. The stores that have its object are in an order: the one used last as a source is last.

    Attributes:
        ref: its number.
        first, second: stores that have its object, `NOBODY` where there are none; few objects are at more than two.
        others: further ones.
        nbytes: of its object, 0 when that is not known.
        maker: the worker that is to make it, `NOBODY` when none is.
        site: the store where it is to be made, `NOBODY` when that is not known.
        incoming: deliveries under way, by target.
    """

    __slots__ = ("first", "incoming", "maker", "nbytes", "others", "ref", "second", "site")

    def __init__(self, ref: int) -> None:
        self.ref = ref
        self.first = NOBODY
        self.second = NOBODY
        self.others: dict[int, None] | None = None
        self.nbytes = 0
        self.maker = NOBODY
        self.site = NOBODY
        self.incoming: dict[int, Delivery] | None = None

    def has(self, store: int) -> bool:
        """Whether a store has the object."""
        return store == self.first or store == self.second or (self.others is not None and store in self.others)

    def stores(self) -> list[int]:
        """All that have the object, in order."""
        if self.second == NOBODY:
            return [] if self.first == NOBODY else [self.first]
        return [self.first, self.second, *(self.others or ())]

    def put(self, store: int) -> None:
        """A store has the object."""
        if self.has(store):
            return
        if self.first == NOBODY:
            self.first = store
        elif self.second == NOBODY:
            self.second = store
        else:
            if self.others is None:
                self.others = {}
            self.others[store] = None

    def take(self, store: int) -> None:
        """A store that had the object has it no more."""
        if self.others is not None and store in self.others:
            del self.others[store]
            return
        if store == self.first:
            self.first = self.second
        self.second = NOBODY
        if self.others:
            self.second = next(iter(self.others))
            del self.others[self.second]


class Objects:
    """References and their objects.

    Args:
        effects: takes effects.
        on_resolved: called with what waited for a reference that is now resolved.
        on_lost: called with what waited for a reference that is now lost.
    """

    def __init__(
        self,
        effects: list[Effect],
        on_resolved: Callable[[int], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.refs = RefTable()
        self.entries: dict[int, Entry] = {}
        self.lost: dict[int, str] = {}  # why, by the end of its chain
        self.pushes: dict[int, int] = {}  # workers, by the reference that each is to make without a call
        self.sending: dict[int, int] = {}  # deliveries under way, by source
        self.requests: dict[int, list[tuple[int, int]]] = {}  # worker and store, by reference
        self._tasks: dict[int, list[int]] = {}  # by reference
        self.told: dict[int, set[int]] = {}  # stores that know an alias
        self._effects = effects
        self._on_resolved = on_resolved
        self._on_lost = on_lost

    def add(self, count: int, counted: int) -> int:
        """Make references that somebody is to make objects for; returns the first."""
        first = self.refs.add(count, counted, True)
        for ref in range(first, first + count):
            self.entries[ref] = Entry(ref)
        return first

    def add_push(self, worker: int, store: int) -> int:
        """A reference for an object that a worker is to make without a call."""
        ref = self.add(1, 1)
        entry = self.entries[ref]
        entry.maker, entry.site = worker, store
        self.pushes[ref] = worker
        return ref

    def resolve(self, ref: int) -> Entry | None:
        """The entry of a live reference's object, None while no store has that."""
        canonical = self.refs.canonical_of(ref)
        if canonical < 0:
            return None
        entry = self.entries[canonical]
        return entry if entry.first != NOBODY else None

    def is_resolved(self, ref: int) -> bool:
        """Whether a live reference's object can be had from a store."""
        return self.resolve(ref) is not None

    def why_lost(self, ref: int) -> str | None:
        """Why a live reference's object will not come, None when it is there or may come."""
        return self.lost.get(self.refs.end(ref)) if self.lost else None

    def places(self, found: list[Entry]) -> tuple[tuple[int, int], ...]:
        """Bytes of objects by store; an object of unknown size counts as one byte."""
        if len(found) == 1:
            only = found[0]
            if only.second == NOBODY:
                return ((only.first, only.nbytes or 1),)
        by_store: dict[int, int] = {}
        for entry in found:
            for store in entry.stores()[:_PLACES_MAX]:
                by_store[store] = by_store.get(store, 0) + (entry.nbytes or 1)
        return tuple(by_store.items())

    def wait_for(self, ref: int, task: int) -> None:
        """A task is told when an unresolved reference is resolved or lost."""
        self._tasks.setdefault(ref, []).append(task)

    def request(self, ref: int, worker: int, store: int) -> None:
        """A worker wants an object in its store: now, or as soon as it exists."""
        entry = self.resolve(ref)
        if entry is not None:
            self.bring(ref, entry, store, worker)
        else:
            self.requests.setdefault(ref, []).append((worker, store))

    def bring(self, ref: int, entry: Entry, store: int, worker: int) -> None:
        """See to it that a store gets an object for a worker, and knows it by this reference.

        Args:
            ref: by which it was asked for.
            entry: what `resolve` found for that.
            store: the one to get it.
            worker: told when it will not come.
        """
        canonical = entry.ref
        if entry.has(store):
            if ref != canonical:
                self._tell(store, ref, canonical)
            return
        if entry.incoming is None:
            entry.incoming = {}
        delivery = entry.incoming.get(store)
        if delivery is None:
            delivery = entry.incoming[store] = Delivery(self._source(entry, NOBODY))
            self.refs.hold(canonical)
            self._send(canonical, store, delivery)
        if ref != canonical:
            delivery.aliases[ref] = None
        delivery.workers.append((worker, ref))

    def ready(self, ref: int, store: int, nbytes: int) -> None:
        """A store has an object, of its own making or delivered.

        Raises:
            ReferenceCountError: the reference is unknown, deallocated, or an alias.
        """
        entry = self.entries.get(ref)
        if entry is None and ref < len(self.refs):
            self._effects.append(DeallocateObject(store, ref))  # a delivery given up, that went through after all
        freed = self.refs.ready(ref)
        if entry is None:
            return
        first = entry.first == NOBODY
        entry.put(store)
        entry.maker = entry.site = NOBODY
        if self.pushes:
            self.pushes.pop(ref, None)
        if nbytes:
            entry.nbytes = nbytes
        if freed:
            self.drop(freed)
            return
        delivery = entry.incoming.pop(store, None) if entry.incoming else None
        if delivery is not None:
            self._sent(delivery)
            for alias in delivery.aliases:
                self._tell(store, alias, ref)
        if self.lost:
            self.lost.pop(ref, None)
        if first and (self.requests or self._tasks):
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
        self.unmake(alias)
        self.lost.pop(alias, None)
        if not names:
            return
        if self.is_resolved(target):
            self._resolved(names)
        else:
            self._tell_lost(names, self.why_lost(target) or "")

    def make(self, ref: int, worker: int, store: int) -> None:
        """A worker, or `NOBODY` any more, is to make the object of a reference in a store; if that is pending."""
        entry = self.entries.get(ref)
        if entry is not None and self.refs.is_pending(ref):
            entry.maker, entry.site = worker, store

    def unmake(self, ref: int) -> None:
        """Nobody in particular is to make the object of a reference."""
        entry = self.entries.get(ref)
        if entry is not None:
            entry.maker = entry.site = NOBODY
        self.pushes.pop(ref, None)

    def abandon(self, ref: int, reason: str) -> None:
        """Nobody will make the object of a pending reference."""
        self.unmake(ref)
        if not self.refs.is_pending(ref):
            return
        self.lost[ref] = reason
        self._tell_lost(self.refs.members(ref), reason)
        self.drop(self.refs.abandon(ref))

    def drop(self, freed: list[int]) -> None:
        """References are deallocated: so are their objects, in every store."""
        for ref in freed:
            entry = self.entries.pop(ref)
            for store in entry.stores():
                self._effects.append(_new(DeallocateObject, (store, ref)))
            if self.lost:
                self.lost.pop(ref, None)
            if self.pushes:
                self.pushes.pop(ref, None)
            if self.told:
                self.told.pop(ref, None)
            if self._tasks:
                self._tasks.pop(ref, None)
            if self.requests:
                for worker, _ in self.requests.pop(ref, ()):
                    words = "It was deallocated: nobody counted it any more."
                    self._effects.append(RequestFailed(worker, ref, words))

    def remove_store(self, store: int) -> None:
        """A store is gone: deliveries from it are begun anew elsewhere, and what only it had is lost."""
        reason = f"Object store {store}, which had its last copy, is gone."
        touched, lost, unmade = [], [], []
        for entry in self.entries.values():
            if entry.has(store):
                entry.take(store)
                if entry.first == NOBODY:
                    self.lost[entry.ref] = reason
                    lost.append(entry.ref)
            if entry.incoming:
                touched.append(entry)
            if entry.site == store:
                unmade.append(entry.ref)
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[1] != store]
        for names in self.told.values():
            names.discard(store)
        for entry in touched:
            for target, delivery in list((entry.incoming or {}).items()):
                if target == store:
                    self._give_up(entry, target, None, False)
                elif delivery.source == store:
                    self.delivery_failed(entry.ref, store, target, reason)
        for ref in lost:
            if ref in self.lost:
                self._tell_lost(self.refs.members(ref), reason)
        for ref in unmade:
            self.abandon(ref, f"Object store {store}, where it was to be made, is gone.")

    def forget_worker(self, worker: int) -> None:
        """A worker is gone: it wants nothing more, and pushes nothing."""
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[0] != worker]
        for ref in [ref for ref, maker in self.pushes.items() if maker == worker]:
            self.abandon(ref, f"Worker {worker}, which was to make it, is gone.")

    def delivery_failed(self, ref: int, source: int, target: int, reason: str) -> None:
        """A delivery is begun anew from another store, or the same, or given up after some tries."""
        entry = self.entries.get(ref)
        delivery = entry.incoming.get(target) if entry is not None and entry.incoming else None
        if entry is None or delivery is None or delivery.source != source:
            return
        self._sent(delivery)
        if delivery.tries >= _DELIVERY_TRIES or entry.first == NOBODY:
            self._give_up(entry, target, reason, True)
            return
        delivery.tries += 1
        delivery.source = self._source(entry, source)
        self._send(ref, target, delivery)

    def _source(self, entry: Entry, avoid: int) -> int:
        """The store that sends least, of those next in turn."""
        if entry.second == NOBODY:
            return entry.first
        least, source = -1, NOBODY
        for store in entry.stores()[:_SOURCES_COMPARED]:
            sending = self.sending.get(store, 0)
            if store != avoid and (least < 0 or sending < least):
                least, source = sending, store
        entry.take(source)
        entry.put(source)
        return source

    def _send(self, ref: int, target: int, delivery: Delivery) -> None:
        self.sending[delivery.source] = self.sending.get(delivery.source, 0) + 1
        self._effects.append(_new(DeliverObj, (ref, delivery.source, target)))

    def _sent(self, delivery: Delivery) -> None:
        left = self.sending[delivery.source] - 1
        if left:
            self.sending[delivery.source] = left
        else:
            del self.sending[delivery.source]

    def _give_up(self, entry: Entry, target: int, reason: str | None, sent: bool) -> None:
        assert entry.incoming is not None
        delivery = entry.incoming.pop(target)
        if not sent:
            self._sent(delivery)
        if reason is not None:
            for worker, name in delivery.workers:
                words = f"Its delivery failed {delivery.tries} times: {reason}"
                self._effects.append(RequestFailed(worker, name, words))
        self.drop(self.refs.release(entry.ref))

    def _tell(self, store: int, alias: int, canonical: int) -> None:
        """Tell a store that has an object one of its other names, once."""
        told = self.told.setdefault(alias, set()) if alias != canonical else None
        if told is not None and store not in told:
            told.add(store)
            self._effects.append(NotifyAlias(store, alias, canonical))

    def _resolved(self, names: Iterable[int]) -> None:
        for ref in names:
            for worker, store in self.requests.pop(ref, ()):
                entry = self.resolve(ref)
                assert entry is not None
                self.bring(ref, entry, store, worker)
            for task in self._tasks.pop(ref, ()):
                self._on_resolved(task)

    def _tell_lost(self, names: Iterable[int], reason: str) -> None:
        for ref in names:
            for worker, _ in self.requests.pop(ref, ()):
                self._effects.append(RequestFailed(worker, ref, reason))
            for task in self._tasks.pop(ref, ()):
                self._on_lost(task)

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        check_invariants(self.refs)
        alive = [ref for ref in range(len(self.refs)) if self.refs.is_alive(ref)]
        assert list(self.entries) == alive, "entries and live references differ"
        sending: dict[int, int] = {}
        for ref, entry in self.entries.items():
            stores = entry.stores()
            assert not stores or self.refs.canonical(ref) == ref, f"{ref} has stores and is not canonical"
            assert not stores or ref not in self.lost, f"{ref} is lost and at a store"
            assert len(set(stores)) == len(stores), f"{ref} has one store twice"
            assert not entry.others or entry.second != NOBODY, f"{ref} has stores behind a gap"
            assert entry.site == NOBODY or self.refs.is_pending(ref), f"{ref} has a maker and waits for none"
            assert ref not in self.pushes or self.pushes[ref] == entry.maker, f"{ref} has two makers"
            for target, delivery in (entry.incoming or {}).items():
                assert target not in stores, f"{ref} is on its way to where it is"
                assert delivery.source in stores, f"{ref} is sent by a store that has it not"
                sending[delivery.source] = sending.get(delivery.source, 0) + 1
        assert sending == self.sending, "deliveries are miscounted"
        for ref in [*self.requests, *self._tasks]:
            if self.requests.get(ref) or self._tasks.get(ref):
                assert not self.is_resolved(ref), f"somebody waits for {ref}, which is there"
        for ref in [*self.lost, *self.pushes, *self.told, *self.requests, *self._tasks]:
            assert ref in self.entries, f"{ref} is deallocated, and something is known of it"
