"""`tqdm` for tasks and actors: a progress bar that appears at the driver.

Workers' output goes to the driver with its carriage returns, so a bar is a line that each update writes again.
"""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

_WIDTH = 20
_UPDATE_S = 0.1


class tqdm:
    """A progress bar with the calls of `tqdm.tqdm` that Ray's has.

    Args:
        iterable: to walk over; None: `update` is called instead.
        desc: text before the bar.
        total: how many steps there are; None: the length of the iterable, or unknown.
        unit: of a step.
        position: taken for Ray's sake; the driver shows one line for each task.
        flush_interval_s: seconds between two updates.
    Source:
        The semantics of `ray.experimental.tqdm_ray.tqdm`.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str | None = None,
        total: int | None = None,
        unit: str | None = None,
        position: int | None = None,
        flush_interval_s: float | None = None,
    ) -> None:
        if total is None and iterable is not None:
            total = len(iterable) if isinstance(iterable, Sized) else None
        self.total, self.n = total, 0
        self._iterable, self._desc, self._unit = iterable, desc or "", unit or "it"
        self._pause_s = _UPDATE_S if flush_interval_s is None else flush_interval_s
        self._began = self._shown = time.monotonic()
        self._closed = False
        self.refresh()

    def set_description(self, desc: str) -> None:
        """Change the text before the bar."""
        self._desc = desc
        self._show()

    def update(self, n: int = 1) -> None:
        """Count steps."""
        self.n += n
        self._show()

    def refresh(self) -> None:
        """Show the bar now."""
        self._write("")

    def close(self) -> None:
        """Show the bar for the last time, and end its line."""
        if not self._closed:
            self._closed = True
            self._write("\n")

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise ValueError("this tqdm was made without an iterable; call update instead")
        try:
            for item in self._iterable:
                yield item
                self.update()
        finally:
            self.close()

    def _show(self) -> None:
        if time.monotonic() - self._shown >= self._pause_s:
            self.refresh()

    def _write(self, end: str) -> None:
        self._shown = time.monotonic()
        rate = self.n / max(self._shown - self._began, 1e-9)
        before = f"{self._desc}: " if self._desc else ""
        if self.total:
            done = min(1.0, self.n / self.total)
            bar = ("#" * round(done * _WIDTH)).ljust(_WIDTH, "-")
            text = f"{before}{done:4.0%} [{bar}] {self.n}/{self.total} {rate:.1f} {self._unit}/s"
        else:
            text = f"{before}{self.n} {self._unit}, {rate:.1f} {self._unit}/s"
        sys.stderr.write(f"\r{text}{end}")
        sys.stderr.flush()


safe_print = builtins.print  # bars and lines do not mix at the driver
