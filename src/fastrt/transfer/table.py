"""The table of the cluster's objects in this store: their names, their aliases, and the transfers under way.

The cluster's references (64 bits, made by the scheduler or by any node) differ from the arena's. This table maps the
first to the second, and holds one reference to each object until `drop`.

Invariants, under `_lock`: an objref is present, being received, or neither; it has at most one `Receipt`, so there is
one transfer however many callers ask; an alias names an object that was present when the alias was made. The holder of
a Receipt ends it by `seal` or `fail`; until then the object is not visible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from fastrt._core.objects import bulk, handles, spill
from fastrt._core.objects.handles import Pin, Writer
from fastrt.errors import FastrtError, NotFoundError, ObjectLostError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize

# Kinds of values that every store of this version can read: the core's scalars and those of store.serialize.
_SCALAR_BYTES = {0: 0, 1: 0, 2: 0, 3: 8, 4: 8, 5: -1, 6: -1}
_KINDS = {**_SCALAR_BYTES, 16: -1, 17: -1, 18: -1}


class TransferError(FastrtError):
    """An object did not arrive: its source is gone, does not have it, or sent other data than it announced.

    Nothing of it is kept. Request it again, from another source if there is one.
    """


class DuplicateError(FastrtError):
    """The object is in this store already, or another transfer of it is under way; this one is not needed."""


class Sealed:
    """An object's bytes in the arena, pinned while this lives.

    Attributes:
        kind: the format of the value.
        is_error: whether `get` raises it.
        pin: the bytes, read-only.
        refs: the cluster's names of the references that it contains.
    """

    __slots__ = ("is_error", "kind", "pin", "refs")

    def __init__(self, kind: int, is_error: bool, pin: Pin, refs: list[int]) -> None:
        self.kind = kind
        self.is_error = is_error
        self.pin = pin
        self.refs = refs


class Receipt:
    """One object that is being received: its memory until it is sealed, and its waiting callers.

    Attributes:
        ended: whether it has arrived (`ref`) or failed (`error`).
        received: the offset of the next byte.
        until: the offset of the first byte that is not requested; 0: all are.
        groups: the groups that it is part of; changed under the table's lock until it has ended.
    """

    __slots__ = (
        "_future", "_table", "ended", "error", "groups", "objref", "received", "ref", "refs", "total",
        "until", "view", "writer",
    )  # fmt: skip

    def __init__(self, table: Table, objref: int) -> None:
        self._table = table
        self.objref = objref
        self._future: Future[ObjectRef] | None = None  # made on request: most objects of a large group never need one
        self.groups: tuple[Whole, ...] = ()
        self.ended = False
        self.ref: ObjectRef | None = None
        self.error: BaseException | None = None
        self.total = 0
        self.received = self.until = 0
        self.refs: list[int] = []  # the cluster's names of the references that it contains
        self.writer: Writer | None = None
        self.view: memoryview | None = None

    @property
    def future(self) -> Future[ObjectRef]:
        """The future for callers that wait for this object alone."""
        with self._table._lock:
            future = self._future
            if future is None:
                future = _running()
                if self.ref is not None:
                    future.set_result(self.ref)
                elif self.ended:
                    future.set_exception(self.error)
                else:
                    self._future = future
            return future

    def end(self, ref: ObjectRef | None, error: BaseException | None) -> None:
        """Set the result, once, under the table's lock. `notify` follows, without the lock."""
        self.ended, self.ref, self.error = True, ref, error

    def notify(self) -> None:
        """Complete the futures of the waiting callers."""
        groups, self.groups = self.groups, ()
        if self._future is not None and self.ref is not None:
            self._future.set_result(self.ref)
        elif self._future is not None:
            self._future.set_exception(self.error)
        for whole in groups:
            whole.count(self.error)

    def allocate(self, total: int, kind: int, is_error: bool, nrefs: int = 0) -> memoryview:
        """Allocate memory for the object; it is released when the receipt fails.

        Args:
            total: its size in bytes.
            kind, is_error, nrefs: the fields that the source sent.
        Returns:
            The memory, to be written.
        Raises:
            TransferError: no store of this version can read such a value.
            ObjectStoreFullError: there is no room, even after spilling.
        """
        wanted = _KINDS.get(kind)
        if wanted is None or wanted not in (-1, total):
            raise TransferError(
                f"object {self.objref:#x} is announced as kind {kind} of {total} bytes, which is not a value"
            )
        store = self._table.store
        self.writer = store.create(total, kind, nrefs, is_error, in_file=True)
        self.total = total
        self.view = memoryview(self.writer)
        return self.view

    def seal(self) -> ObjectRef | None:
        """Make the object visible, after its last byte.

        Raises:
            TransferError: it is incomplete, was dropped meanwhile, or contains an unknown reference.
        """
        if self.writer is None or self.received != self.total:
            raise TransferError(f"object {self.objref:#x} has {self.received} of {self.total} bytes")
        held = [self._table.resolve(ref) for ref in self.refs]
        self.view = None
        sealed: ObjectRef = self.writer.seal(held)
        self.writer = None
        self._table._arrived(self, sealed)
        return sealed

    def put(self, value: Any, is_error: bool = False) -> ObjectRef:
        """Store a value that was built from the received bytes, instead of the bytes; with `is_error`, `get` raises it.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        self.view = self.writer = None
        store = self._table.store
        ref = store.put_serialized(serialize(value), error=True) if is_error else store.put(value)
        self._table._arrived(self, ref)
        return ref

    def fail(self, error: BaseException) -> None:
        """Release the memory and fail the waiting callers; does nothing if the object has arrived."""
        self.view = self.writer = None
        chain: BaseException | None = error
        while chain is not None:  # its frames hold the memory of the failed attempt, and callers may keep the error
            chain.__traceback__ = None
            chain = chain.__cause__ or chain.__context__
        self._table._failed(self, error)


class Whole:
    """Objects that are requested together, with one future for all of them.

    Args:
        parts: for each object its reference, or the Receipt of one that is being received.
    """

    def __init__(self, parts: list[ObjectRef | Receipt]) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._left = sum(isinstance(part, Receipt) for part in parts)
        self.future: Future[list[ObjectRef]] = Future()
        self.future.set_running_or_notify_cancel()
        if not self._left:
            self._end(None)

    def count(self, error: BaseException | None) -> None:
        """Count one more object that arrived or failed; the first failure fails the group."""
        with self._lock:
            ended = self._left == 0
            self._left = 0 if error is not None else max(0, self._left - 1)
            if ended or self._left:
                return
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        parts, self._parts = self._parts, []
        if error is not None:
            self.future.set_exception(error)
        else:
            refs: list[Any] = [part.ref if isinstance(part, Receipt) else part for part in parts]
            self.future.set_result(refs)


class Table:
    """The cluster's objects in one store.

    Args:
        store: this process's attachment.
        resolve: finds the reference for the cluster's name of a contained object that is not here; without it, a value
            that contains one is rejected.
        name: returns the cluster's name of a contained reference that this table does not know.
    """

    def __init__(
        self,
        store: Store,
        resolve: Callable[[int], ObjectRef] | None = None,
        name: Callable[[ObjectRef], int] | None = None,
    ) -> None:
        self.store = store
        self._resolve = resolve
        self._name = name
        self._lock = threading.Lock()
        self._here: dict[int, ObjectRef] = {}
        self._names: dict[ObjectRef, int] = {}
        self._aliases: dict[int, int] = {}
        self._coming: dict[int, Receipt] = {}
        self._waiting: dict[int, list[Future[ObjectRef]]] = {}

    # ---- objects in this store ----

    def add(self, objref: int, ref: ObjectRef) -> None:
        """Add an object that was made on this node.

        Raises:
            DuplicateError: the name is taken.
        """
        with self._lock:
            if objref in self._here or objref in self._coming or objref in self._aliases:
                raise DuplicateError(f"object {objref:#x} is in this store already")
            waiting = self._enter(objref, ref)
        for future in waiting:
            future.set_result(ref)

    def find(self, objref: int) -> ObjectRef | None:
        """The object of that name or alias, if it is here."""
        with self._lock:
            return self._here.get(self._aliases.get(objref, objref))

    def listed(self) -> list[int]:
        """The names and aliases of all objects in this store, in order."""
        with self._lock:
            return sorted([*self._here, *self._aliases])

    def read(self, objref: int) -> Sealed:
        """Pin an object's bytes, after restoring them from a file if they were spilled.

        Raises:
            NotFoundError: it is not here.
            FastrtError: it is not ready, or contains a reference without a name in the cluster.
        """
        ref = self.find(objref)
        if ref is None:
            raise NotFoundError(f"object {objref:#x} is not in this store")
        kind, is_error, pin = self.store.read(ref, raw=True)
        contained = handles.contained(self.store.client, ref)
        return Sealed(kind, is_error, pin, [self.name_of(one) for one in contained] if contained else [])

    def is_at_hand(self, objref: int) -> bool:
        """Whether `read` can return at once, without restoring the object from a file."""
        ref = self.find(objref)
        return ref is None or not spill.is_spilled(self.store.client, ref)

    def read_many(self, objrefs: list[int], bytes_max: int, total_max: int) -> list[tuple[int, bool, Pin] | None]:
        """Pin the bytes of small objects by `bulk.pin_many`; None for each that only `read` can pin."""
        with self._lock:
            refs = [self._here.get(self._aliases.get(objref, objref)) for objref in objrefs]
        return bulk.pin_many(self.store.client, refs, bytes_max, total_max)

    def allocate_many(self, specs: list[tuple[int, int, bool]]) -> list[Writer]:
        """Allocate memory for small objects by `bulk.create_many`: for as many as there is room for at once.

        Args:
            specs: for each its size, its kind, and whether it is an error.
        Raises:
            TransferError: no store of this version can read one of them.
        """
        for total, kind, _ in specs:
            if _KINDS.get(kind) not in (-1, total):
                raise TransferError(f"an object is announced as kind {kind} of {total} bytes, which is not a value")
        return bulk.create_many(self.store.client, specs)

    def seal_many(self, receipts: list[Receipt], writers: list[Writer]) -> None:
        """Make objects of `allocate_many` visible, after their last byte, except those that were dropped meanwhile."""
        self._arrive(receipts, bulk.seal_many(writers))

    def drop(self, objref: int) -> None:
        """Drop an object and its aliases; one that is being received is discarded when it arrives.

        Raises:
            NotFoundError: no object has that name.
        """
        with self._lock:
            ref = self._here.pop(objref, None)
            receipt = self._coming.pop(objref, None)
            if receipt is not None:
                receipt.end(None, _dropped(objref))
            if ref is None and receipt is None:
                raise NotFoundError(f"object {objref:#x} is not in this store, so it cannot be deallocated")
            if ref is not None:
                self._names.pop(ref, None)
            for alias in [alias for alias, target in self._aliases.items() if target == objref]:
                del self._aliases[alias]
        if receipt is not None:
            receipt.notify()

    def clear(self) -> None:
        """Drop all objects, and fail all waiting callers."""
        with self._lock:
            coming, self._coming = list(self._coming.values()), {}
            waiting = [future for futures in self._waiting.values() for future in futures]
            for mapping in (self._here, self._names, self._aliases, self._waiting):
                mapping.clear()
            for receipt in coming:
                receipt.end(None, TransferError("this store is closing"))
        for receipt in coming:
            receipt.notify()
        for future in waiting:
            future.set_exception(TransferError("this store is closing"))

    # ---- aliases ----

    def alias(self, alias: int, canonical: int) -> None:
        """Add another name of an object.

        Raises:
            ValueError: the two are the same.
            NotFoundError: the object is not here.
            DuplicateError: the alias names another object already.
        """
        if alias == canonical:
            raise ValueError(f"object {alias:#x} cannot be an alias of itself")
        with self._lock:
            target = self._aliases.get(canonical, canonical)
            if target not in self._here:
                raise NotFoundError(f"object {canonical:#x} is not in this store; {alias:#x} cannot be its alias here")
            if self._aliases.get(alias, target) != target or alias in self._here or alias in self._coming:
                raise DuplicateError(f"object {alias:#x} names another object here already, not {canonical:#x}")
            self._aliases[alias] = target
            ref = self._here[target]
            waiting = self._waiting.pop(alias, [])
        for future in waiting:
            future.set_result(ref)

    # ---- objects being received ----

    def expect(self, objref: int) -> Future[ObjectRef]:
        """A future of the object, done when it arrives in any way; starts no transfer."""
        future = _running()
        with self._lock:
            ref = self._here.get(self._aliases.get(objref, objref))
            if ref is None:
                self._waiting.setdefault(objref, []).append(future)
        if ref is not None:
            future.set_result(ref)
        return future

    def unexpect(self, objref: int, future: Future[ObjectRef]) -> None:
        """Forget a future of `expect` that no caller waits for any more."""
        with self._lock:
            waiting = self._waiting.get(objref, [])
            if future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._waiting[objref]

    def begin(self, objref: int) -> tuple[Receipt | None, Future[ObjectRef]]:
        """Claim the one transfer of an object.

        Returns:
            (receipt, future): the receipt is None when the object is here or another transfer is under way.
        """
        (found,), new = self.begin_many([objref])
        if isinstance(found, Receipt):
            return found if new else None, found.future
        future = _running()
        future.set_result(found)
        return None, future

    def begin_many(self, objrefs: Iterable[int]) -> tuple[list[ObjectRef | Receipt], list[Receipt]]:
        """Claim the one transfer of each of several objects.

        Returns:
            (found, new): for each object its reference or its Receipt; and the Receipts that the caller must end.
        """
        found: list[ObjectRef | Receipt] = []
        new = []
        here, aliases, coming = self._here, self._aliases, self._coming
        with self._lock:
            for objref in objrefs:
                part: ObjectRef | Receipt | None = here.get(aliases.get(objref, objref)) or coming.get(objref)
                if part is None:
                    part = coming[objref] = Receipt(self, objref)
                    new.append(part)
                found.append(part)
        return found, new

    def whole(self, parts: list[ObjectRef | Receipt]) -> Future[list[ObjectRef]]:
        """One future for all objects that `begin_many` found; the first failure fails it."""
        with self._lock:
            parts = [part.ref if isinstance(part, Receipt) and part.ref is not None else part for part in parts]
            failed = [part for part in parts if isinstance(part, Receipt) and part.ended]
            group = Whole(parts)
            for part in parts:
                if isinstance(part, Receipt):
                    part.groups = (*part.groups, group)
        for receipt in failed:
            group.count(receipt.error)
        return group.future

    def coming(self) -> int:
        """How many objects are being received."""
        return len(self._coming)

    def resolve(self, objref: int) -> ObjectRef:
        """The reference for a contained name.

        Raises:
            TransferError: the name is unknown here.
        """
        ref = self.find(objref)
        if ref is None and self._resolve is not None:
            ref = self._resolve(objref)
        if ref is None:
            raise TransferError(f"the object contains a reference to {objref:#x}, which this store does not know")
        return ref

    def name_of(self, ref: ObjectRef) -> int:
        """The cluster's name of a reference.

        Raises:
            FastrtError: it has none.
        """
        with self._lock:
            name = self._names.get(ref)
        if name is None and self._name is not None:
            name = self._name(ref)
        if name is None:
            raise FastrtError(f"the object contains {ref!r}, which has no name in the cluster")
        return name

    def _enter(self, objref: int, ref: ObjectRef) -> list[Future[ObjectRef]]:
        """Add an object, under the lock; returns the futures that wait for it."""
        self._here[objref] = ref
        self._names[ref] = objref
        return self._waiting.pop(objref, [])

    def _arrived(self, receipt: Receipt, ref: ObjectRef) -> None:
        if not self._arrive([receipt], [ref]):
            raise _dropped(receipt.objref)

    def _arrive(self, receipts: list[Receipt], refs: list[ObjectRef]) -> int:
        """Add received objects; returns how many of them were not dropped meanwhile."""
        arrived = []
        waiting: list[tuple[Future[ObjectRef], ObjectRef]] = []
        with self._lock:
            for receipt, ref in zip(receipts, refs, strict=True):
                if self._coming.get(receipt.objref) is receipt:
                    del self._coming[receipt.objref]
                    waiting += [(future, ref) for future in self._enter(receipt.objref, ref)]
                    receipt.end(ref, None)
                    arrived.append(receipt)
        for receipt in arrived:
            receipt.notify()
        for future, ref in waiting:
            future.set_result(ref)
        return len(arrived)

    def _failed(self, receipt: Receipt, error: BaseException) -> None:
        with self._lock:
            if self._coming.get(receipt.objref) is not receipt:
                return
            del self._coming[receipt.objref]
            receipt.end(None, error)
        receipt.notify()


def _running() -> Future[ObjectRef]:
    """A future that its callers cannot cancel, because they share it."""
    future: Future[ObjectRef] = Future()
    future.set_running_or_notify_cancel()
    return future


def _dropped(objref: int) -> ObjectLostError:
    return ObjectLostError(f"object {objref:#x} was deallocated while it was being received")
