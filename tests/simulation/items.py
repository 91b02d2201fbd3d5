"""The invariants of generators: each item goes to one reader, in order, and the only reader gets all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .program import Program, TaskSpec


class ItemsRead:
    """Checks the items that readers of generators get: each item has one reader, and they come in order.

    Args:
        program: the program.
        violation: called with each invariant that does not hold.
    """

    def __init__(self, program: Program, violation: Callable[[str], None]) -> None:
        self._violation = violation
        self._specs: list[TaskSpec] = []  # of each generator that was submitted
        self._read: set[tuple[int, str]] = set()
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the last item, by handle
        self._count: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by handle
        self._passed_on = {one for holds in program.contents.values() for one in holds if one.endswith("*")}

    def new(self, spec: TaskSpec) -> int:
        """Return the number of a generator that is submitted; its items carry it."""
        self._specs.append(spec)
        return len(self._specs) - 1

    def read(self, number: int, key: str, handle: Any, reader: str) -> None:
        """Check an item that was read: its generator's number, its key, and the handle that it was read from."""
        self.count(handle)
        if (number, key) in self._read:
            self._violation(f"{reader} read item {key}, which another reader has, too")
        self._read.add((number, key))
        place = self._specs[number].items.index(key)
        if self._last.get(handle, -1) >= place:
            self._violation(f"{reader} read item {key} after item {self._last[handle]}")
        self._last[handle] = place

    def count(self, handle: Any) -> None:
        """Count an item, or an error in the place of one."""
        self._count[handle] = self._count.get(handle, 0) + 1

    def ended(self, key: str, spec: TaskSpec, handle: Any, reader: str) -> None:
        """Check the end of a generator that has ended without an error."""
        count = self._count.get(handle, 0)
        if key not in self._passed_on and not spec.fails and count != len(spec.items):
            self._violation(f"{reader} read {count} of the {len(spec.items)} items of {key}, and it ended")
