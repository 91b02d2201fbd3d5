"""Results of generator tasks on other engines: they return references to items, one after the other."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from fastrt.errors import GetTimeoutError
from fastrt.store.ref import ObjectRef

STREAMING, DYNAMIC = "streaming", "dynamic"
_NAP_S = 0.001


class EngineGenerator(ABC):
    """References to the items of a generator, in order; see `fastrt.ObjectRefGenerator`."""

    def __iter__(self) -> Iterator[ObjectRef]:
        return self

    def __next__(self) -> ObjectRef:
        return self.next()

    @abstractmethod
    def next(self, timeout: float | None = None) -> ObjectRef:
        """Wait for the next item; return its reference.

        Raises:
            StopIteration: there are no more.
            GetTimeoutError: the timeout passed.
        """

    @abstractmethod
    def completed(self) -> ObjectRef:
        """Return a reference that is ready when the generator has ended; it holds None, or the error that ended it."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether all items have been read."""

    def __aiter__(self) -> AsyncIterator[ObjectRef]:
        return self

    async def __anext__(self) -> ObjectRef:
        while True:
            try:
                return self.next(timeout=0)
            except GetTimeoutError:
                await asyncio.sleep(_NAP_S)
            except StopIteration:
                raise StopAsyncIteration from None


class LocalGenerator(EngineGenerator):
    """A generator of a session in one process. It runs only while its next item is requested.

    Args:
        step: returns the next item's reference, or None at the end. The reference of an error is the last one.
        end: returns the reference of the end.
    """

    def __init__(self, step: Callable[[], ObjectRef | None], end: Callable[[], ObjectRef]) -> None:
        self._step = step
        self._end = end
        self._ahead: list[ObjectRef] = []
        self._over = False

    def next(self, timeout: float | None = None) -> ObjectRef:
        """Run the generator up to its next `yield`.

        Raises:
            StopIteration: the generator has ended.
        """
        if self._ahead:
            return self._ahead.pop(0)
        found = None if self._over else self._step()
        if found is None:
            self._over = True
            raise StopIteration
        return found

    def completed(self) -> ObjectRef:
        """Run the generator to its end; its items can be read afterwards."""
        while not self._over:
            found = self._step()
            self._over = found is None
            self._ahead += [] if found is None else [found]
        return self._end()

    def is_finished(self) -> bool:
        """Whether the generator has ended, and all items have been read."""
        return self._over and not self._ahead


class RayGenerator(EngineGenerator):
    """Ray's generator with fastrt's references.

    Args:
        inner: Ray's generator.
        wrap: converts a reference of Ray to one of fastrt.
        wait: `ray.wait`.
    """

    def __init__(self, inner: Any, wrap: Callable[[Any], ObjectRef], wait: Callable[..., Any]) -> None:
        self.inner = inner
        self._wrap = wrap
        self._wait = wait

    def next(self, timeout: float | None = None) -> ObjectRef:
        """Wait for the next item.

        Raises:
            GetTimeoutError: the timeout passed.
        """
        if timeout is not None and not self.inner.is_finished() and not self._wait([self.inner], timeout=timeout)[0]:
            raise GetTimeoutError(f"{self!r} had no further item after {timeout} s; wait again, or cancel it")
        return self._wrap(next(self.inner))

    def completed(self) -> ObjectRef:
        """Return Ray's reference of the end."""
        return self._wrap(self.inner.completed())

    def is_finished(self) -> bool:
        """Whether all items have been read."""
        return bool(self.inner.is_finished())
