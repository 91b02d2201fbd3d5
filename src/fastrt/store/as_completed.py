"""`as_completed`: iterate over references in the order in which they become ready."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar, overload

from fastrt.errors import GetTimeoutError
from fastrt.store.client import wait
from fastrt.store.ref import ObjectRef, Waitable, kind_of

_T = TypeVar("_T")
_W = TypeVar("_W", bound="ObjectRef | Waitable")


@overload
def as_completed(refs: Iterable[ObjectRef[_T]], timeout: float | None = None) -> Iterator[ObjectRef[_T]]: ...
@overload
def as_completed(refs: Iterable[_W], timeout: float | None = None) -> Iterator[_W]: ...
def as_completed(refs: Iterable[_W], timeout: float | None = None) -> Iterator[_W]:
    """Iterate over references in the order in which they become ready.

    This is cheaper than one call of `wait` for each reference, which returns a list of all others every time: each poll
    here takes all references that are ready, so the faster results come, the fewer polls are needed.

    Args:
        refs: references, copied when this is called; one that is listed twice is returned twice. Generators among
            them are returned once, when their `next` would not have to wait. The iterator keeps neither the list nor
            references that it has returned.
        timeout: seconds for all of them together, from the first `next` on; None waits without a limit.
    Returns:
        An iterator. A reference that holds an error is ready like others; `fastrt.get` raises it.
    Raises:
        TypeError: something is not an ObjectRef.
        GetTimeoutError: from the iterator, when the timeout has passed while some are not ready.
        StaleReferenceError: from the iterator, when a reference belongs to a session that has ended.
    Source:
        `concurrent.futures.as_completed`.
    """
    pending = list(refs)
    for ref in pending:
        if not isinstance(ref, (ObjectRef, Waitable)):
            raise TypeError(f"as_completed takes ObjectRefs; this has a {kind_of(ref)}")
    return _completed(pending, timeout)


def _completed(pending: list[_W], timeout: float | None) -> Iterator[_W]:
    deadline = None if timeout is None else time.monotonic() + timeout
    total = len(pending)
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        first, pending = wait(pending, num_returns=1, timeout=left)
        if not first:
            raise GetTimeoutError(
                f"{len(pending)} of {total} objects were not ready after {timeout} s, the first is {pending[0]}; "
                "wait again, or cancel their tasks"
            )
        ready = deque(first)
        del first
        if pending:
            more, pending = wait(pending, num_returns=len(pending), timeout=0)
            ready.extend(more)
            del more
        while ready:
            yield ready.popleft()
