"""A session's timeline, for https://ui.perfetto.dev.

Each process of the session is a track of slices: tasks and calls by name, waits inside of them, large values written
and read, spilled and fetched; an arrow leads from the submission of a task to its run. The data come from the
processes' trace rings, which keep the last 16,384 records of each process: enough for the end of a run that records all
the time (`trace`), and for a complete recording if the rings are read meanwhile (`Recording`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from fastrt._core.memory import arena, clients, trace
from fastrt._core.tasks import tasks
from fastrt.errors import FastrtError
from fastrt.observe import chrome
from fastrt.observe.chrome import Event
from fastrt.observe.drawing import Drawing, Record, Sample, draw
from fastrt.observe.listing import Names
from fastrt.store import client as store_client
from fastrt.store.client import Store

Format = Literal["perfetto", "chrome"]


class Recording:
    """Collects the records of a session's processes; it must be read repeatedly before they are overwritten.

    Args:
        store: any process's attachment.
        from_now: leave out earlier records.
    """

    def __init__(self, store: Store, from_now: bool = False) -> None:
        self._store = store
        self._since: dict[int, int] = {}  # per client: the number of the first record that is still to be read
        self.records: dict[int, dict[int, Record]] = {}  # per client, by number
        self.samples: list[Sample] = []  # one for each reading
        self.lost = 0
        self.names = Names(store)
        if from_now:
            for slot in range(clients.slots(store.client.segment)):
                self._since[slot] = trace.drain(store.client, slot, (1 << 64) - 1)[1]

    def read(self) -> None:
        """Read the new records. Call it before a process has written 16,384 new ones."""
        client = self._store.client
        for slot in range(clients.slots(client.segment)):
            since = self._since.get(slot, 0)
            rows, following = trace.drain(client, slot, since)
            if not rows:
                continue
            known = self.records.setdefault(slot, {})
            self.lost += max(0, rows[0][0] - since) if known else 0
            for row in rows:
                known[row[0]] = Record(*row)
            # A record without an end is read again until it ends, or is overwritten.
            self._since[slot] = next((row[0] for row in rows if not row[2]), following)
        self.samples.append(Sample(trace.now(), tasks.queued(client), arena.room(client)[0]))
        self.names.refresh()

    def drawing(self) -> Drawing:
        """The collected records as slices."""
        return draw(self._store, self.records, self.names, self.samples)


def record(store: Store, seconds: float, poll_s: float = 0.02) -> Recording:
    """Record for some time, even in a session that was started without recording.

    Args:
        store: any process's attachment.
        seconds: length of the recording.
        poll_s: time between two reads of the rings.
    """
    recording = Recording(store, from_now=True)
    trace.switch(store.client, True)
    try:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(poll_s, left))
            recording.read()
    finally:
        trace.switch(store.client, False)
    recording.read()
    return recording


def format_of(filename: str | Path, chosen: Format | None = None) -> Format:
    """The format of a file: the chosen one, or by its name Chrome's for `.json`, else Perfetto's.

    Raises:
        ValueError: there is no such format.
    """
    if chosen not in (None, "perfetto", "chrome"):
        raise ValueError(f"format={chosen!r}: a timeline is written in the format 'perfetto' or 'chrome'")
    return chosen or ("chrome" if Path(filename).suffix == ".json" else "perfetto")


def write(drawing: Drawing, filename: str | Path, chosen: Format | None = None) -> None:
    """Write a drawing as a file that https://ui.perfetto.dev opens.

    Args:
        drawing: the slices.
        filename: the file.
        chosen: see `format_of`.
    Raises:
        ModuleNotFoundError: Perfetto's format needs protobuf; the text says what to install.
        OSError: the file cannot be written.
    """
    if format_of(filename, chosen) == "chrome":
        chrome.write(chrome.events(drawing), filename)
        return
    from fastrt.observe import perfetto

    Path(filename).write_bytes(perfetto.written(drawing))


def timeline(filename: str | Path | None = None, *, format: Format | None = None) -> list[Event]:
    """The recent timeline of this session's processes, for https://ui.perfetto.dev.

    The session must record: `fastrt.init(trace=True)`, or FASTRT_TRACE=1. `fastrt timeline --seconds` records any
    session.

    Args:
        filename: the file to write; None writes none.
        format: "perfetto" (nanoseconds, counters, a third of the size) or "chrome" (JSON); None: "chrome" for names
            that end in .json, else "perfetto".
    Returns:
        The events of Chrome's trace format, in order of time. Each process has kept its last 16,384 records.
    Raises:
        FastrtError: the session does not record.
        ValueError: there is no such format.
    Source:
        The semantics of `ray.timeline`.
    """
    store = store_client.require()
    if filename is not None:
        format_of(filename, format)
    if not trace.enabled(store.client):
        raise FastrtError(
            "this session does not record a timeline: start it with fastrt.init(trace=True) or FASTRT_TRACE=1, or "
            "run `fastrt timeline out.pftrace --seconds 5` while it runs"
        )
    recording = Recording(store)
    recording.read()
    drawing = recording.drawing()
    if filename is not None:
        write(drawing, filename, format)
    return chrome.events(drawing)
