"""`wait` for a list of references and generators. A generator is ready when its next item or its end is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastrt._core.objects import handles
from fastrt._core.tasks import generators
from fastrt.store.ref import ObjectRef, Waitable, kind_of

if TYPE_CHECKING:
    from fastrt.store.client import Store


def wait(store: Store, things: list[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
    """Return (ready, not ready) as `Store.wait` does.

    Raises:
        TypeError: something is neither a reference nor a generator of this engine.
    """
    plain = [_plain(one) for one in things]
    ready = generators.wait_some(store.client, plain, num_returns, 0, 0.0)
    if len(ready) < num_returns and timeout != 0:
        with store.blocked():
            ready = generators.wait_some(store.client, plain, num_returns, timeout, store.spin_s)
            if timeout and len(ready) < num_returns:
                from fastrt.store import debugging  # here: few programs have a timeout that passes

                ready = debugging.wait_some(
                    store, timeout, ready, lambda some: len(some) == num_returns,
                    lambda left_s: generators.wait_some(store.client, plain, num_returns, left_s, 0.0),
                )  # fmt: skip
    chosen = set(ready)
    return [things[k] for k in ready], [one for k, one in enumerate(things) if k not in chosen]


def wait_plain(
    store: Store, refs: list[ObjectRef], num_returns: int, timeout: float | None, spin_s: float
) -> tuple[list[ObjectRef], list[ObjectRef]]:  # fmt: skip
    """Wait for references alone: (ready, not ready), as `handles.wait_some`; a debugger stops the timeout."""
    found = handles.wait_some(store.client, refs, num_returns, timeout, spin_s)
    if not timeout or len(found[0]) == num_returns:
        return found
    from fastrt.store import debugging

    return debugging.wait_some(
        store, timeout, found, lambda some: len(some[0]) == num_returns,
        lambda left_s: handles.wait_some(store.client, refs, num_returns, left_s, 0.0),
    )  # fmt: skip


def _plain(one: Any) -> Any:
    if isinstance(one, ObjectRef):
        return one
    if isinstance(one, Waitable):
        return one.waited_for()
    raise TypeError(f"wait takes a list of ObjectRefs and generators; this one has a {kind_of(one)}")
