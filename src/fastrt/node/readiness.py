"""Watches many references on one thread, and tells an event loop which have become ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from fastrt._core import handles
from fastrt._core.clients import Client
from fastrt.errors import FastrtError
from fastrt.store.ref import ObjectRef

# A reference added while the thread sleeps for others may be ready at once: it is looked at this much later at most.
_LOOK_S = 0.002
Then = Callable[[ObjectRef], None]


class Readiness:
    """Calls back, on the loop's thread, for each watched reference once it is ready.

    Args:
        client: the process's attachment.
        loop: where callbacks run; an attribute, too.
    """

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self.loop = loop
        self._added = threading.Condition()
        self._pending: list[tuple[ObjectRef, Then]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fastrt-readiness", daemon=True)
        self._thread.start()

    def watch(self, ref: ObjectRef, then: Then) -> None:
        """Have `then(ref)` called when `ref` is ready; soon, if it is ready now."""
        with self._added:
            self._pending.append((ref, then))
            self._added.notify()

    def close(self) -> None:
        """End the thread; what is not ready by now is never told."""
        with self._added:
            self._closed = True
            self._added.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._added:
                self._added.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    self._pending.clear()
                    return
                pending = list(self._pending)
            try:
                ready = self._ready([ref for ref, _ in pending])
            except FastrtError:
                return  # the session is broken: the process ends by what it meets itself
            if ready:
                done = [item for item in pending if item[0] in ready]
                with self._added:
                    self._pending = [item for item in self._pending if item[0] not in ready]
                self.loop.call_soon_threadsafe(self._tell, done)
                del done
            del pending, ready  # a sleep must not keep what was let go of

    def _ready(self, refs: list[ObjectRef]) -> set[ObjectRef]:
        """Those that are ready, after a short wait for the first."""
        if not handles.wait_some(self._client, refs, 1, _LOOK_S, 0.0)[0]:
            return set()
        return set(handles.wait_some(self._client, refs, len(refs), 0, 0.0)[0])

    def _tell(self, done: list[tuple[ObjectRef, Then]]) -> None:
        for k, (ref, then) in enumerate(done):
            try:
                then(ref)
            except BaseException:  # is shown by the loop; nobody else may miss his word for it
                self.loop.call_soon(self._tell, done[k + 1 :])
                raise
