"""This process's attachment to its node's object store: put, get, wait.

A process has at most one Store. `require()` returns it, starts the embedded runtime if there is none, and attaches
again in a forked child. The layers above supply the functions for that (`install`, `Store.rejoin`), so that this module
does not depend on them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from fastrt._core.memory.clients import Client, ForkedHandle
from fastrt._core.objects import handles, remote, scalar, spill, unread, unread_list
from fastrt._core.repair import recovery
from fastrt._core.tasks import tasks as core_tasks
from fastrt.errors import (
    ArgumentError,
    FastrtError,
    GetTimeoutError,
    NotInitializedError,
    ObjectStoreFullError,
    StaleReferenceError,
    for_users,
)
from fastrt.store import engine as engines
from fastrt.store import mixed, room, warnings
from fastrt.store import ref as ref_module
from fastrt.store import serialize as serializer
from fastrt.store.file_values import FileValues, lost
from fastrt.store.messages import Message, Restore
from fastrt.store.ref import ObjectRef, Waitable, kind_of
from fastrt.store.serialize import PICKLE, Serialized, deserialize, owned, serialize

if TYPE_CHECKING:
    from fastrt._core.objects.handles import Writer
    from fastrt.devices import Device

_MISSING = object()
_RESTORE_LOOK_S = 0.02  # until the first look whether the daemon has found room for a spilled value
_T = TypeVar("_T")
_W = TypeVar("_W", bound="ObjectRef | Waitable")
# The result of a task whose real error does not fit into the store: small enough to be kept in the table itself.
NO_ROOM_PICKLE = b"cfastrt.errors\nObjectStoreFullError\n(Vno room for an error\ntR."
NO_ROOM = Serialized(PICKLE, len(NO_ROOM_PICKLE), [(0, NO_ROOM_PICKLE)], [])


class Store:
    """Put, get and wait through one client of the arena.

    Args:
        client: the core's attachment.
        spin_s: how long a wait spins before it sleeps, in seconds.
        rejoin: creates the store of a child that this process forks.
        tell: sends a message to the daemon, which spills and restores; without it nothing is spilled.
        patience_s: how long to wait for room while all processes of the node wait, in seconds.
    """

    def __init__(
        self,
        client: Client,
        spin_s: float,
        rejoin: Callable[[], Store] | None = None,
        tell: Callable[[Message], object] | None = None,
        patience_s: float = 10.0,
    ) -> None:
        self.client = client
        self.spin_s, self.patience_s = spin_s, patience_s
        self.rejoin = rejoin
        self.tell = tell
        self.socket_path = ""  # of the daemon, if the process that joined there has set it
        self.devices: Sequence[Device] = ()  # of the node, in workers and actors
        self.on_block: Callable[[bool], None] | None = None  # a worker sets it: called around a sleep inside a task
        self.help_with: Callable[[ObjectRef], bool] | None = None  # in place of a sleep when no worker is free
        self.may_sleep: Callable[[], bool] = lambda: False  # whether another worker would take this one's place
        self.check_wait: Callable[[], None] | None = None  # raises an error to end a wait for room
        self.files = FileValues(self)
        self._lone_gets, self.serves = warnings.LoneGets(), False  # serves: it holds memory for other nodes
        self.task_here: Callable[[], int | None] = _nothing  # the index of the task that runs on this thread
        self.task_name: Callable[[int], str] = str
        self.function_name: Callable[[int], str] = str  # of a task; with its module
        self.actor_here: int | None = None  # the index of this process's actor
        self.actor_id, self.actor_job = "", 0  # its id at its creator, and the number of the job that created it
        self.on_exit: Callable[[str], None] | None = None  # ends this actor, for a reason
        self.note: Callable[[Any], object] | None = None  # called with the references that this process creates
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # what keeps things of this store; see `close`
        self.waiter: Any = None  # the thread that waits for many references, see `store.waiter`

    def close(self, keep_slot: bool = False) -> None:
        """Leave the session, after a call of `forget()` of all `users`.

        Args:
            keep_slot: give all references back, but keep the client slot: views stay valid, and this process may join
                the session again; see `attach.leave`.
        """
        for user in list(self.users):
            user.forget()
        if self.client.forked:
            self.client.abandon()
        elif keep_slot:
            try:
                recovery.leave(self.client)
            except FastrtError:  # the session has ended, and its references with it
                self.client.close()
        else:
            self.client.close()

    # ---- put ----

    def put(self, value: object) -> ObjectRef:
        """Store a value; see `fastrt.put`.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        ref: ObjectRef | None
        try:
            ref = handles.put_scalar(self.client, value)
        except ObjectStoreFullError:
            size = len(value) if isinstance(value, (str, bytes)) else 8
            ref = self.with_room(
                size, lambda: handles.put_scalar(self.client, value), True, lambda: self.files.put(serialize(value))
            )
        if ref is None:
            ref = self.put_serialized(serialize(value), in_file=True)
        if self.note is not None:
            self.note(ref)
        return ref

    def put_serialized(self, parts: Serialized, error: bool = False, in_file: bool = False) -> ObjectRef:
        """Store an already serialized value; with `error`, `get` raises it; `in_file` as for `create`.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        writer = self.create(parts.nbytes, parts.kind, len(parts.refs), error, in_file=in_file)
        parts.write(writer)
        ref: ObjectRef = writer.seal(parts.refs)
        return ref

    def put_or_error(self, value: object) -> ObjectRef:
        """Store a value, or an error in its place if the store stays full."""
        try:
            return self.put_serialized(serialize(value), in_file=True)
        except ObjectStoreFullError:
            return self.put_serialized(NO_ROOM, error=True)

    def create(
        self, nbytes: int, kind: int, nrefs: int, error: bool = False, patient: bool = True, in_file: bool = False
    ) -> Writer:
        """Allocate memory for a value of `nbytes` bytes with `nrefs` references, by `handles.create`.

        Args:
            nbytes, kind, nrefs, error: as for `handles.create`.
            patient: as for `with_room`.
            in_file: whether the memory may be a file if the store has no room. No for errors, and for what code other
                than `Store.read` reads.
        Raises:
            ObjectStoreFullError: the store stays full, see `with_room`.
        """
        try:
            return handles.create(self.client, nbytes, kind, nrefs, error)
        except ObjectStoreFullError:
            if not patient:
                raise
        return room.with_room(
            self, _block(nbytes, nrefs), lambda: handles.create(self.client, nbytes, kind, nrefs, error),
            (lambda: self.files.create(nbytes, kind, nrefs)) if in_file and not error else None,
        )  # fmt: skip

    def result(
        self, task: int, index: int, nbytes: int, kind: int, nrefs: int, error: bool = False, patient: bool = True
    ) -> Writer | None:
        """Allocate memory for result `index` of a task that this process runs or ends; None if it is already sealed.

        Raises:
            ObjectStoreFullError: the store stays full, see `with_room`.
        """
        try:
            return handles.result(self.client, task, index, nbytes, kind, nrefs, error)
        except ObjectStoreFullError:
            if not patient:
                raise
        return room.with_room(
            self, _block(nbytes, nrefs), lambda: handles.result(self.client, task, index, nbytes, kind, nrefs, error),
            None if error else lambda: self.files.result(task, index, nbytes, kind, nrefs),
        )  # fmt: skip

    def put_result(self, task: int, index: int, parts: Serialized, error: bool = False, patient: bool = True) -> None:
        """Seal result `index` of a task that this process runs or ends; do nothing if it is already sealed.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        writer = self.result(task, index, parts.nbytes, parts.kind, len(parts.refs), error, patient)
        if writer is not None:
            parts.write(writer)
            writer.seal(parts.refs)

    def put_error(self, task: int, error: BaseException) -> None:
        """Seal every result of a task that is not sealed yet with an error; it never fails because the store is full.

        Raises:
            SerializationError: the error cannot be pickled.
        """
        parts = serialize(error)
        patient = not self.serves and not isinstance(error, ObjectStoreFullError)  # that one has waited
        returns = core_tasks.info(self.client, task)["returns"]
        if not returns:
            unread_list.keep(parts.kind, parts.to_bytes())
        for k in range(returns):
            try:
                self.put_result(task, k, parts, True, patient)
            except ObjectStoreFullError:
                self.put_result(task, k, NO_ROOM, True, False)

    def with_room(
        self, wanted: int, make: Callable[[], _T], patient: bool = True, make_file: Callable[[], _T] | None = None
    ) -> _T:
        """Call `make`; if the store is full, wait for room and call it again, or use a file.

        Args:
            wanted: bytes that it needs, 0 for "a little".
            make: a function that raises ObjectStoreFullError when there is no room.
            patient: False: raise the core's error at once.
            make_file: a function that does the same with a file. It is called if spilling makes no room.
        Returns:
            The result of `make` or `make_file`.
        Raises:
            ObjectStoreFullError: the store stays full, and the disk too, or no file may be used; the message names the
                processes that use the memory, and the disk's error.
        """
        try:
            return make()
        except ObjectStoreFullError as exc:
            if exc.explained or not patient:
                raise
        return room.with_room(self, wanted, make, make_file)

    # ---- get ----

    def get(self, refs: Any, timeout: float | None = None, copy: bool | None = None) -> Any:
        """Return the value of a reference or of each of a list.

        Raises:
            Exception: as for `fastrt.get`.
        """
        if isinstance(refs, ObjectRef):
            value = handles.read_scalar(self.client, refs, _MISSING, self.spin_s)
            if value is not _MISSING:
                return value
            return self.load(refs, copy, self.wait_ready([refs], timeout, 0.0))  # read_scalar has spun already
        if not isinstance(refs, (list, tuple)):
            if isinstance(refs, Waitable):  # as in Ray
                return refs
            raise ArgumentError(f"get takes an ObjectRef or a list of them, not {kind_of(refs)}")
        listed = list(refs)
        for ref in listed:
            if not isinstance(ref, ObjectRef):
                raise TypeError(f"get takes ObjectRefs; the list has a {kind_of(ref)}")
        deadline = self.wait_ready(listed, timeout, self.spin_s)
        values = handles.read_scalars(self.client, listed, _MISSING)
        others = [k for k, value in enumerate(values) if value is _MISSING]
        # An error ends the wait early, so values before it in the list may not be ready yet.
        others.sort(key=lambda k: not handles.is_ready(self.client, listed[k]))
        if len(others) > 1:
            self._fetch_ahead([listed[k] for k in others])
        try:
            for k in others:
                values[k] = self.load(listed[k], copy, deadline)
        except BaseException:
            unread.mark(self.client, listed)  # one error stands for all of them
            raise
        return values

    def _fetch_ahead(self, refs: list[ObjectRef]) -> None:
        """Have the bytes of all remote values brought here, before they are read one after the other."""
        for ref in refs:
            if self.tell is not None and remote.is_missing(self.client, ref):
                self.tell(Restore(ref.index, ref.objref))

    def read(
        self, ref: ObjectRef, raw: bool = False, deadline: float | None = None, at_once: bool = False
    ) -> tuple[int, bool, Any]:
        """Return the stored form of a ready reference's value: (kind, whether it is an error, data).

        Args:
            raw: return the bytes of the arena for every kind.
            deadline: of the monotonic clock, for bytes that another node has; None: no limit.
            at_once: map a value in a file without asking the daemon to restore it.
        Returns:
            `data` is the value itself for the core's scalars (kind below 16), else bytes or a view of the arena;
            with `raw` always bytes or a view.
        Raises:
            ObjectLostError: it was spilled, and its file is gone or damaged.
            ObjectStoreFullError, OSError: there is no room to bring it back, and this process can open no file.
            GetTimeoutError: the deadline passed.
        """
        found = handles.read(self.client, ref, raw)
        while found is None:
            if remote.is_missing(self.client, ref):
                with self.blocked():
                    self._restore(ref, deadline)
            elif self.files.falls_back:
                found = self.files.read(ref, raw, at_once)
                if found is not None:
                    return found
            else:
                self._restore(ref)
            found = handles.read(self.client, ref, raw)
        if found[0] == spill.KIND_LOST:
            raise lost(self.client, ref)
        return found

    def load(self, ref: ObjectRef, copy: bool | None = None, deadline: float | None = None) -> Any:
        """Return the value of a ready reference; `copy` as for `serialize.deserialize`, `deadline` as for `read`.

        Raises:
            Exception: the error that the reference holds.
        """
        kind, is_error, data = self.read(ref, False, deadline)
        if kind < scalar.CORE_KINDS_END:
            value = data
        else:
            value = deserialize(kind, data, handles.contained(self.client, ref), copy)
        if is_error:
            try:
                raise value
            finally:
                # The error refers to this frame by its traceback. Together they would be a cycle that only the garbage
                # collector frees, and so would every reference in the calling frames.
                del value
        return value

    def _restore(self, ref: ObjectRef, deadline: float | None = None) -> None:
        """Ask the daemon to bring back the bytes of a value, and wait for them, and for room if the store is full.

        Bytes on another node may take long: a large value has a long way, a lost one is made again first. The request
        is repeated meanwhile, because the process that serves it may be killed.

        Raises:
            ObjectStoreFullError: the store stays full.
            GetTimeoutError: the deadline passed.
        """
        wanted = handles.describe(self.client, ref)["bytes"]
        waiting = room.RoomWait(self, wanted, self.serves)
        why = ""
        patience_s, asked_at = _RESTORE_LOOK_S, time.monotonic()
        while True:
            seen = spill.rounds(self.client)
            if self.tell is not None:
                self.tell(Restore(ref.index, ref.objref))
            left_s = patience_s if deadline is None else min(patience_s, deadline - time.monotonic())
            if spill.wait_restored(self.client, ref, left_s) or self.files.can_map(ref):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise GetTimeoutError(f"the value of {ref} is on another node, and has not arrived in time; wait again")
            patience_s = min(1.0, 2 * patience_s)
            if self.check_wait is not None:
                self.check_wait()
            if spill.rounds(self.client) != seen:
                asked_at, patience_s = time.monotonic(), _RESTORE_LOOK_S
                if spill.last_round(self.client)[0]:
                    waiting.stir()
                elif not self.files.falls_back or waiting.waited_s > self.patience_s:
                    why = waiting.look()  # else the uplink may be about to use a file
            elif time.monotonic() - asked_at > room.SPILL_PATIENCE_S and not remote.is_missing(self.client, ref):
                why = f"the node daemon has not restored it in {room.SPILL_PATIENCE_S:.0f} s"
            if why:
                error = ObjectStoreFullError("a spilled value cannot be restored")
                raise room.explain(error, room.story(self, wanted), why, waiting.may_pass)

    def asks(self, message: Message) -> bool:
        """Send a message to the daemon; False if there is none."""
        return self.tell is not None and self.tell(message) is not False

    # ---- wait ----

    def wait_ready(self, refs: list[ObjectRef], timeout: float | None, spin_s: float) -> float | None:
        """Wait until all are ready, or one of them is an error; spin for `spin_s` before sleeping.

        Returns:
            When the timeout is over, by the monotonic clock: later if a debugger had a task meanwhile. None: never.
        Raises:
            GetTimeoutError: the timeout passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if handles.wait_all(self.client, refs, 0.0, spin_s):
            return deadline
        if timeout is None and self.help_with is not None:
            for ref in refs:
                while self.help_with(ref):
                    pass
        lone = self._lone_gets.before(self.client, refs[0]) if len(refs) == 1 else 0.0
        with self.blocked():
            ready = handles.wait_all(self.client, refs, timeout, 0.0)
            if lone:
                self._lone_gets.after(lone)
            if not ready:
                from fastrt.store import debugging  # here: few programs have a timeout that passes

                return debugging.wait_on(self, refs, timeout)
        return deadline

    def wait(
        self, refs: list[ObjectRef], num_returns: int, timeout: float | None
    ) -> tuple[list[ObjectRef], list[ObjectRef]]:
        """Return (ready, not ready) once `num_returns` are ready or the timeout has passed; see `fastrt.wait`."""
        if self.on_block is None:
            return mixed.wait_plain(self, refs, num_returns, timeout, self.spin_s)
        ready, others = handles.wait_some(self.client, refs, num_returns, 0, 0.0)
        if timeout is None and self.help_with is not None:
            for ref in others:
                while len(ready) < num_returns and self.help_with(ref):
                    ready, _ = handles.wait_some(self.client, refs, num_returns, 0, 0.0)
            ready, others = handles.wait_some(self.client, refs, num_returns, 0, 0.0)
        if len(ready) == num_returns or timeout == 0:
            return ready, others
        with self.blocked():
            return mixed.wait_plain(self, refs, num_returns, timeout, 0.0)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Surround a sleep: meanwhile another worker may take this worker's place."""
        on_block = self.on_block
        if on_block is None:
            yield
            return
        try:
            on_block(True)  # inside the try block: an interrupt may come at once
            yield
        finally:
            on_block(False)


def _block(nbytes: int, nrefs: int) -> int:
    """Return how many bytes a value with its references needs in one piece."""
    return nbytes + 16 * nrefs + 8


def _nothing() -> None:
    """Return None: no task runs in a driver."""


# ---- the one store of this process ----

_store: Store | None = None
_start: Callable[[], Store] | None = None  # starts the embedded runtime
_lock = threading.RLock()
_seal_draft: Callable[[Store, Any], ObjectRef | None] | None = None  # set by the first call of `fastrt.empty`


def install(start: Callable[[], Store]) -> None:
    """Set the function that starts a missing store."""
    global _start
    _start = start


def set_store(store: Store | None) -> None:
    """Make `store` this process's store; None when the runtime shuts down."""
    global _store
    _store = store


def install_drafts(seal: Callable[[Store, Any], ObjectRef | None]) -> None:
    """Set a function that seals an array of `fastrt.empty`, for `put`, and returns None for other values."""
    global _seal_draft
    _seal_draft = seal


def current() -> Store | None:
    """Return this process's store, or None; starts nothing."""
    return _store


def require() -> Store:
    """Return a usable store: the current one, a new attachment after a fork, or the embedded default.

    Raises:
        NotInitializedError: there is none, and no function to start one is installed.
        UnsupportedError: this process uses another engine.
    """
    global _store
    store = _store
    if store is not None and not store.client.forked:
        return store
    with _lock:
        if _store is not None and _store.client.forked:
            if _store.rejoin is None:
                raise NotInitializedError("this process was forked from one that used fastrt; call fastrt.init() here")
            _store = _store.rejoin()
        if _store is None:
            other = engines.current()
            if other is not None:
                engines.refuse(other)
            if _start is None:
                raise NotInitializedError("fastrt is not initialised; call fastrt.init()")
            _store = _start()
        return _store


def refuse_stale(refs: object) -> None:
    """Reject a reference if no session runs, instead of starting a new session that cannot know it.

    Raises:
        StaleReferenceError: no session runs, so the one of the reference has ended.
    """
    first = refs[0] if isinstance(refs, (list, tuple)) and refs else refs
    if _store is None and isinstance(first, ObjectRef):
        raise StaleReferenceError(f"{first!r} belongs to a session that has ended; its value went with it")


def _forget_lock_after_fork() -> None:
    global _lock
    _lock = threading.RLock()


def put(value: _T, *, _owner: object = None) -> ObjectRef[_T]:
    """Store a value in shared memory.

    Args:
        value: anything that can be pickled. Arrays, `bytes`-like buffers, frames and tensors are copied once,
            into memory that every process of the node can map. One of `fastrt.empty` is sealed there, and read-only.
        _owner: taken for Ray's sake: a value does not end with the process that made it, nor with another one.
    Returns:
        A reference; the value lives as long as any reference to it or view of it.
    Raises:
        ObjectStoreFullError: the store is full; the message names the processes that use the memory.
        SerializationError: a part of the value cannot be pickled; the message names it.
        TypeError: the value is an ObjectRef (pass it on as it is, or put a list around it).
    Source:
        The semantics of `ray.put`; out-of-band buffers as in PEP 574.
    """
    if isinstance(value, ObjectRef):
        raise TypeError("the value is an ObjectRef already; pass it on as it is, or put it inside a list")
    store = _store
    if store is None:
        other = engines.current()
        if other is not None:
            return other.put(value)
        store = require()
    try:
        return (_seal_draft is not None and _seal_draft(store, value)) or store.put(value)
    except ForkedHandle:
        return require().put(value)


@overload
def get(refs: ObjectRef[_T], *, timeout: float | None = None, copy: bool | None = None) -> _T: ...
@overload
def get(refs: Sequence[ObjectRef[_T]], *, timeout: float | None = None, copy: bool | None = None) -> list[_T]: ...
def get(refs: Any, *, timeout: float | None = None, copy: bool | None = None) -> Any:
    """Wait for a value, or for a list of values.

    Args:
        refs: one ObjectRef or a list or tuple of them. An ObjectRefGenerator is returned as it is.
        timeout: seconds to wait at most; None waits without a limit, 0 only checks.
        copy: None returns a NumPy array that is the whole value, and the memory of Arrow data, as read-only views of
            shared memory, and makes writable arrays and torch tensors inside a value private to this process: small
            ones are copied, of large ones only the pages that are written. True makes an array that is the whole value
            private and writable too. False makes everything a view: a library that ignores NumPy's flag (torch) then
            crashes the process when it writes.
    Returns:
        The value, or a list of values in the order of `refs`. Views stay valid also after the reference is gone.
    Raises:
        GetTimeoutError: the timeout passed.
        TaskError: the task of the value raised; the error is also an instance of the raised type.
        WorkerCrashedError, TaskCancelledError: the task's worker died too often, or the task was cancelled.
        StaleReferenceError: a reference belongs to a session that has ended.
        TypeError: something is not an ObjectRef.
    Source:
        The semantics of `ray.get`.
    """
    check_timeout(timeout)
    if _store is None:
        other = engines.current()
        if other is not None:
            return owned(other.get(refs, timeout)) if copy else other.get(refs, timeout)
        refuse_stale(refs)
    try:
        return require().get(refs, timeout, copy)
    except ForkedHandle:
        return require().get(refs, timeout, copy)
    except FastrtError as exc:
        raise for_users(exc)  # noqa: B904 (the same error, with its own cause)


def wait(
    refs: Sequence[_W], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[_W], list[_W]]:
    """Wait until some of several references are ready.

    Args:
        refs: a list or tuple of ObjectRefs; one that is listed twice counts twice. It may contain generators: a
            generator is ready when its `next` would not have to wait.
        num_returns: how many to wait for, from 1 to len(refs); an empty list returns at once.
        timeout: seconds to wait at most; None waits without a limit, 0 only checks.
        fetch_local: accepted for programs written for Ray, and ignored: a value is fetched when it is read.
    Returns:
        (ready, not_ready): at most `num_returns` ready ones, and all others, both in the order of `refs`.
    Raises:
        ValueError: `num_returns` is out of range.
        TypeError: something is not an ObjectRef.
        StaleReferenceError: a reference belongs to a session that has ended.
    Source:
        The semantics of `ray.wait`.
    """
    check_timeout(timeout)
    if type(refs) is not list:
        if not isinstance(refs, (list, tuple)):
            raise TypeError(f"wait takes a list of ObjectRefs, not {kind_of(refs)}")
        refs = list(refs)
    other = engines.current() if _store is None else None
    if _store is None and other is None:
        refuse_stale(refs)
    if not refs:
        return [], []
    if type(num_returns) is not int or not 1 <= num_returns <= len(refs):
        raise ValueError(f"num_returns is {num_returns!r}; it must be from 1 to the {len(refs)} references given")
    if other is not None:
        return other.wait(refs, num_returns, timeout)
    try:
        return require().wait(refs, num_returns, timeout)  # type: ignore[arg-type, return-value]  # without generators
    except ForkedHandle:
        return require().wait(refs, num_returns, timeout)  # type: ignore[arg-type, return-value]  # without generators
    except TypeError:  # only now, so that lists without generators are not searched for them
        return mixed.wait(require(), refs, num_returns, timeout)


def check_timeout(timeout: float | None) -> None:
    """Check a timeout: a number of seconds from 0 on, or None.

    Raises:
        ValueError: it is neither.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds from 0 on, or None")


def _restore(session: str, objref: int, index: int) -> ObjectRef:
    """Unpickle a reference that was sent outside of the store: its object must still be alive on this node."""
    store = require()
    if store.client.segment.session != session:
        raise StaleReferenceError(
            f"ObjectRef({objref:016x}) was pickled in session {session[:8]}, this is {store.client.segment.session[:8]}"
        )
    ref: ObjectRef = handles.acquire(store.client, objref, index)
    return ref


def _job() -> str:
    store = _store
    return "" if store is None else f"{store.client.segment.session}/{store.client.job:x}"


os.register_at_fork(after_in_child=_forget_lock_after_fork)
serializer.install(_job)
ref_module.install_hooks(restore=_restore, store=require, get=get)
