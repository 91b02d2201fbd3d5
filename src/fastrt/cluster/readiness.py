"""Watches many references on one thread, and calls an event loop back for those that have become ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.objects.pending import Watch
from fastrt.errors import FastrtError
from fastrt.store.ref import ObjectRef

_WAIT_S = 3600.0  # it is woken by what it waits for
Then = Callable[[ObjectRef], None]


class Readiness:
    """Calls back, on the loop's thread, for each watched reference once it is ready.

    Args:
        client: the process's attachment.
        loop: where callbacks run; an attribute, too.
    """

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._watch = Watch(client)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fastrt-readiness", daemon=True)
        self._thread.start()

    def watch(self, ref: ObjectRef, then: Then) -> None:
        """Have `then(ref)` called when `ref` is ready; soon, if it is ready now.

        Raises:
            StaleReferenceError: `ref` belongs to a session that has ended.
        """
        self._watch.add(ref, then)

    def close(self) -> None:
        """End the thread; what is not ready by now is never called back for."""
        self._closed = True
        self._watch.poke()
        self._thread.join()
        self._watch.take_all()

    def _run(self) -> None:
        while not self._closed:
            try:
                done = self._watch.wait(_WAIT_S)
            except FastrtError:
                return  # the session is broken: the process ends by what it meets itself
            if done and not self._closed:
                self.loop.call_soon_threadsafe(self._tell, done)
            del done  # a sleep must not keep what was let go of

    def _tell(self, done: list[tuple[ObjectRef, Then]]) -> None:
        for k, (ref, then) in enumerate(done):
            try:
                then(ref)
            except BaseException:  # is shown by the loop; nobody else may miss his word for it
                self.loop.call_soon(self._tell, done[k + 1 :])
                raise
