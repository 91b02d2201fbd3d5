"""ObjectRef: a reference to a value that is, or will be, in the object store."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

from fastrt._core import handles
from fastrt.errors import FastrtError

# What an ObjectRef cannot do by itself; store.client sets these when it is imported.
_hooks: dict[str, Callable[..., Any]] = {}


class ObjectRef(handles.Ref):
    """A reference to an object. The object lives at least as long as the reference.

    References hash and compare by the object they name. They can be passed to tasks (as an argument: the task
    gets the value; inside a container: it gets the reference), awaited, and turned into futures.
    """

    __slots__ = ()

    def hex(self) -> str:
        """Return the 64-bit object reference as 16 hex digits: node in the first four, counter in the rest."""
        return f"{self.objref:016x}"

    def __repr__(self) -> str:
        return f"ObjectRef({self.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The store's own pickler never comes here: it records references as contained. Through any other
        # pickle only the name travels, so the receiver must be of the same session and the object still alive.
        return _hooks["restore"], (self.owner.segment.session, self.objref, self.index)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the value without blocking the event loop; raise what `fastrt.get` would raise."""
        import asyncio

        return asyncio.wrap_future(self.future()).__await__()

    def future(self) -> concurrent.futures.Future[Any]:
        """Return a `concurrent.futures.Future` that gets the value, or the error that `fastrt.get` would raise.

        One background thread waits for all pending futures of the process. A future cannot cancel its task.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        _waiter.add(self, future)
        return future


class _FutureWaiter:
    """The one thread that waits for references on behalf of futures; it ends when there is nothing to wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[tuple[ObjectRef, concurrent.futures.Future[Any]]] = []
        self._running = False

    def add(self, ref: ObjectRef, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._pending.append((ref, future))
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="fastrt-futures", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                pending = list(self._pending)
                if not pending:
                    self._running = False
                    return
            try:
                # Short waits: a reference added meanwhile must not wait for the others.
                _hooks["wait_some"]([ref for ref, _ in pending], 0.002 if len(pending) == 1 else 0.01)
                done = [(ref, future) for ref, future in pending if _hooks["is_ready"](ref)]
            except FastrtError:
                done = pending  # the runtime is gone: let each get its own error
            for ref, future in done:
                _settle(ref, future)
            finished = {id(future) for _, future in done}
            with self._lock:
                self._pending = [item for item in self._pending if id(item[1]) not in finished]


def _settle(ref: ObjectRef, future: concurrent.futures.Future[Any]) -> None:
    try:
        value = _hooks["get"](ref)
    except BaseException as exc:  # whatever the task raised belongs to the future
        future.set_exception(exc)
    else:
        future.set_result(value)


_waiter = _FutureWaiter()


def _forget_after_fork() -> None:
    global _waiter
    _waiter = _FutureWaiter()  # the parent's thread does not exist here, and its lock may be held


def install_hooks(**hooks: Callable[..., Any]) -> None:
    """Give references the functions of the module above that they need: restore, wait_some, is_ready, get."""
    _hooks.update(hooks)


os.register_at_fork(after_in_child=_forget_after_fork)
handles.set_ref_class(ObjectRef)
