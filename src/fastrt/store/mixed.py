"""`wait` for a list of references and generators. A generator is ready when its next item or its end is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    chosen = set(ready)
    return [things[k] for k in ready], [one for k, one in enumerate(things) if k not in chosen]


def _plain(one: Any) -> Any:
    if isinstance(one, ObjectRef):
        return one
    if isinstance(one, Waitable):
        return one.waited_for()
    raise TypeError(f"wait takes a list of ObjectRefs and generators; this one has a {kind_of(one)}")
