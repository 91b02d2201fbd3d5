"""Calls of this process that have not ended, for actors with `max_pending_calls`.

The count holds no reference: a call is known by its record's index and id, and the core says whether it has ended. As
on Ray each process counts for itself. Threads that call at the same moment may exceed the limit by one each.
"""

from __future__ import annotations

import weakref
from collections import deque

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import submission
from fastrt.errors import PendingCallsError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef

_FRONT = 2  # calls that each new one looks at: more than it adds, so ended ones do not pile up
_ACTORS = 64


class PendingCalls:
    """The calls of one actor, oldest first. It does not hold the session's client, which a session's end must close.

    Each operation on the deque is atomic, so there is no lock that a forked child could inherit.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[int, int]] = deque()

    def count(self, client: Client) -> int:
        """Return how many calls have not ended."""
        for _ in range(len(self._calls)):
            call = self._take()
            if call is not None and not submission.has_ended(client, *call):
                self._calls.append(call)
        return len(self._calls)

    def make_room(self, client: Client, limit: int, name: str) -> None:
        """Check that another call may be made.

        Args:
            client: this process's attachment.
            limit: calls that may be pending.
            name: of the actor's class and method, for the message.
        Raises:
            PendingCallsError: that many have not ended.
        """
        for _ in range(_FRONT):
            call = self._take()
            if call is not None and not submission.has_ended(client, *call):
                self._calls.appendleft(call)
                break
        if len(self._calls) >= limit and self.count(client) >= limit:
            raise PendingCallsError(
                f"{name}.remote: {limit} calls of this actor by this process have not ended, and its max_pending_calls "
                f"is {limit}; wait for results of earlier calls, or raise the option"
            )

    def add(self, client: Client, result: ObjectRef) -> None:
        """Count the call that will make `result`."""
        call = submission.record_of(client, result)
        if call is not None:
            self._calls.append(call)

    def _take(self) -> tuple[int, int] | None:
        try:
            return self._calls.popleft()
        except IndexError:
            return None


class _Actors:
    """The pending calls of one session's actors, by the actor's object."""

    def __init__(self) -> None:
        self._found: dict[int, PendingCalls] = {}
        self._swept_at = _ACTORS

    def of(self, client: Client, ref: ObjectRef) -> PendingCalls:
        found = self._found.get(ref.objref)
        if found is None:
            if len(self._found) >= self._swept_at:
                self._found = {key: calls for key, calls in self._found.items() if calls.count(client)}
                self._swept_at = max(_ACTORS, 2 * len(self._found))
            found = self._found.setdefault(ref.objref, PendingCalls())
        return found


_sessions: weakref.WeakKeyDictionary[Store, _Actors] = weakref.WeakKeyDictionary()


def pending_calls(store: Store, ref: ObjectRef) -> PendingCalls:
    """Return the pending calls of the actor with that object; all handles in this process share them."""
    actors = _sessions.get(store)
    if actors is None:
        actors = _sessions.setdefault(store, _Actors())
    return actors.of(store.client, ref)
