"""`fastrt.util.ActorPool`: distributes work to the free actors of a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastrt._core.tasks import actors
from fastrt.errors import ActorDiedError, GetTimeoutError
from fastrt.store import client as store_client
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor_handle import ActorHandle

# Called with an actor and a value: it submits one call and returns its reference, or a list of references.
Submit = Callable[[Any, Any], Any]


class ActorPool:
    """A pool of actors, each of which runs one call at a time.

    An actor that has died gets no more work.

    Args:
        actors: handles of the actors.
    Raises:
        TypeError: something is not a handle.
    Source:
        The semantics of `ray.util.ActorPool`.
    """

    def __init__(self, actors: Iterable[ActorHandle]) -> None:
        self._idle: deque[ActorHandle] = deque()
        self._running: dict[Any, tuple[int, ActorHandle]] = {}  # by what the call returned
        self._by_index: dict[int, Any] = {}  # in order
        self._submitted = 0
        self._waiting: deque[tuple[Submit, Any]] = deque()
        for actor in actors:
            self.push(actor)

    def map(self, fn: Submit, values: Iterable[Any]) -> Iterator[Any]:
        """Submit all values; return an iterator of the results in their order.

        Results of earlier calls of `submit` are lost.

        Args:
            fn: like `lambda actor, value: actor.method.remote(value)`.
            values: read to the end at once.
        """
        self._drop_results()
        for value in values:
            self.submit(fn, value)
        return self._results(self.get_next)

    def map_unordered(self, fn: Submit, values: Iterable[Any]) -> Iterator[Any]:
        """Submit all values, like `map`; the results come in the order in which they become ready."""
        self._drop_results()
        for value in values:
            self.submit(fn, value)
        return self._results(self.get_next_unordered)

    def submit(self, fn: Submit, value: Any) -> None:
        """Submit a value to a free actor, or to the next one that becomes free.

        Args:
            fn: like `lambda actor, value: actor.method.remote(value)`.
            value: the second argument of `fn`.
        Raises:
            ActorDiedError: no actor is left.
        """
        if not self._idle:
            if not self._running:
                raise ActorDiedError("no actor of the pool is left; push another one")
            self._waiting.append((fn, value))
            return
        actor = self._idle.popleft()
        try:
            made = fn(actor, value)
        except BaseException:
            self._idle.appendleft(actor)
            raise
        key = tuple(made) if isinstance(made, list) else made
        self._running[key] = (self._submitted, actor)
        self._by_index[self._submitted] = key
        self._submitted += 1

    def has_next(self) -> bool:
        """Whether there are results that have not been returned yet."""
        return bool(self._running)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the next result in the order of submission, or raise the exception of its call.

        Args:
            timeout: seconds to wait at most; None waits without a limit.
            ignore_if_timedout: after the timeout, return None and skip that result; its actor counts as free at once,
                though it may still be running the call.
        Raises:
            StopIteration: there are no more results.
            GetTimeoutError: the timeout passed; it is also a TimeoutError.
        """
        if not self.has_next():
            raise StopIteration("there are no more results")
        key = next(iter(self._by_index.values()))
        if not _wait_for([key], timeout):
            if not ignore_if_timedout:
                raise GetTimeoutError(f"the next result was not ready after {timeout} s; wait again")
            self._take(key)
            return None
        return self._value(key)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return any result that is ready, or raise the exception of its call.

        Args:
            timeout: seconds to wait at most; None waits without a limit.
            ignore_if_timedout: after the timeout, return None.
        Raises:
            StopIteration: there are no more results.
            GetTimeoutError: the timeout passed; it is also a TimeoutError.
        """
        if not self.has_next():
            raise StopIteration("there are no more results")
        ready = _wait_for(list(self._running), timeout)
        if not ready:
            if ignore_if_timedout:
                return None
            raise GetTimeoutError(f"no result was ready after {timeout} s; wait again")
        return self._value(ready[0])

    def has_free(self) -> bool:
        """Whether an actor is free and no value waits for one."""
        return bool(self._idle) and not self._waiting

    def pop_idle(self) -> ActorHandle | None:
        """Take a free actor out of the pool; None if there is none."""
        return self._idle.popleft() if self.has_free() else None

    def push(self, actor: ActorHandle) -> None:
        """Add an actor to the pool.

        Raises:
            TypeError: it is not a handle.
            ValueError: it is already in the pool.
        """
        if not isinstance(actor, ActorHandle):
            raise TypeError(f"an ActorPool holds handles of actors, not {type(actor).__name__}")
        if actor in self._idle or any(actor == busy for _, busy in self._running.values()):
            raise ValueError(f"{actor!r} is in the pool already")
        self._free(actor)

    def _drop_results(self) -> None:
        while self._running:
            for key in _wait_for(list(self._running), None):
                self._take(key)

    def _results(self, following: Callable[[], Any]) -> Iterator[Any]:
        while self.has_next():
            yield following()

    def _value(self, key: Any) -> Any:
        actor = self._running[key][1]
        try:
            value = store_client.get(list(key) if isinstance(key, tuple) else key)
        except ActorDiedError:
            self._take(key, free=not _is_dead(actor))
            raise
        except BaseException:
            self._take(key)
            raise
        self._take(key)
        return value

    def _take(self, key: Any, free: bool = True) -> None:
        """Remove a call whose result is returned; its actor gets the next value."""
        index, actor = self._running.pop(key)
        del self._by_index[index]
        if free:
            self._free(actor)
        elif self._waiting and not self._running and not self._idle:
            left, self._waiting = len(self._waiting), deque()
            raise ActorDiedError(f"the last actor of the pool is dead; {left} values were not handed out")

    def _free(self, actor: ActorHandle) -> None:
        self._idle.append(actor)
        if self._waiting:
            self.submit(*self._waiting.popleft())


def _wait_for(keys: list[Any], timeout: float | None) -> list[Any]:
    """Wait for at least one call whose results are all ready; return these calls, or [] after the timeout."""
    firsts: dict[ObjectRef, Any] = {}
    for key in keys:
        # A call seals its results in order: when the last one is ready, all are.
        firsts[key[-1] if isinstance(key, tuple) else key] = key
    ready, _ = store_client.wait(list(firsts), num_returns=1, timeout=timeout)
    return [firsts[ref] for ref in ready]


def _is_dead(actor: ActorHandle) -> bool:
    client = store_client.require().client
    return bool(actors.info(client, actors.index_of(client, actor._actor_ref))["state"] == actors.DEAD)
