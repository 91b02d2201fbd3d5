"""Follows logs for the pages that show them: each in a thread, because another node may take seconds to answer."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from pathlib import Path

from fastrt.errors import FastrtError
from fastrt.node.log_files import LogFolder, LogLine, find_folders
from fastrt.runtime.node_logs import Log

LINES = 400  # that are kept and shown
_CHARS = 100_000  # of all shown lines
_LINE_CHARS = 2000
_POLL_S = 0.5
_LEASE_S = 5.0  # reading ends so long after the last look
_PAGES = 20  # between two polls: a flood is caught up with
_READERS_MAX = 8
_FIRST_S = 0.2  # a page waits so long for the first lines, which a local log has at once
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class LogReader:
    """Reads one log while it is looked at: its end and what follows, or one page from a place on.

    Args:
        log: what to read.
        after: `Page.after` of an earlier page, or "start"; empty: follow the end.

    Attributes:
        lines: those that are kept, oldest first; replaced as a whole.
        seen: how many lines came in all.
        next: where the next page begins, while there is one; "" otherwise.
        why: why the log cannot be read; "" if it can.
        is_read: set once the first lines have come, or none can be read.
    """

    def __init__(self, log: Log, after: str = "") -> None:
        self._log, self._after = log, after
        self.lines: list[LogLine] = []
        self.seen, self.next, self.why = 0, "", ""
        self.is_read = threading.Event()
        self._looked_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="fastrt-log", daemon=True)
        self._thread.start()

    def look(self) -> bool:
        """Go on reading; False if this reader has stopped, and another one is needed."""
        self._looked_at = time.monotonic()
        return self._thread.is_alive() or (bool(self._after) and not self.why)

    def close(self) -> None:
        """Stop. An answer of another node may still come, and is ignored."""
        self._stop.set()

    def _read(self) -> None:
        try:
            if self._after:
                self._read_page("" if self._after == "start" else self._after)
            else:
                self._follow()
        except (FastrtError, OSError, ValueError) as exc:
            self.why = str(exc)
        finally:
            self.is_read.set()

    def _read_page(self, after: str) -> None:
        """Read lines until the page is full; a page of few matching lines can take several passes."""
        found: list[LogLine] = []
        is_end = False
        while not is_end and len(found) < LINES and self._is_wanted():
            page = self._log.read(after, LINES - len(found))
            found += page.lines
            is_end = page.is_end or page.after == after
            after = page.after
        self.lines, self.seen, self.next = [shown(line) for line in found], len(found), "" if is_end else after

    def _follow(self) -> None:
        page = self._log.tail(LINES)
        kept = deque(page.lines, LINES)
        after, self.seen = page.after, len(kept)
        self.lines = fitting(kept)
        self.is_read.set()
        while not self._stop.wait(_POLL_S) and self._is_wanted():
            came = 0
            for _ in range(_PAGES):
                page = self._log.read(after)
                after = page.after
                kept.extend(page.lines)
                came += len(page.lines)
                if page.is_end or not page.lines:
                    break
            if came:
                self.seen += came
                self.lines = fitting(kept)

    def _is_wanted(self) -> bool:
        return not self._stop.is_set() and time.monotonic() - self._looked_at < _LEASE_S


class LogReaders:
    """The readers of a dashboard: one for each log and filter that is shown. A single thread calls the methods.

    Args:
        folder: the runtime folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[tuple[str, ...], LogReader] = {}  # the last used one is the last

    def sessions(self) -> list[LogFolder]:
        """The sessions of this user whose lines are kept on this machine; the one that printed last is the first."""
        return find_folders(self._folder)

    def reader(self, key: tuple[str, ...], log: Log, after: str) -> LogReader:
        """The reader of a log, started if there is none.

        Args:
            key: names the log and the filters.
            log: what to read.
            after: as for `LogReader`.
        """
        key = (*key, after)
        found = self._readers.pop(key, None)
        if found is None or not found.look():
            found = LogReader(log, after)
            found.is_read.wait(_FIRST_S)
        self._readers[key] = found
        for old in list(itertools.islice(self._readers, max(0, len(self._readers) - _READERS_MAX))):
            self._readers.pop(old).close()
        return found

    def close(self) -> None:
        """Stop all readers."""
        for reader in self._readers.values():
            reader.close()


def fitting(lines: deque[LogLine]) -> list[LogLine]:
    """The last lines that fit on a page, as `shown`; pure."""
    found: list[LogLine] = []
    room = _CHARS
    for line in reversed(lines):
        found.append(shown(line))
        room -= len(found[-1].text) + 80  # the rest of its JSON
        if room < 0:
            break
    return found[::-1]


def shown(line: LogLine) -> LogLine:
    """A line as pages show it: cut if it is long, without commands for terminals; pure."""
    text = _TERMINAL.sub("", line.text)
    if len(text) > _LINE_CHARS:
        text = f"{text[:_LINE_CHARS]}... ({len(text):,} characters)"
    return line._replace(text=text)
