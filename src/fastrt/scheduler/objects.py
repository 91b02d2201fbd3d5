"""References and their objects: the stores of each object, its waiting callers, and its deliveries.

A reference is resolved once its chain of aliases ends at an object that some store has. It is lost when it has no
producer any more, or its last store is gone; an `ObjReady` restores it. `OBJECT` lists the moves.

Each live reference has one entry with the fields that most events need, so an event looks it up once. Facts that few
references have (the reason of a loss, waiting callers) are in separate tables, most often empty. Entries are in pages,
which are dropped when all of their references are deallocated.

The texts of losses and failures are part of the checksums in a scheduler's log (log.py). They stay byte for byte:
otherwise logs of earlier versions cannot be replayed.

Invariants: a reference has an entry exactly while it is alive; only canonical references have stores; no delivery
goes to a store that has the object; each delivery under way holds its object alive; callers and calls wait only for
live references that are not resolved. The loss of a store costs a look at every entry.

Compiled with the types in objects.pxd when the package is built; ADR 5 says why.

Source: early Ray's `objtable_`, `pull_queue_` and `alias_notification_queue_`. Ray searched them at each call; here
they are kept by reference.
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
# Stores of an argument that count for its locality: enough to find a good place, however many have it.
_PLACES_MAX = 16
_DELIVERY_TRIES = 4
_PAGE_BITS = 12
_PAGE = 1 << _PAGE_BITS
ABSENT = -1

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
        "ALIAS": {"free": "FREED"},  # stands for another reference's object
        "FREED": {},
    },
)
_BITS, _KEPT, _STEPS, _TARGETS = EVENT_BITS, KEPT, OBJECT.steps, OBJECT.targets
_READY, _ALIAS, _LOSE, _FREE = map(OBJECT.events.index, ("ready", "alias", "lose", "free"))


class Delivery:
    """A delivery of an object to a store.

    Attributes:
        source: the store that sends it.
        tries: how often it was started.
        aliases: references to report to the target once the object has arrived.
        workers: the workers that asked for it, each with the reference it used.
    """

    __slots__ = ("aliases", "source", "tries", "workers")

    def __init__(self, source: int) -> None:
        self.source = source
        self.tries = 1
        self.aliases: dict[int, None] | None = None
        self.workers: list[tuple[int, int]] = []


class Entry:
    """A live reference. It holds numbers only, in 64 bytes, so the garbage collector does not track it.

    Attributes:
        ref: its number.
        first, second: stores that have its object, or `ABSENT`; few objects are in more than two stores.
        nbytes: size of its object, 0 when that is not known.
        maker: the worker that will produce it, `ABSENT` when there is none.
        site: the store where it will be produced, `ABSENT` when that is not known.
        state: the number of its state in `OBJECT`.
        moves: its last moves there.
    """

    __slots__ = ("first", "maker", "moves", "nbytes", "ref", "second", "site", "state")

    def __init__(self, ref: int) -> None:
        self.ref = ref
        self.first = ABSENT
        self.second = ABSENT
        self.nbytes = 0
        self.maker = ABSENT
        self.site = ABSENT
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
        effects: list that effects are appended to.
        resolved: queue for tasks that waited for a reference that is now resolved.
        failing: queue for tasks that waited for a reference that is now lost, each with the reason.
    """

    def __init__(
        self,
        effects: list[Effect],
        resolved: deque[int],
        failing: deque[tuple[int, str]],
    ) -> None:
        self.refs = RefTable()
        # By page and reference, None once that is deallocated; a page is None once all of its references are.
        # References are dense from 0: a lookup in a list touches one cache line, in a dictionary four.
        self.pages: list[list[Entry | None] | None] = []
        self._page_alive: list[int] = []  # by page: its live references
        self.further: dict[int, dict[int, None]] = {}  # stores beyond an object's first two, by reference
        self.incoming: dict[int, dict[int, Delivery]] = {}  # deliveries under way, by reference and target
        self.lost: dict[int, str] = {}  # the reason, by the end of the chain of aliases
        self.pushes: dict[int, int] = {}  # workers, by the reference that each produces without a call
        self.sending: dict[int, int] = {}  # deliveries under way, by source
        self.requests: dict[int, list[tuple[int, int]]] = {}  # waiting workers and their stores, by reference
        self._tasks: dict[int, list[int]] = {}  # waiting, by reference
        self.notified: dict[int, set[int]] = {}  # stores that were notified of an alias, by alias
        self._effects = effects
        self._to_resolve = resolved
        self._failing = failing

    def add(self, count: int, counted: int) -> int:
        """Make references whose objects are expected; returns the first."""
        first = self.refs.add(count, counted, True)
        for ref in range(first, first + count):
            if not ref & (_PAGE - 1):
                self.pages.append([])
                self._page_alive.append(0)
            page = self.pages[ref >> _PAGE_BITS]
            assert page is not None
            page.append(Entry(ref))
            self._page_alive[ref >> _PAGE_BITS] += 1
        return first

    def entry(self, ref: int) -> Entry | None:
        """The entry of a reference, None when it is not alive."""
        if ref >> _PAGE_BITS >= len(self.pages):
            return None
        page = self.pages[ref >> _PAGE_BITS]
        at = ref & (_PAGE - 1)
        return page[at] if page is not None and at < len(page) else None

    def live(self) -> Iterator[Entry]:
        """All entries, in the order of their references."""
        pages = [page for page in self.pages if page is not None]
        return iter([entry for page in pages for entry in page if entry is not None])

    def restore_entries(self) -> None:
        """Make the entries of references that were read from a snapshot."""
        for first in range(0, len(self.refs), _PAGE):
            self.pages.append([None] * min(_PAGE, len(self.refs) - first))
            self._page_alive.append(0)
        for ref, _, _ in self.refs.alive_before(len(self.refs)):
            page = self.pages[ref >> _PAGE_BITS]
            assert page is not None
            page[ref & (_PAGE - 1)] = Entry(ref)
            self._page_alive[ref >> _PAGE_BITS] += 1
        for number in range(len(self.pages)):
            self._forget(number)

    def add_push(self, worker: int, store: int) -> int:
        """Make a reference for an object that a worker produces without a call."""
        ref = self.add(1, 1)
        self.make(ref, worker, store)
        self.pushes[ref] = worker
        return ref

    def resolve(self, ref: int) -> Entry | None:
        """The entry of a live reference's object, None while no store has that."""
        canonical = self.refs.canonical_of(ref)
        if canonical < 0:
            return None
        entry = self.entry(canonical)
        return entry if entry is not None and entry.first != ABSENT else None

    def is_resolved(self, ref: int) -> bool:
        """Whether a store has a live reference's object."""
        return self.resolve(ref) is not None

    def why_lost(self, ref: int) -> str | None:
        """The reason why a live reference's object is lost; None when a store has it or it is still expected."""
        return self.lost.get(self.refs.end(ref)) if self.lost else None

    def has(self, entry: Entry, store: int) -> bool:
        """Whether a store has an object."""
        if store == entry.first or store == entry.second:
            return True
        return bool(self.further) and store in self.further.get(entry.ref, ())

    def stores(self, entry: Entry) -> list[int]:
        """All stores that have an object, the one used last as a source at the end."""
        if entry.second == ABSENT:
            return [] if entry.first == ABSENT else [entry.first]
        if not self.further:
            return [entry.first, entry.second]
        return [entry.first, entry.second, *self.further.get(entry.ref, ())]

    def put(self, entry: Entry, store: int) -> None:
        """Add a store to an object's stores."""
        if self.has(entry, store):
            return
        if entry.first == ABSENT:
            entry.first = store
        elif entry.second == ABSENT:
            entry.second = store
        else:
            self.further.setdefault(entry.ref, {})[store] = None

    def take(self, entry: Entry, store: int) -> None:
        """Remove a store from an object's stores."""
        others = self.further.get(entry.ref) if self.further else None
        if others is None or store not in others:
            if store == entry.first:
                entry.first = entry.second
            entry.second = ABSENT
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
            if only.second == ABSENT:
                return ((only.first, only.nbytes or 1),)
        by_store: dict[int, int] = {}
        for entry in found:
            nbytes = entry.nbytes or 1
            by_store[entry.first] = by_store.get(entry.first, 0) + nbytes
            if entry.second != ABSENT:
                for store in self.stores(entry)[1:_PLACES_MAX]:
                    by_store[store] = by_store.get(store, 0) + nbytes
        return tuple(by_store.items())

    def wait_for(self, ref: int, task: int) -> None:
        """Let a task wait until an unresolved reference is resolved or lost."""
        self._tasks.setdefault(ref, []).append(task)

    def request(self, ref: int, worker: int, store: int) -> None:
        """Deliver an object to a worker's store: now, or as soon as it exists."""
        entry = self.resolve(ref)
        if entry is not None:
            self.bring(ref, entry, store, worker)
        else:
            self.requests.setdefault(ref, []).append((worker, store))

    def bring(self, ref: int, entry: Entry, store: int, worker: int) -> None:
        """Deliver an object to a store for a worker, and notify the store of the reference that was used.

        Args:
            ref: the reference that the worker used.
            entry: the entry that `resolve` returned for it.
            store: the store that gets the object.
            worker: gets a `RequestFailed` if the delivery is given up.
        """
        canonical = entry.ref
        if self.has(entry, store):
            if ref != canonical:
                self._notify(store, ref, canonical)
            return
        coming = self.incoming.get(canonical)
        if coming is None:
            coming = self.incoming[canonical] = {}
        delivery = coming.get(store)
        if delivery is None:
            delivery = coming[store] = Delivery(self._source(entry, ABSENT))
            self.refs.hold(canonical)
            self._send(canonical, store, delivery)
        if ref != canonical:
            if delivery.aliases is None:
                delivery.aliases = {}
            delivery.aliases[ref] = None
        delivery.workers.append((worker, ref))

    def ready(self, ref: int, store: int, nbytes: int) -> None:
        """Note that a store has an object, produced there or delivered.

        Raises:
            ReferenceCountError: the reference is unknown, deallocated, or an alias.
        """
        entry = self.entry(ref)
        if entry is None and ref < len(self.refs):
            self._effects.append(DeallocateObject(store, ref))  # a delivery that was given up, and succeeded after all
        freed = self.refs.ready(ref)
        if entry is None:
            return
        first = entry.first == ABSENT
        self.put(entry, store)
        _move(entry, _READY)
        entry.maker = entry.site = ABSENT
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
                self._notify(store, alias, ref)
        if self.lost:
            self.lost.pop(ref, None)
        if first and (self.requests or self._tasks):
            self._resolved(self.refs.members(ref))
        if delivery is not None:
            self.drop(self.refs.release(ref))

    def alias(self, alias: int, target: int) -> None:
        """Make a reference an alias of another one.

        Raises:
            ReferenceCountError: `RefTable.alias` rejects it.
        """
        known = self.refs.is_alive(alias) and self.refs.is_alive(target)
        settled = known and (self.is_resolved(target) or self.why_lost(target) is not None)
        names = self.refs.members(alias) if settled else []
        self.refs.alias(alias, target)
        entry = self.entry(alias)
        if entry is not None:
            _move(entry, _ALIAS)
        self.unmake(alias)
        self.lost.pop(alias, None)
        if not names:
            return
        if self.is_resolved(target):
            self._resolved(names)
        else:
            self._fail_waiting(names, self.why_lost(target) or "")

    def make(self, ref: int, worker: int, store: int) -> None:
        """Set the worker (or `ABSENT`) and the store that will produce the object of a reference, if it is pending."""
        entry = self.entry(ref)
        if entry is not None and self.refs.is_pending(ref):
            entry.maker, entry.site = worker, store

    def unmake(self, ref: int) -> None:
        """Clear the producer of a reference's object."""
        entry = self.entry(ref)
        if entry is not None:
            entry.maker = entry.site = ABSENT
        self.pushes.pop(ref, None)

    def abandon(self, ref: int, reason: str) -> None:
        """Mark a pending reference as lost: it has no producer any more."""
        self.unmake(ref)
        if not self.refs.is_pending(ref):
            return
        entry = self.entry(ref)
        assert entry is not None
        _move(entry, _LOSE)
        self.lost[ref] = reason
        self._fail_waiting(self.refs.members(ref), reason)
        self.drop(self.refs.abandon(ref))

    def drop(self, freed: list[int]) -> None:
        """Drop the entries of deallocated references, and order their stores to deallocate the objects."""
        for ref in freed:
            entry = self.entry(ref)
            assert entry is not None
            _move(entry, _FREE)
            number = ref >> _PAGE_BITS
            page = self.pages[number]
            assert page is not None
            page[ref & (_PAGE - 1)] = None
            self._page_alive[number] -= 1
            if not self._page_alive[number]:
                self._forget(number)
            if entry.first != ABSENT:
                self._effects.append(DeallocateObject(entry.first, ref))
            if entry.second != ABSENT:
                for store in self.stores(entry)[1:]:
                    self._effects.append(DeallocateObject(store, ref))
                self.further.pop(ref, None)
            if self.lost:
                self.lost.pop(ref, None)
            if self.pushes:
                self.pushes.pop(ref, None)
            if self.notified:
                self.notified.pop(ref, None)
            if self._tasks:
                self._tasks.pop(ref, None)
            if self.requests:
                for worker, _ in self.requests.pop(ref, ()):
                    words = "It was deallocated: no client counted it any more."
                    self._effects.append(RequestFailed(worker, ref, words))

    def _forget(self, number: int) -> None:
        """Drop a page if it is full and all of its references are deallocated."""
        page = self.pages[number]
        if page is not None and len(page) == _PAGE and not self._page_alive[number]:
            self.pages[number] = None

    def remove_store(self, store: int) -> None:
        """Remove a lost store: its deliveries restart from other stores, and objects that only it had are lost."""
        reason = f"Object store {store}, which had its last copy, is gone."
        lost, unmade = [], []
        for entry in self.live():
            if self.has(entry, store):
                self.take(entry, store)
                if entry.first == ABSENT:
                    _move(entry, _LOSE)
                    self.lost[entry.ref] = reason
                    lost.append(entry.ref)
            if entry.site == store:
                unmade.append(entry.ref)
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[1] != store]
        for names in self.notified.values():
            names.discard(store)
        for ref in sorted(self.incoming):
            for target, delivery in list(self.incoming[ref].items()):
                if target == store:
                    self._give_up(ref, target, None, False)
                elif delivery.source == store:
                    self.delivery_failed(ref, store, target, reason)
        for ref in lost:
            if ref in self.lost:
                self._fail_waiting(self.refs.members(ref), reason)
        for ref in unmade:
            self.abandon(ref, f"Object store {store}, where it was to be made, is gone.")

    def forget_worker(self, worker: int) -> None:
        """Drop the requests and pushes of a lost worker."""
        for waiting in self.requests.values():
            waiting[:] = [each for each in waiting if each[0] != worker]
        for ref in [ref for ref, maker in self.pushes.items() if maker == worker]:
            self.abandon(ref, f"Worker {worker}, which was to make it, is gone.")

    def delivery_failed(self, ref: int, source: int, target: int, reason: str) -> None:
        """Restart a failed delivery from another store or the same one; give it up after `_DELIVERY_TRIES`."""
        entry = self.entry(ref)
        delivery = self.incoming.get(ref, {}).get(target)
        if entry is None or delivery is None or delivery.source != source:
            return
        self._sent(delivery)
        if delivery.tries >= _DELIVERY_TRIES or entry.first == ABSENT:
            self._give_up(ref, target, reason, True)
            return
        delivery.tries += 1
        delivery.source = self._source(entry, source)
        self._send(ref, target, delivery)

    def _arrived(self, ref: int, target: int) -> Delivery | None:
        """Remove a delivery that has ended, and return it."""
        coming = self.incoming.get(ref)
        delivery = coming.pop(target, None) if coming is not None else None
        if not coming and coming is not None:
            del self.incoming[ref]
        return delivery

    def _source(self, entry: Entry, avoid: int) -> int:
        """The store with the fewest deliveries under way, of the next `_SOURCES_COMPARED` in turn."""
        if entry.second == ABSENT:
            return entry.first
        least, source = -1, ABSENT
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

    def _notify(self, store: int, alias: int, canonical: int) -> None:
        """Notify a store that has an object of one of its aliases, once."""
        notified = self.notified.setdefault(alias, set()) if alias != canonical else None
        if notified is not None and store not in notified:
            notified.add(store)
            self._effects.append(NotifyAlias(store, alias, canonical))

    def _resolved(self, names: Iterable[int]) -> None:
        for ref in names:
            for worker, store in self.requests.pop(ref, ()):
                entry = self.resolve(ref)
                assert entry is not None
                self.bring(ref, entry, store, worker)
            for task in self._tasks.pop(ref, ()):
                self._to_resolve.append(task)

    def _fail_waiting(self, names: Iterable[int], reason: str) -> None:
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
        if entry.first != ABSENT:
            return "STORED"
        if entry.ref in self.lost:
            return "LOST"
        return "EXPECTED" if self.refs.end(entry.ref) == entry.ref else "ALIAS"

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        check_invariants(self.refs)
        alive = [ref for ref, _, _ in self.refs.alive_before(len(self.refs))]
        assert [entry.ref for entry in self.live()] == alive, "entries and live references differ"
        assert len(self.pages) == -(-len(self.refs) // _PAGE), "pages are missing"
        for number, page in enumerate(self.pages):
            count = sum(entry is not None for entry in page or ())
            assert count == self._page_alive[number], f"page {number} has {count} live references"
            assert page is None or count or len(page) < _PAGE, f"page {number} is dead and kept"
        sending: dict[int, int] = {}
        for entry in self.live():
            ref, stores = entry.ref, self.stores(entry)
            assert OBJECT.states[entry.state] == self._state_of(entry), f"{ref} is not {OBJECT.states[entry.state]}"
            assert not stores or self.refs.canonical(ref) == ref, f"{ref} has stores and is not canonical"
            assert not stores or ref not in self.lost, f"{ref} is lost and at a store"
            assert len(set(stores)) == len(stores), f"{ref} has one store twice"
            assert ref not in self.further or entry.second != ABSENT, f"{ref} has stores behind a gap"
            assert entry.site == ABSENT or self.refs.is_pending(ref), f"{ref} has a producer and is not pending"
            assert ref not in self.pushes or self.pushes[ref] == entry.maker, f"{ref} has two producers"
            for target, delivery in self.incoming.get(ref, {}).items():
                assert target not in stores, f"{ref} is delivered to a store that has it"
                assert delivery.source in stores, f"{ref} is sent by a store that does not have it"
                sending[delivery.source] = sending.get(delivery.source, 0) + 1
        assert sending == self.sending, "the counts of deliveries are wrong"
        for ref in [*self.requests, *self._tasks]:
            if self.requests.get(ref) or self._tasks.get(ref):
                assert not self.is_resolved(ref), f"a caller waits for {ref}, which is resolved"
        assert all([*self.further.values(), *self.incoming.values()]), "empty tables are kept"
        for ref in [
            *self.further,
            *self.incoming,
            *self.lost,
            *self.pushes,
            *self.notified,
            *self.requests,
            *self._tasks,
        ]:
            assert self.entry(ref) is not None, f"{ref} is deallocated, and a table still has it"
