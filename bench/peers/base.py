"""The base of every peer: numbers that never repeat, arrays to send, and rounds of units."""

from __future__ import annotations

import time
from typing import Any

now = time.perf_counter_ns


class Peer:
    """A running library. Subclasses start it in `__init__(workers, store_bytes)` and add the rows they can do."""

    # The number of units of a row that run unmeasured first, and their longest time.
    warm_units = 20
    warm_s = 1.0

    def __init__(self) -> None:
        self._count = 0
        self._arrays: dict[int, Any] = {}
        self.kept: dict[str, Any] = {}  # by method: values that stay alive between the units of a row

    def fresh(self, count: int = 1) -> int:
        """The first of `count` numbers that no earlier task has seen: nothing can be cached."""
        self._count += count
        return self._count - count

    def array(self, nbytes: int) -> Any:
        """A float64 array of that size in private, touched memory; the same one each time."""
        import numpy as np

        if nbytes not in self._arrays:
            self._arrays.clear()  # one at a time: they are large
            self._arrays[nbytes] = np.arange(nbytes // 8, dtype=np.float64)
        return self._arrays[nbytes]

    def round(self, method: str, argument: int | None, seconds: float) -> list[int]:
        """Do units of a row for some time, at least one.

        Returns:
            Nanoseconds of each.
        """
        unit = getattr(self, method)
        times = []
        until = now() + int(seconds * 1e9)
        while not times or now() < until:
            times.append(unit() if argument is None else unit(argument))
        return times

    def prepare(self, method: str, argument: int | None) -> None:
        """Prepare a row, and run some units of it unmeasured: every block that it will use is then warm."""
        make = getattr(self, f"prepare_{method}", None)
        if make is not None:
            self.kept[method] = make(argument)
        until = now() + int(self.warm_s * 1e9)
        for _ in range(self.warm_units):
            self.round(method, argument, 0.0)
            if now() > until:
                break

    def finish(self) -> None:
        """Drop the values that a row has kept."""
        self.kept.clear()

    def first(self) -> None:
        """Run one task and check its result: the end of the start-up."""
        raise NotImplementedError

    def close(self) -> None:
        """End the library's processes."""
        raise NotImplementedError
