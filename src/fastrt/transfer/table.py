"""Which objects of the cluster are in this store, under which names, and which are on their way.

The cluster's references (64 bits, made by the scheduler or by any node) and the arena's own differ: this table maps
the first to the second, and holds one reference to each object until it is told to drop it.

Invariants, under `_lock`: an objref is here, or being received, or neither; there is at most one `Receipt` of it, so
however many ask there is one transfer; an alias names an object that was here when it was made. Whoever holds a
Receipt ends it by `seal` or `fail`, and until then nothing of the object is visible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastrt._core import handles
from fastrt._core.handles import Pin, Writer
from fastrt.errors import FastrtError, NotFoundError, ObjectLostError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

# Kinds of values that every store of this version can read: the core's scalars, and those of store.serialize.
_SCALAR_BYTES = {0: 0, 1: 0, 2: 0, 3: 8, 4: 8, 5: -1, 6: -1}
_KINDS = {**_SCALAR_BYTES, 16: -1, 17: -1, 18: -1}


class TransferError(FastrtError):
    """An object did not arrive: its source is gone, does not have it, or sends something else than it said.

    Nothing of it is kept. Ask for it again, from another source if there is one.
    """


class DuplicateError(FastrtError):
    """The object is in this store already, or another stream is bringing it; the one that asks is not needed."""


class Sealed:
    """An object's bytes as they lie in the arena, pinned while this lives.

    Attributes:
        kind: how the value is written.
        is_error: whether `get` raises it.
        pin: the bytes, read-only.
        refs: the cluster's names of what it contains.
    """

    __slots__ = ("is_error", "kind", "pin", "refs")

    def __init__(self, kind: int, is_error: bool, pin: Pin, refs: list[int]) -> None:
        self.kind = kind
        self.is_error = is_error
        self.pin = pin
        self.refs = refs


class Receipt:
    """One object on its way here: its memory until it is sealed, and the future of all who wait for it."""

    __slots__ = ("_table", "future", "objref", "received", "refs", "total", "view", "writer")

    def __init__(self, table: Table, objref: int) -> None:
        self._table = table
        self.objref = objref
        self.future = _running()
        self.total = 0
        self.received = 0
        self.refs: list[int] = []  # the cluster's names of what the object contains
        self.writer: Writer | None = None
        self.view: memoryview | None = None

    def allocate(self, total: int, kind: int, is_error: bool, nrefs: int = 0) -> memoryview:
        """Take memory for the object; it goes back by itself when the receipt fails.

        Args:
            total: its size in bytes.
            kind, is_error, nrefs: as the source says.
        Returns:
            The memory, to be written.
        Raises:
            TransferError: no store of this version can read such a value.
            ObjectStoreFullError: there is no room, also after spilling.
        """
        wanted = _KINDS.get(kind)
        if wanted is None or wanted not in (-1, total):
            raise TransferError(f"object {self.objref:#x} comes as kind {kind} of {total} bytes, which is no value")
        store = self._table.store
        self.writer = store.with_room(total, lambda: handles.create(store.client, total, kind, nrefs, is_error))
        self.total = total
        self.view = memoryview(self.writer)
        return self.view

    def seal(self) -> ObjectRef:
        """Make the object visible, after its last byte.

        Raises:
            TransferError: it is not whole, was dropped meanwhile, or contains what this store does not know.
        """
        if self.writer is None or self.received != self.total:
            raise TransferError(f"object {self.objref:#x} has {self.received} of {self.total} bytes")
        held = [self._table.resolve(ref) for ref in self.refs]
        self.view = None
        sealed: ObjectRef = self.writer.seal(held)
        self.writer = None
        self._table._arrived(self, sealed)
        return sealed

    def put(self, value: Any) -> ObjectRef:
        """Store a value that was built from what came, instead of the bytes themselves.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        self.view = self.writer = None
        ref = self._table.store.put(value)
        self._table._arrived(self, ref)
        return ref

    def fail(self, error: BaseException) -> None:
        """Give the memory back and tell whoever waits; nothing if the object has arrived."""
        self.view = self.writer = None
        chain: BaseException | None = error
        while chain is not None:  # frames of the failed attempt show its memory, and callers may keep the error
            chain.__traceback__ = None
            chain = chain.__cause__ or chain.__context__
        self._table._failed(self, error)


class Table:
    """The cluster's objects in one store.

    Args:
        store: this process's attachment.
        resolve: finds the reference for the cluster's name of a contained object that is not here; without it such
            an object is refused.
        name: the cluster's name of a contained reference that this table does not know.
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

    # ---- what is here ----

    def add(self, objref: int, ref: ObjectRef) -> None:
        """Enter an object that was made on this node.

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
        """Every name and alias under which an object is here, in order."""
        with self._lock:
            return sorted([*self._here, *self._aliases])

    def read(self, objref: int) -> Sealed:
        """Pin an object's bytes, restored from a file if need be.

        Raises:
            NotFoundError: it is not here.
            FastrtError: it is not ready, or contains what has no name in the cluster.
        """
        ref = self.find(objref)
        if ref is None:
            raise NotFoundError(f"object {objref:#x} is not in this store")
        kind, is_error, pin = self.store.read(ref, raw=True)
        contained = handles.contained(self.store.client, ref)
        return Sealed(kind, is_error, pin, [self.name_of(one) for one in contained] if contained else [])

    def drop(self, objref: int) -> None:
        """Let go of an object and its aliases; one that is on its way is thrown away when it arrives.

        Raises:
            NotFoundError: there is none of that name.
        """
        with self._lock:
            ref = self._here.pop(objref, None)
            receipt = self._coming.pop(objref, None)
            if ref is None and receipt is None:
                raise NotFoundError(f"object {objref:#x} is not in this store, so it cannot be deallocated")
            if ref is not None:
                self._names.pop(ref, None)
            for alias in [alias for alias, target in self._aliases.items() if target == objref]:
                del self._aliases[alias]
        if receipt is not None:
            receipt.future.set_exception(_dropped(objref))

    def clear(self) -> None:
        """Let go of everything, and fail whoever waits."""
        with self._lock:
            coming, self._coming = list(self._coming.values()), {}
            waiting = [future for futures in self._waiting.values() for future in futures]
            for mapping in (self._here, self._names, self._aliases, self._waiting):
                mapping.clear()
        for future in [*waiting, *(receipt.future for receipt in coming)]:
            future.set_exception(TransferError("this store is closing"))

    # ---- aliases ----

    def alias(self, alias: int, canonical: int) -> None:
        """Let an object be found under another name too.

        Raises:
            ValueError: the two are the same.
            NotFoundError: the object is not here.
            DuplicateError: the alias names something else already.
        """
        if alias == canonical:
            raise ValueError(f"object {alias:#x} cannot be an alias of itself")
        with self._lock:
            target = self._aliases.get(canonical, canonical)
            if target not in self._here:
                raise NotFoundError(f"object {canonical:#x} is not in this store; {alias:#x} cannot be its alias here")
            if self._aliases.get(alias, target) != target or alias in self._here or alias in self._coming:
                raise DuplicateError(f"object {alias:#x} is something else here already, not {canonical:#x}")
            self._aliases[alias] = target
            ref = self._here[target]
            waiting = self._waiting.pop(alias, [])
        for future in waiting:
            future.set_result(ref)

    # ---- what is on its way ----

    def expect(self, objref: int) -> Future[ObjectRef]:
        """A future of the object, done when it is here by whatever way; asks nobody for it."""
        future = _running()
        with self._lock:
            ref = self._here.get(self._aliases.get(objref, objref))
            if ref is None:
                self._waiting.setdefault(objref, []).append(future)
        if ref is not None:
            future.set_result(ref)
        return future

    def begin(self, objref: int) -> tuple[Receipt | None, Future[ObjectRef]]:
        """Claim the one transfer of an object.

        Returns:
            (receipt, future): the receipt is None when the object is here or somebody else brings it.
        """
        with self._lock:
            ref = self._here.get(self._aliases.get(objref, objref))
            if ref is None:
                receipt = self._coming.get(objref)
                if receipt is not None:
                    return None, receipt.future
                receipt = self._coming[objref] = Receipt(self, objref)
                return receipt, receipt.future
        future = _running()
        future.set_result(ref)
        return None, future

    def coming(self) -> int:
        """How many objects are on their way."""
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
        """Under the lock: the object is here; those who wait for it."""
        self._here[objref] = ref
        self._names[ref] = objref
        return self._waiting.pop(objref, [])

    def _arrived(self, receipt: Receipt, ref: ObjectRef) -> None:
        with self._lock:
            if self._coming.get(receipt.objref) is not receipt:
                raise _dropped(receipt.objref)
            del self._coming[receipt.objref]
            waiting = self._enter(receipt.objref, ref)
        receipt.future.set_result(ref)
        for future in waiting:
            future.set_result(ref)

    def _failed(self, receipt: Receipt, error: BaseException) -> None:
        with self._lock:
            if self._coming.get(receipt.objref) is not receipt:
                return
            del self._coming[receipt.objref]
        receipt.future.set_exception(error)


def _running() -> Future[ObjectRef]:
    """A future that nobody can cancel: it is not only theirs."""
    future: Future[ObjectRef] = Future()
    future.set_running_or_notify_cancel()
    return future


def _dropped(objref: int) -> ObjectLostError:
    return ObjectLostError(f"object {objref:#x} was deallocated while it was on its way here")
