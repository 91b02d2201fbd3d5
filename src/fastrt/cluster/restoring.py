"""Restores spilled values one after the other, without blocking an event loop.

One at a time: when memory is short, each restored value causes another one to be spilled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from fastrt._core.objects import spill
from fastrt.errors import FastrtError, ObjectStoreFullError
from fastrt.store import room
from fastrt.store.client import Store
from fastrt.store.messages import Restore
from fastrt.store.ref import ObjectRef

Then = Callable[[ObjectRef, FastrtError | None], None]


class Restoring:
    """The spilled values that one stream waits for.

    Args:
        store: this process's attachment.
        loop: the event loop on which the callbacks run.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._client = store.client
        self._loop = loop
        self._wanted: deque[tuple[ObjectRef, Then]] = deque()
        self._wait: room.RoomWait | None = None  # of the first one
        self._rounds = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, ref: ObjectRef, then: Then) -> None:
        """Call `then(ref, None)` once the value can be read, or `then(ref, error)` if it cannot be restored."""
        self._wanted.append((ref, then))
        if len(self._wanted) == 1:
            self._look()

    def close(self) -> None:
        """Stop waiting; no callback is called any more."""
        self._wanted.clear()
        if self._timer is not None:
            self._timer.cancel()

    def is_away(self, ref: ObjectRef) -> bool:
        """Return whether a value is neither in memory nor in a file that this process may map; that can change."""
        return spill.is_spilled(self._client, ref) and not self._store.files.can_map(ref)

    def _look(self) -> None:
        while self._wanted:
            ref, then = self._wanted[0]
            error: FastrtError | None = None
            if self.is_away(ref):
                error = self._ask(ref)
                if error is None:
                    assert self._wait is not None
                    self._timer = self._loop.call_later(self._wait.pause_s, self._look)
                    return
            self._wanted.popleft()
            self._wait = None
            then(ref, error)

    def _ask(self, ref: ObjectRef) -> FastrtError | None:
        """Ask the daemon to restore a value; return an error when no room can be made for it."""
        nbytes = spill.size(self._client, ref.index)
        rounds = spill.rounds(self._client)
        if self._wait is None:
            self._wait = room.RoomWait(self._store, nbytes, serves=True)
        elif rounds != self._rounds:
            if spill.last_round(self._client)[0]:
                self._wait.stir()
            else:
                why = self._wait.look()
                if why:
                    full = ObjectStoreFullError("a spilled value cannot be restored")
                    return room.explain(full, room.story(self._store, nbytes), why, True)
        self._rounds = rounds
        if self._store.tell is not None:
            self._store.tell(Restore(ref.index, ref.objref))
        return None
