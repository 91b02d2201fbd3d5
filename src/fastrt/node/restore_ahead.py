"""Which values to bring here before the tasks that need them run: a decision without threads, files or clocks.

The arguments of the next ready tasks are restored from files, or fetched from other nodes, while there is free memory,
in the order of the queue. No other value is pushed out for them, and a share of the store stays free. Those in files
that find no room are read into the page cache, from which the worker maps them, and restored once there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_FREE_SHARE = 8  # of the store: what stays free for new values
_CACHE_SHARE = 4  # of the store: the most that the page cache gets


class Step(NamedTuple):
    """A value to bring closer: `restores` into memory, else into the page cache."""

    entry: int
    objref: int
    restores: bool


class RestoreAhead:
    """Decides what to restore ahead, and remembers what it has decided.

    Args:
        store_bytes: the size of the store.
        has_files: whether the values are in files, which the page cache can hold.
        at_once: the share of the store that is restored at one time: 4 stands for a quarter. A larger value is alone.
    """

    def __init__(self, store_bytes: int, has_files: bool = True, at_once: int = 1) -> None:
        self._margin = store_bytes // _FREE_SHARE
        self._at_once = store_bytes // at_once
        self._cache_bytes = store_bytes // _CACHE_SHARE if has_files else 0
        self._begun: dict[int, tuple[int, bool]] = {}  # by value: its size, and whether it is being restored

    def decide(self, wanted: Sequence[tuple[int, int, int]], free: int, is_pressed: bool) -> list[Step]:
        """Decide what to begin now.

        Args:
            wanted: the arguments of the next tasks that are not in memory, the first needed first: (index, objref,
                bytes).
            free: bytes free in the store.
            is_pressed: whether clients wait for room, or have just done so.
        """
        named = {objref for _, objref, _ in wanted}
        self._begun = {objref: begun for objref, begun in self._begun.items() if objref in named}
        restoring = sum(nbytes for nbytes, restores in self._begun.values() if restores)
        cached = sum(nbytes for nbytes, restores in self._begun.values() if not restores)
        room = 0 if is_pressed else free - self._margin - restoring
        steps = []
        for index, objref, nbytes in wanted:
            begun = self._begun.get(objref)
            if begun is not None and (begun[1] or nbytes > room):
                continue
            if begun is not None:  # it found no room at first
                cached -= nbytes
            restores = nbytes <= room
            if restores and restoring and restoring + nbytes > self._at_once:
                break  # until earlier ones have come
            if restores:
                room -= nbytes
                restoring += nbytes
            else:
                room = 0  # a later task does not take the room that an earlier one will need
                cached += nbytes
                if cached > self._cache_bytes:
                    break
            self._begun[objref] = nbytes, restores
            steps.append(Step(index, objref, restores))
        return steps

    def found_no_room(self, objref: int) -> None:
        """Take that a value found no room after all: it is not tried again while the same tasks need it."""
        if objref in self._begun:
            self._begun[objref] = 0, True
