"""How much to spill, and for whom: a state machine without threads, files or clocks.

A round of spilling serves the clients that wait for room: it ends when as much is free as one of them asked for, or
when no value is left to spill. Its end wakes them all, and those that still find no room ask again. Values that are
under way then count for the next round.

Clients that fill the store ask again and again. So for a moment after each request values are spilled ahead, until a
share of the store is free: the next puts find room, and the disk is busy while they copy.
"""

from __future__ import annotations

_AHEAD_TIMES = 4  # as much as the largest request of the moment
_PRESSURE_S = 0.1  # the moment


class SpillPlan:
    """Decides when to spill another value, and when a round ends.

    Args:
        store_bytes: the size of the store.
        at_once: values that may be under way.
        ahead_share: at most the store's size divided by this is freed ahead.
    """

    def __init__(self, store_bytes: int, at_once: int, ahead_share: int = 4) -> None:
        self._ahead_max = store_bytes // ahead_share
        self._at_once = at_once
        self._asked: list[int] = []
        self._freed = self._free = self._under_way = self._bytes_under_way = 0
        self._trouble = ""
        self._ahead = 0
        self._until = float("-inf")

    @property
    def piece(self) -> int:
        """How many bytes should become free in one piece: the largest request, or the bytes to free ahead."""
        return max(self._asked, default=self._ahead)

    def ask(self, nbytes: int, now: float) -> None:
        """A client waits for room."""
        nbytes = max(nbytes, 1)
        if not self._asked:
            self._freed, self._free, self._trouble = 0, 0, ""
        self._asked.append(nbytes)
        self._ahead = min(self._ahead_max, max(self._ahead if now < self._until else 0, _AHEAD_TIMES * nbytes))
        self._until = now + _PRESSURE_S

    def begun(self, nbytes: int) -> None:
        """A value is being spilled, and its block will be free."""
        self._under_way += 1
        self._bytes_under_way += nbytes

    def ended(self, nbytes: int, freed: int, trouble: str, now: float) -> None:
        """A value was spilled, or was not.

        Args:
            nbytes: as given to `begun`.
            freed: bytes; 0 if it stays in memory.
            trouble: why its file could not be written, or "".
            now: monotonic time, in seconds.
        """
        self._under_way -= 1
        self._bytes_under_way -= nbytes
        self.dropped(freed)
        if trouble:
            self._trouble, self._until = trouble, float("-inf")
        elif now < self._until:
            self._until = now + _PRESSURE_S

    def was_free(self, nbytes: int) -> None:
        """Bytes beside the chosen values were free already: so much less must be spilled for the piece."""
        self._free += nbytes

    def dropped(self, freed: int) -> None:
        """A block became free without a file."""
        self._freed += freed

    def wants(self, free: int, now: float) -> bool:
        """Whether another value should be spilled now.

        Args:
            free: bytes free in the store.
            now: monotonic time, in seconds.
        """
        if self._under_way >= self._at_once or self._trouble:
            return False
        if self._asked and self._freed + self._free + self._bytes_under_way < sum(self._asked):
            return True
        return now < self._until and free + self._bytes_under_way < self._ahead

    def is_pressed(self, now: float) -> bool:
        """Whether to look again soon whether a value should be spilled ahead."""
        return now < self._until and not self._trouble

    def end_round(self, exhausted: bool) -> tuple[int, str] | None:
        """End the round if that is due; without a value to spill, stop spilling ahead.

        Args:
            exhausted: whether no value was found when one was wanted.
        Returns:
            The bytes freed and why no more were, or ""; None while the clients must wait.
        """
        if exhausted:
            self._until = float("-inf")
        if not self._asked:
            return None
        is_met = self._freed >= min(self._asked) or self._freed + self._free >= max(self._asked)
        if not is_met and (self._under_way or not (exhausted or self._trouble)):
            return None
        self._asked.clear()
        found = self._freed, self._trouble
        self._freed, self._free, self._trouble = 0, 0, ""
        return found
