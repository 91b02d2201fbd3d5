"""Limits the bytes of arguments that are fetched for tasks of other nodes before these tasks have run.

A node may receive many tasks at once, so that its workers need not wait for the next one. Their arguments are fetched
ahead only within this budget: arguments fetched too early would push those of running tasks out of memory. One task at
a time, the head, gets all of its arguments of any size, because it could never run otherwise. Another task
becomes the head once the head has ended. This also happens when the head has all its arguments and has not ended for
`STALL_S`: it may be waiting for another task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from fastrt._core.memory import arena
from fastrt._core.memory.clients import Client

_SHARE = 0.5  # of the store
STALL_S = 0.5  # a head that has its arguments and runs for longer gives its place to another task


class ArgumentBudget:
    """The budget of one node, for the streams to all other nodes.

    Args:
        client: this process's attachment.
    """

    def __init__(self, client: Client) -> None:
        self._bytes_max = int(arena.room(client)[2] * _SHARE)
        self._streams: dict[object, _Stream] = {}
        self._nbytes = 0

    def join(self, stream: object, freed: Callable[[], None]) -> None:
        """Add a stream to another node; `freed` is called when part of the budget is released."""
        self._streams[stream] = _Stream(freed)

    def leave(self, stream: object) -> None:
        """Remove a stream that has ended; release its part of the budget."""
        gone = self._streams.pop(stream, None)
        if gone is not None:
            self._free(sum(gone.fetched.values()))

    def expect(self, stream: object, task: int, objrefs: Collection[int]) -> None:
        """Record a received task and the objects of the peer that it names as arguments."""
        if objrefs:
            its = self._streams[stream]
            its.tasks[task] = objrefs
            its.naming.update(objrefs)

    def names(self, stream: object, objref: int) -> bool:
        """Return whether an object is an argument of a task that has not ended."""
        return self._streams[stream].naming[objref] > 0

    def ended(self, stream: object, task: int) -> None:
        """Release the bytes of arguments that only this task, which has ended, needed."""
        its = self._streams.get(stream)
        objrefs = its.tasks.pop(task, ()) if its is not None else ()
        if its is None or not objrefs:
            return
        its.naming.subtract(objrefs)
        freed = 0
        for objref in set(objrefs):
            if its.naming[objref] <= 0:
                del its.naming[objref]
                freed += its.fetched.pop(objref, 0)
        self._free(freed)

    def first(self, stream: object, offered: Collection[int]) -> Collection[int]:
        """Return the head's arguments if some are among the `offered` objects; may choose a new head.

        The result is empty while the head has all its arguments and has not stalled.
        """
        its = self._streams[stream]
        objrefs = its.tasks.get(its.head)
        if objrefs is not None:
            if any(objref in offered for objref in objrefs):
                return objrefs
            if time.monotonic() - its.head_since < STALL_S:
                return ()
        for task, objrefs in its.tasks.items():
            if any(objref in offered for objref in objrefs):
                its.head, its.head_since = task, time.monotonic()
                return objrefs
        return ()

    def admits(self, stream: object, objref: int, nbytes: int) -> bool:
        """Return whether an object may be fetched now: it fits into the budget, or it is no argument."""
        return self._nbytes + nbytes <= self._bytes_max or objref not in self._streams[stream].naming

    def fetch(self, stream: object, objref: int, nbytes: int) -> None:
        """Count an object whose fetch begins, if it is an argument."""
        its = self._streams[stream]
        if objref in its.naming and objref not in its.fetched:
            its.fetched[objref] = nbytes
            self._nbytes += nbytes

    def _free(self, nbytes: int) -> None:
        if nbytes:
            self._nbytes -= nbytes
            for stream in list(self._streams.values()):
                stream.freed()


class _Stream:
    """The tasks of one stream in order of arrival, and the objects fetched for them."""

    def __init__(self, freed: Callable[[], None]) -> None:
        self.freed = freed
        self.tasks: dict[int, Collection[int]] = {}
        self.naming: Counter[int] = Counter()
        self.fetched: dict[int, int] = {}
        self.head, self.head_since = 0, 0.0  # tasks count from 1
