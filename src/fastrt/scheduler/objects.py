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

from collections import deque
from collections.abc import Iterable, Iterator

from fastrt._core.refcounts.audit import check_invariants
from fastrt._core.refcounts.refcount import RefTable
from fastrt.scheduler.events import DeallocateObject, DeliverObj, Effect, NotifyAlias, RequestFailed
from fastrt.transitions import EVENT_BITS, KEPT, Transitions

# Stores compared as sources of a delivery, in turn.
_SOURCES_COMPARED = 8
# Stores looked at for how many bytes of an argument they have: enough to find a good place, however many have it.
_PLACES_MAX = 16
_DELIVERY_TRIES = 4
NOBODY = -1

OBJECT = Transitions(
    "object",
    {
        "EXPECTED": {
            "ready": "STORED",
            "alias": "ALIAS",
            "lose": "LOST",
        },  # its producer holds it, so it cannot be freed
        "STORED": {"ready": "STORED", "lose": "LOST", "free": "FREED"},  # in one store or more
        "LOST": {"ready": "STORED", "alias": "ALIAS", "free": "FREED"},
        "ALIAS": {"free": "FREED"},  # another reference's object is meant
        "FREED": {},
    },
)
_BITS, _KEPT, _STEPS, _TARGETS = EVENT_BITS, KEPT, OBJECT.steps, OBJECT.targets
_READY, _ALIAS, _LOSE, _FREE = map(OBJECT.events.index, ("ready", "alias", "lose", "free"))


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
        self.aliases: dict[int, None] | None = None
        self.workers: list[tuple[int, int]] = []


class Entry:
    """A live reference: numbers only, 64 bytes of them, which the collector need not know.

    Attributes:
        ref: its number.
        first, second: stores that have its object, `NOBODY` where there are none; few objects are at more than two.
        nbytes: of its object, 0 when that is not known.
        maker: the worker that is to make it, `NOBODY` when none is.
        site: the store where it is to be made, `NOBODY` when that is not known.
        state: the number of its state in `OBJECT`.
        moves: its last moves there.
    """

    __slots__ = ("first", "maker", "moves", "nbytes", "ref", "second", "site", "state")

    def __init__(self, ref: int) -> None:
        self.ref = ref
        self.first = NOBODY
        self.second = NOBODY
        self.nbytes = 0
        self.maker = NOBODY
        self.site = NOBODY
        self.state = 0
        self.moves = 0


def _move(entry: Entry, event: int) -> None:
    """Move an object to its next state: no method, as a table of methods would cost each entry 8 bytes."""
    number = _STEPS[entry.state << _BITS | event]
    if not number:
        raise OBJECT.illegal(OBJECT.states[entry.state], OBJECT.events[event], entry.moves, entry.ref)
    entry.state = _TARGETS[number]
    entry.moves = (entry.moves & _KEPT) << 8 | number


class Objects:
    """References and their objects.

    Args:
        effects: takes effects.
        resolved: takes tasks that waited for a reference that is now resolved.
        failing: takes tasks that waited for a reference that is now lost, and why they fail.
    """

    def __init__(
        self,
        effects: list[Effect],
        resolved: deque[int],
        failing: deque[tuple[int, str]],
    ) -> None:
        self.refs = RefTable()
        # By reference, None once that is deallocated: they are dense from 0, and a list is one cache line where a
        # dictionary is four.
        self.entries: list[Entry | None] = []
        self.further: dict[int, dict[int, None]] = {}  # stores beyond an object's first two, by reference
        self.incoming: dict[int, dict[int, Delivery]] = {}  # under way, by reference and target
        self.lost: dict[int, str] = {}  # why, by the end of its chain
        self.pushes: dict[int, int] = {}  # workers, by the reference that each is to make without a call
        self.sending: dict[int, int] = {}  # deliveries under way, by source
        self.requests: dict[int, list[tuple[int, int]]] = {}  # worker and store, by reference
        self._tasks: dict[int, list[int]] = {}  # by reference
        self.told: dict[int, set[int]] = {}  # stores that know an alias
        self._effects = effects
        self._to_resolve = resolved
        self._failing = failing

    def add(self, count: int, counted: int) -> int:
        """Make references that somebody is to make objects for; returns the first."""
        first = self.refs.add(count, counted, True)
        for ref in range(first, first + count):
            self.entries.append(Entry(ref))
        return first

    def entry(self, ref: int) -> Entry | None:
        """The entry of a reference, None when it is not alive."""
        return self.entries[ref] if ref < len(self.entries) else None

    def live(self) -> Iterator[Entry]:
        """All entries, in the order of their references."""
        return iter([entry for entry in self.entries if entry is not None])

    def add_push(self, worker: int, store: int) -> int:
        """A reference for an object that a worker is to make without a call."""
        ref = self.add(1, 1)
        self.make(ref, worker, store)
        self.pushes[ref] = worker
        return ref

    def resolve(self, ref: int) -> Entry | None:
        """The entry of a live reference's object, None while no store has that."""
        canonical = self.refs.canonical_of(ref)
        if canonical < 0:
            return None
        entry = self.entries[canonical]
        return entry if entry is not None and entry.first != NOBODY else None

    def is_resolved(self, ref: int) -> bool:
        """Whether a live reference's object can be had from a store."""
        return self.resolve(ref) is not None

    def why_lost(self, ref: int) -> str | None:
        """Why a live reference's object will not come, None when it is there or may come."""
        return self.lost.get(self.refs.end(ref)) if self.lost else None

    def has(self, entry: Entry, store: int) -> bool:
        """Whether a store has an object."""
        if store == entry.first or store == entry.second:
            return True
        return bool(self.further) and store in self.further.get(entry.ref, ())

    def stores(self, entry: Entry) -> list[int]:
        """All that have an object, in order: the one used last as a source is last."""
        if entry.second == NOBODY:
            return [] if entry.first == NOBODY else [entry.first]
        if not self.further:
            return [entry.first, entry.second]
        return [entry.first, entry.second, *self.further.get(entry.ref, ())]

    def put(self, entry: Entry, store: int) -> None:
        """A store has an object."""
        if self.has(entry, store):
            return
        if entry.first == NOBODY:
            entry.first = store
        elif entry.second == NOBODY:
            entry.second = store
        else:
            self.further.setdefault(entry.ref, {})[store] = None

    def take(self, entry: Entry, store: int) -> None:
        """A store that had an object has it no more."""
        others = self.further.get(entry.ref) if self.further else None
        if others is None or store not in others:
            if store == entry.first:
                entry.first = entry.second
            entry.second = NOBODY
            if others is None:
                return
            store = entry.second = next(iter(others))
        del others[store]
        if not others:
            del self.further[entry.ref]

    def places(self, found: list[Entry]) -> tuple[tuple[int, int], ...]:
        """Bytes of objects by store; an object of unknown size counts as one byte."""
        if len(found) == 1:
            only = found[0]
            if only.second == NOBODY:
                return ((only.first, only.nbytes or 1),)
        by_store: dict[int, int] = {}
        for entry in found:
            nbytes = entry.nbytes or 1
            by_store[entry.first] = by_store.get(entry.first, 0) + nbytes
            if entry.second != NOBODY:
                for store in self.stores(entry)[1:_PLACES_MAX]:
                    by_store[store] = by_store.get(store, 0) + nbytes
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
        if self.has(entry, store):
            if ref != canonical:
                self._tell(store, ref, canonical)
            return
        coming = self.incoming.get(canonical)
        if coming is None:
            coming = self.incoming[canonical] = {}
        delivery = coming.get(store)
        if delivery is None:
            delivery = coming[store] = Delivery(self._source(entry, NOBODY))
            self.refs.hold(canonical)
            self._send(canonical, store, delivery)
        if ref != canonical:
            if delivery.aliases is None:
                delivery.aliases = {}
            delivery.aliases[ref] = None
        delivery.workers.append((worker, ref))

    def ready(self, ref: int, store: int, nbytes: int) -> None:
        """A store has an object, of its own making or delivered.

        Raises:
            ReferenceCountError: the reference is unknown, deallocated, or an alias.
        """
        entry = self.entry(ref)
        if entry is None and ref < len(self.refs):
            self._effects.append(DeallocateObject(store, ref))  # a delivery given up, that went through after all
        freed = self.refs.ready(ref)
        if entry is None:
            return
        first = entry.first == NOBODY
        self.put(entry, store)
        _move(entry, _READY)
        entry.maker = entry.site = NOBODY
        if self.pushes:
            self.pushes.pop(ref, None)
        if nbytes:
            entry.nbytes = nbytes
        if freed:
            self.drop(freed)
            return
        delivery = self._arrived(ref, store) if self.incoming else None
        if delivery is not None:
            self._sent(delivery)
            for alias in delivery.aliases or ():
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
        entry = self.entries[alias]
        if entry is not None:
            _move(entry, _ALIAS)
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
        entry = self.entry(ref)
        if entry is not None and self.refs.is_pending(ref):
            entry.maker, entry.site = worker, store

    def unmake(self, ref: int) -> None:
        """Nobody in particular is to make the object of a reference."""
        entry = self.entry(ref)
        if entry is not None:
            entry.maker = entry.site = NOBODY
        self.pushes.pop(ref, None)

    def abandon(self, ref: int, reason: str) -> None:
        """Nobody will make the object of a pending reference."""
        self.unmake(ref)
        if not self.refs.is_pending(ref):
            return
        entry = self.entries[ref]
        assert entry is not None
        _move(entry, _LOSE)
        self.lost[ref] = reason
        self._tell_lost(self.refs.members(ref), reason)
        self.drop(self.refs.abandon(ref))

    def drop(self, freed: list[int]) -> None:
        """References are deallocated: so are their objects, in every store."""
        for ref in freed:
            entry = self.entries[ref]
            assert entry is not None
            _move(entry, _FREE)
            self.entries[ref] = None
            if entry.first != NOBODY:
                self._effects.append(DeallocateObject(entry.first, ref))
            if entry.second != NOBODY:
                for store in self.stores(entry)[1:]:
                    self._effects.append(DeallocateObject(store, ref))
                self.further.pop(ref, None)
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
        lost, unmade = [], []
        for entry in self.live():
            if self.has(entry, store):
                self.take(entry, store)
                if entry.first == NOBODY:
                    _move(entry, _LOSE)
                    self.lost[entry.ref] = reason
                    lost.append(entry.ref)
            if entry.site == store:
                unmade.append(entry.ref)
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[1] != store]
        for names in self.told.values():
            names.discard(store)
        for ref in sorted(self.incoming):
            for target, delivery in list(self.incoming[ref].items()):
                if target == store:
                    self._give_up(ref, target, None, False)
                elif delivery.source == store:
                    self.delivery_failed(ref, store, target, reason)
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
        entry = self.entry(ref)
        delivery = self.incoming.get(ref, {}).get(target)
        if entry is None or delivery is None or delivery.source != source:
            return
        self._sent(delivery)
        if delivery.tries >= _DELIVERY_TRIES or entry.first == NOBODY:
            self._give_up(ref, target, reason, True)
            return
        delivery.tries += 1
        delivery.source = self._source(entry, source)
        self._send(ref, target, delivery)

    def _arrived(self, ref: int, target: int) -> Delivery | None:
        """End a delivery."""
        coming = self.incoming.get(ref)
        delivery = coming.pop(target, None) if coming is not None else None
        if not coming and coming is not None:
            del self.incoming[ref]
        return delivery

    def _source(self, entry: Entry, avoid: int) -> int:
        """The store that sends least, of those next in turn."""
        if entry.second == NOBODY:
            return entry.first
        least, source = -1, NOBODY
        for store in self.stores(entry)[:_SOURCES_COMPARED]:
            sending = self.sending.get(store, 0)
            if store != avoid and (least < 0 or sending < least):
                least, source = sending, store
        self.take(entry, source)
        self.put(entry, source)
        return source

    def _send(self, ref: int, target: int, delivery: Delivery) -> None:
        self.sending[delivery.source] = self.sending.get(delivery.source, 0) + 1
        self._effects.append(DeliverObj(ref, delivery.source, target))

    def _sent(self, delivery: Delivery) -> None:
        left = self.sending[delivery.source] - 1
        if left:
            self.sending[delivery.source] = left
        else:
            del self.sending[delivery.source]

    def _give_up(self, ref: int, target: int, reason: str | None, sent: bool) -> None:
        delivery = self._arrived(ref, target)
        assert delivery is not None
        if not sent:
            self._sent(delivery)
        if reason is not None:
            for worker, name in delivery.workers:
                words = f"Its delivery failed {delivery.tries} times: {reason}"
                self._effects.append(RequestFailed(worker, name, words))
        self.drop(self.refs.release(ref))

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
                self._to_resolve.append(task)

    def _tell_lost(self, names: Iterable[int], reason: str) -> None:
        for ref in names:
            for worker, _ in self.requests.pop(ref, ()):
                self._effects.append(RequestFailed(worker, ref, reason))
            for task in self._tasks.pop(ref, ()):
                self._failing.append((task, "An argument of its is lost."))

    def restore_state(self, entry: Entry) -> None:
        """Set the state of an entry that was read from a snapshot, by the tables."""
        entry.state = OBJECT.states.index(self._state_of(entry))

    def _state_of(self, entry: Entry) -> str:
        """The state that the tables show."""
        if entry.first != NOBODY:
            return "STORED"
        if entry.ref in self.lost:
            return "LOST"
        return "EXPECTED" if self.refs.end(entry.ref) == entry.ref else "ALIAS"

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        check_invariants(self.refs)
        alive = [ref for ref in range(len(self.refs)) if self.refs.is_alive(ref)]
        assert [entry.ref for entry in self.live()] == alive, "entries and live references differ"
        assert len(self.entries) == len(self.refs), "entries are missing"
        sending: dict[int, int] = {}
        for entry in self.live():
            ref, stores = entry.ref, self.stores(entry)
            assert OBJECT.states[entry.state] == self._state_of(entry), f"{ref} is not {OBJECT.states[entry.state]}"
            assert not stores or self.refs.canonical(ref) == ref, f"{ref} has stores and is not canonical"
            assert not stores or ref not in self.lost, f"{ref} is lost and at a store"
            assert len(set(stores)) == len(stores), f"{ref} has one store twice"
            assert ref not in self.further or entry.second != NOBODY, f"{ref} has stores behind a gap"
            assert entry.site == NOBODY or self.refs.is_pending(ref), f"{ref} has a maker and waits for none"
            assert ref not in self.pushes or self.pushes[ref] == entry.maker, f"{ref} has two makers"
            for target, delivery in self.incoming.get(ref, {}).items():
                assert target not in stores, f"{ref} is on its way to where it is"
                assert delivery.source in stores, f"{ref} is sent by a store that has it not"
                sending[delivery.source] = sending.get(delivery.source, 0) + 1
        assert sending == self.sending, "deliveries are miscounted"
        for ref in [*self.requests, *self._tasks]:
            if self.requests.get(ref) or self._tasks.get(ref):
                assert not self.is_resolved(ref), f"somebody waits for {ref}, which is there"
        assert all([*self.further.values(), *self.incoming.values()]), "empty tables are kept"
        for ref in [*self.further, *self.incoming, *self.lost, *self.pushes, *self.told, *self.requests, *self._tasks]:
            assert self.entry(ref) is not None, f"{ref} is deallocated, and something is known of it"
