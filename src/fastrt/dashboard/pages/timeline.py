"""The live timeline: what each process ran in the last seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastrt._core.memory import clients, trace
from fastrt.dashboard import recorder, sections
from fastrt.dashboard.recorder import Recorder
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.net import packages
from fastrt.observe import chrome
from fastrt.observe.drawing import Drawing
from fastrt.observe.listing import KINDS
from fastrt.store.client import Store

_LANES = 24
_SPANS = ("1", "3", "10", "30")
_COST = (
    "The timeline is recorded only while this page is open: each submission, task and wait then costs the program one "
    "or two readings of the clock, some ten nanoseconds."
)


def timeline(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """A lane for each process with the tasks that it ran, and the file for Perfetto."""
    running = session.recorder
    if running is None or not running.is_on:
        return [sections.text("off", _COST), sections.buttons("record", [("Record", "do/record", {}, "")])]
    running.look()
    seconds = int(args["seconds"]) if args.get("seconds", "") in _SPANS else 10
    slices = running.slices()
    rows = {row["client"]: row for row in clients.table(store.client.segment)}
    now = trace.now()
    begin = now - seconds * 10**9
    shown = sorted(slices.keys() & rows.keys())[:_LANES]
    most = recorder.share_of(len(shown))
    lanes = [
        {"name": f"{KINDS.get(rows[slot]['kind'], '?')} {rows[slot]['pid']}",
         "slices": recorder.drawn(slices[slot], begin, now, most)}
        for slot in shown
    ]  # fmt: skip
    lost = f"; {running.lost:,} records were overwritten before they were read" if running.lost else ""
    kept = sum(len(some) for some in slices.values())
    oldest = min((some[0].start for some in slices.values()), default=now)
    there = f"the last {min(30.0, (now - oldest) / 1e9):.1f} s are kept, {kept:,} tasks{lost}"
    scale = f"{seconds} s, now at the right; {there}"
    return [
        sections.buttons("stop", [("Stop recording", "do/stop", {}, "")]),
        sections.choices("span", [("seconds", "seconds", str(seconds), _SPANS)]),
        {"id": "files", "kind": "files", "files": _files()},
        {"id": "lanes", "kind": "lanes", "title": "Tasks and calls by process", "lanes": lanes, "scale": scale},
    ]


def record(session: Watched, store: Store, body: Mapping[str, Any]) -> str:
    """Start the recording."""
    if session.recorder is None or not session.recorder.is_on:
        session.recorder = Recorder(store)
    return "recording"


def stop(session: Watched, store: Store, body: Mapping[str, Any]) -> str:
    """Stop the recording."""
    if session.recorder is not None:
        session.recorder.close()
    return "stopped"


def _files() -> list[list[str]]:
    """The files to save; a light installation writes JSON only."""
    native = [["Save for Perfetto (ui.perfetto.dev)", "timeline.pftrace"]] if packages.are_installed() else []
    return [*native, ["Save as Chrome's JSON", "timeline.json"]]


def saved(session: Watched, store: Store, args: Mapping[str, str]) -> tuple[bytes, str]:
    """The kept records as a file in Perfetto's own format."""
    from fastrt.observe import perfetto

    return perfetto.written(_drawing(session)), "application/octet-stream"


def saved_json(session: Watched, store: Store, args: Mapping[str, str]) -> tuple[bytes, str]:
    """The kept records as a file in Chrome's trace format."""
    return json.dumps({"traceEvents": chrome.events(_drawing(session))}).encode(), "application/json"


def _drawing(session: Watched) -> Drawing:
    return session.recorder.drawing() if session.recorder is not None else Drawing()
