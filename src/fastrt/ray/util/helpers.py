"""`as_completed` and `map_unordered`: values in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastrt.store.client import get, wait

_CHUNK = 10
_BACKPRESSURE = 100


def as_completed(
    refs: Iterable[Any], *, chunk_size: int = _CHUNK, yield_obj_refs: bool = False, **options: Any
) -> Iterator[Any]:
    """Iterate over the values of references as they become ready.

    Args:
        refs: references.
        chunk_size: how many are waited for at once.
        yield_obj_refs: whether to return references and not values.
        **options: `timeout` and `fetch_local`, as for `wait`.
    Raises:
        ValueError: a size is below 1, or `num_returns` is given.
    Source:
        The semantics of `ray.util.as_completed`.
    """
    _check(chunk_size, options)
    pending = list(refs)
    while pending:
        values, pending = _batch(pending, chunk_size, yield_obj_refs, options)
        yield from values


def map_unordered(
    fn: Any,
    items: Iterable[Any],
    *,
    backpressure_size: int | None = _BACKPRESSURE,
    chunk_size: int = _CHUNK,
    yield_obj_refs: bool = False,
    **options: Any,
) -> Iterator[Any]:
    """Call a remote function with each item, and iterate over the results as they become ready.

    Args:
        fn: the remote function.
        items: its arguments.
        backpressure_size: greatest number of unread results; None: any number.
        chunk_size, yield_obj_refs, **options: as for `as_completed`.
    Raises:
        ValueError: a size is below 1, or `num_returns` is given.
    Source:
        The semantics of `ray.util.map_unordered`.
    """
    if backpressure_size is not None and backpressure_size < 1:
        raise ValueError(f"backpressure_size is {backpressure_size}; it must be positive")
    _check(chunk_size, options)
    pending: list[Any] = []
    for item in items:
        pending.append(fn.remote(item))
        if backpressure_size is not None and len(pending) >= backpressure_size:
            values, pending = _batch(pending, chunk_size, yield_obj_refs, options)
            yield from values
    yield from as_completed(pending, chunk_size=chunk_size, yield_obj_refs=yield_obj_refs, **options)


def _check(chunk_size: int, options: dict[str, Any]) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    if "num_returns" in options:
        raise ValueError("give chunk_size, not num_returns")


def _batch(pending: list[Any], size: int, as_refs: bool, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    ready, rest = wait(pending, num_returns=min(size, len(pending)), **options)
    return (ready if as_refs else get(ready)), rest
