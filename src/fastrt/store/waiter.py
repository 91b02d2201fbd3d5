"""A background thread that waits in the arena for many references and other news, so that the program need not.

`Waiter` calls back in its thread when references become ready: futures, batches and asyncio use it. `LoopWaiter` serves
an event loop, which nothing in the arena can wake: callbacks run on the loop, and other sources of work (mailboxes, the
items of generators, the task queue) share the thread. The thread sleeps until one of them has news, and ends after
a few idle seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from fastrt._core.objects.pending import Watch
from fastrt.errors import FastrtError, NotInitializedError
from fastrt.store import client as store_client
from fastrt.store import ref as ref_module
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:  # asyncio takes 40 ms to import, and only uplinks use it here
    import asyncio

# Called with the reference, and with the error of a session that ended before the reference was ready.
Then = Callable[[ObjectRef, BaseException | None], None]
LoopThen = Callable[[ObjectRef], None]
_LINGER_S = 2.0  # a program that submits one task after the other should not pay 60 us for a new thread each time
NEVER_S = 3600.0  # until a wake
_AGAIN_S = 0.01


class Source(Protocol):
    """Work for an event loop that comes from the arena. Both methods run on the loop's thread."""

    def look(self) -> None:
        """Do what there is to do."""

    def arm(self) -> float:
        """Make the next news of this source wake this client.

        Returns:
            Seconds after which to look without news; 0 when there is news already.
        """


class Waiter:
    """The thread and the references that it watches, in one session.

    Callbacks run in the thread, one by one, and must not block.

    Args:
        store: this process's attachment.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watch = Watch(store.client)
        self._lock = threading.Lock()
        self._running = False
        self._ended = False
        self._idle = False  # nothing came for a while
        self._thread: threading.Thread | None = None
        store.users.add(self)

    def add(self, ref: ObjectRef, then: Any) -> None:
        """Call `then(ref, None)` when `ref` is ready, or with an error if the session ends first.

        Raises:
            StaleReferenceError: `ref` belongs to a session that has ended.
            NotInitializedError: the session of this waiter has ended.
        """
        self._watch.add(ref, then)
        if not self._running:
            self._start()

    def remove(self, then: Any) -> None:
        """Drop the references that were added with this callback; it may still be called for those that are ready."""
        self._watch.remove(then)

    def forget(self) -> None:
        """End the thread with the session; every callback still due gets an error."""
        self._ended = True
        self._watch.poke()

    def _start(self) -> None:
        with self._lock:
            if self._running:
                return
            self._running = True
        self._thread = threading.Thread(target=self._run, name="fastrt-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._goes_on():
                with self._store.blocked():  # inside a task: it may be what the task waits for
                    found = self._sleep()
                self._idle = not found
                self._pass_on(found)
                del found  # a sleep must not keep references that were let go
        except FastrtError as exc:
            with self._lock:
                self._running, self._ended = False, True
            self._fail(exc)

    def _goes_on(self) -> bool:
        if self._ended:
            raise NotInitializedError("the session ended before the value was ready; call fastrt.init() again")
        if not self._idle:
            return True
        with self._lock:
            self._running = False  # before the look: a thread that adds something does it the other way round
            self._running = self._is_needed()
            return self._running

    def _is_needed(self) -> bool:
        return len(self._watch) > 0

    def _sleep(self) -> list[tuple[Any, Any]]:
        return self._watch.wait(NEVER_S if self._is_needed() else _LINGER_S)

    def _pass_on(self, found: list[tuple[Any, Any]]) -> None:
        found.reverse()
        while found:  # a callback that has run is not kept
            ref, then = found.pop()
            then(ref, None)
            del ref, then

    def _fail(self, error: FastrtError) -> None:
        for ref, then in self._watch.take_all():
            then(ref, error)


class LoopWaiter(Waiter):
    """A waiter on behalf of an event loop: sources, and callbacks as `then(ref)`, run on the loop's thread.

    The thread sleeps only between two rounds of the loop's work. So a busy loop is not disturbed by wakes, and
    clients of the arena that have news for it need no system call for them.

    Args:
        store: this process's attachment.
        loop: runs callbacks and sources; also an attribute.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(store)
        self.loop = loop
        self._sources: dict[Source, None] = {}  # in the order in which they were opened
        self._turn = threading.Lock()  # held while the loop works; the thread takes it back before it sleeps
        self._turn.acquire()
        self._patience_s = NEVER_S
        self._seen: int | None = None  # the wake word before the sources were armed

    def open(self, source: Source) -> None:
        """Add a source. Call this and `drop` on the loop's thread."""
        self._sources[source] = None
        self.stir()

    def drop(self, source: Source) -> None:
        """Remove a source."""
        self._sources.pop(source, None)

    def stir(self) -> None:
        """Look at all sources soon: one of them can do more than before."""
        self._patience_s = 0.0
        self._watch.poke()
        if not self._running:
            self._start()

    def close(self) -> None:
        """End the thread; no more callbacks run."""
        self._sources.clear()
        self.forget()
        self._give_turn()
        if self._thread is not None:
            self._thread.join()
        self._watch.take_all()

    def _is_needed(self) -> bool:
        return bool(self._sources) or len(self._watch) > 0

    def _sleep(self) -> list[tuple[Any, Any]]:
        if not self._sources:
            return super()._sleep()
        return self._watch.wait(self._patience_s, self._seen)

    def _pass_on(self, found: list[tuple[Any, Any]]) -> None:
        if (not found and not self._sources) or self._ended:
            return
        try:
            found.reverse()
            self.loop.call_soon_threadsafe(self._serve, found)
        except RuntimeError as exc:  # the loop has closed
            raise NotInitializedError("the event loop has ended") from exc
        self._turn.acquire()

    def _fail(self, error: FastrtError) -> None:
        pass  # the session is broken: the process ends by the next thing that it does

    def _serve(self, found: list[tuple[ObjectRef, LoopThen]]) -> None:
        """Run callbacks, look at the sources, and let the thread sleep again."""
        try:
            while found and not self._ended:
                ref, then = found.pop()
                then(ref)
                del ref, then
            self._look()
        finally:
            if found and not self._ended:  # the loop reports the exception of one callback; the others run all the same
                self.loop.call_soon(self._serve, found)
            else:
                self._rest()

    def _look(self) -> None:
        failed: FastrtError | None = None
        for source in list(self._sources):
            if source in self._sources:  # an earlier source may have ended it
                try:
                    source.look()
                except FastrtError as exc:
                    failed = failed or exc
        if failed is not None:
            raise failed

    def _rest(self) -> None:
        if not self._ended:
            self._seen = self._watch.word()
            self._patience_s = min((self._arm(source) for source in self._sources), default=NEVER_S)
        self._give_turn()

    def _give_turn(self) -> None:
        if self._turn.locked():
            self._turn.release()

    def _arm(self, source: Source) -> float:
        try:
            return source.arm()
        except FastrtError:  # what it waits for has ended: its next look finds that
            return _AGAIN_S


def when_ready(store: Store, ref: ObjectRef, then: Then) -> None:
    """Have `then(ref, None)` called in the process's waiter when `ref` is ready; see `Waiter.add`.

    Raises:
        StaleReferenceError: `ref` belongs to a session that has ended.
        NotInitializedError: the session of `store` has.
    """
    waiter = store.waiter
    if waiter is None:
        with _lock:
            waiter = store.waiter
            if waiter is None:
                waiter = store.waiter = Waiter(store)
    waiter.add(ref, then)


def install() -> None:
    """Let references make futures."""
    ref_module.install_hooks(when_ready=_when_ready)


def _when_ready(ref: ObjectRef, then: Then) -> None:
    store_client.refuse_stale(ref)
    when_ready(store_client.require(), ref, then)


def _forget_lock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
os.register_at_fork(after_in_child=_forget_lock_after_fork)
