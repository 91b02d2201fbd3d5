"""Being told when a reference is ready: one thread of this process waits for all that anybody wants to hear of.

It sleeps until one of them is ready, uses no processor meanwhile, and ends when there has been nothing to wait for
in a while. What it calls runs in it, one after the other, and must not block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from fastrt._core.objects.pending import Watch
from fastrt.errors import FastrtError, NotInitializedError
from fastrt.store import client as store_client
from fastrt.store import ref as ref_module
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

# What is told: the reference, and the error of a session that ended before it was ready.
Told = Callable[[ObjectRef, BaseException | None], None]
_LINGER_S = 2.0  # who submits one task after the other should not pay 60 us for a new thread each time
_WAIT_S = 3600.0


class Watcher:
    """The thread and what it waits for, in one session.

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
        store.users.add(self)

    def add(self, ref: ObjectRef, told: Told) -> None:
        """Have `told(ref, None)` called when `ref` is ready; with an error when the session ends before.

        Raises:
            StaleReferenceError: `ref` belongs to a session that has ended.
            NotInitializedError: this session has.
        """
        self._watch.add(ref, told)
        if not self._running and self._begin():
            threading.Thread(target=self._run, name="fastrt-watch", daemon=True).start()

    def forget(self) -> None:
        """The session ends: tell everybody who still waits."""
        self._ended = True
        self._watch.poke()

    def _run(self) -> None:
        try:
            while self._goes_on():
                with self._store.blocked():  # inside a task: it may be what the task waits for
                    found = self._watch.wait(_WAIT_S if len(self._watch) else _LINGER_S)
                self._idle = not found
                found.reverse()
                while found:  # what was told is not kept while this sleeps
                    told_ref, told = found.pop()
                    told(told_ref, None)
                    del told_ref, told
        except FastrtError as exc:
            with self._lock:
                self._running, self._ended = False, True
            for ref, told in self._watch.take_all():
                told(ref, exc)

    def _begin(self) -> bool:
        """Whether there is no thread, and the caller is to start it."""
        with self._lock:
            before, self._running = self._running, True
            return not before

    def _goes_on(self) -> bool:
        if self._ended:
            raise NotInitializedError("the session ended before the value was ready; call fastrt.init() again")
        if not self._idle:
            return True
        with self._lock:
            self._running = False  # before the look: who adds does it the other way round
            self._running = len(self._watch) > 0
            return self._running


def when_ready(store: Store, ref: ObjectRef, told: Told) -> None:
    """Have `told(ref, None)` called in a thread of its own when `ref` is ready; see `Watcher.add`.

    Raises:
        StaleReferenceError: `ref` belongs to a session that has ended.
        NotInitializedError: the session of `store` has.
    """
    watcher = store.watcher
    if watcher is None:
        with _lock:
            watcher = store.watcher
            if watcher is None:
                watcher = store.watcher = Watcher(store)
    watcher.add(ref, told)


def install() -> None:
    """Let references make futures."""
    ref_module.install_hooks(when_ready=_when_ready)


def _when_ready(ref: ObjectRef, told: Told) -> None:
    store_client.refuse_stale(ref)
    when_ready(store_client.require(), ref, told)


def _forget_lock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
os.register_at_fork(after_in_child=_forget_lock_after_fork)
