"""Folds repeated lines of workers' output: the first passes at once, the others become one line with their number.

A line counts as repeated if another process printed the same text for the same job within the window, or the same
process printed it just before. So a table or a loop of one process keeps its lines, and a warning that each worker
prints appears once.

Source: the log deduplication of Ray, which compares lines without their numbers; here equal lines only are folded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from fastrt.node.logs import Printed

WINDOW_S = 2.0
_CHARS_MAX = 1000  # longer lines pass: parts of one line, and data
_KEPT_MAX = 4096  # different lines in the window; beyond them the oldest are dropped


class _Seen:
    """A line that was shown, and its repetitions since."""

    __slots__ = ("at", "count", "last", "pids")

    def __init__(self, at: float, pid: int, last: Printed) -> None:
        self.at, self.count, self.pids, self.last = at, 0, {pid}, last


class Folding:
    """Folds lines of one node's workers.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[bool, int, str], _Seen] = {}  # by stream, job and line; oldest first
        self._before: dict[tuple[int, bool], str] = {}  # the last line of each stream

    def take(self, printed: Printed) -> Iterator[Printed]:
        """Pass on the lines that are not repeated, and folded lines whose window is over."""
        yield from self.due()
        if printed.is_update:
            yield printed
            return
        now = self._clock()
        lines = [line for line in printed.lines if not self._folds(line, printed, now)]
        if lines:
            yield printed._replace(lines=lines)
        while len(self._seen) > _KEPT_MAX:
            yield from _told(self._seen.pop(next(iter(self._seen))))

    def due(self) -> Iterator[Printed]:
        """Pass on the folded lines whose window is over."""
        now = self._clock()
        while self._seen:
            key = next(iter(self._seen))
            seen = self._seen[key]
            if now - seen.at < WINDOW_S:
                return
            del self._seen[key]
            if seen.count:
                yield from _told(seen)
                self._seen[key] = _Seen(now, 0, seen.last)  # a line that goes on and on appears once in a window
                self._seen[key].pids = seen.pids

    def rest(self) -> Iterator[Printed]:
        """Pass on all folded lines: their reader is about to leave."""
        for seen in self._seen.values():
            yield from _told(seen)
        self._seen.clear()
        self._before.clear()

    def forget(self, pid: int) -> None:
        """Forget the last lines of a process that has ended."""
        self._before.pop((pid, False), None)
        self._before.pop((pid, True), None)

    def _folds(self, line: str, printed: Printed, now: float) -> bool:
        pid, stream = printed.pid, (printed.pid, printed.is_error)
        before = self._before.get(stream)
        self._before[stream] = line
        if len(line) > _CHARS_MAX or not line.strip():
            return False
        key = printed.is_error, printed.source.job, line
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = _Seen(now, pid, printed._replace(lines=[line]))
            return False
        if seen.pids == {pid} and before != line:
            return False
        seen.pids.add(pid)
        seen.count += 1
        if seen.last.pid != pid or seen.last.source != printed.source:
            seen.last = printed._replace(lines=[line])
        return True


def _told(seen: _Seen) -> Iterator[Printed]:
    """Return the repetitions of a line as one line; a single one as itself."""
    if seen.count > 1:
        by = f" by {len(seen.pids)} processes" if len(seen.pids) > 1 else ""
        yield seen.last._replace(lines=[f"{seen.last.lines[0]} [repeated {seen.count}x{by}]"])
    elif seen.count:
        yield seen.last
