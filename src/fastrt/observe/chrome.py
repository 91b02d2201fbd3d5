"""Events of Chrome's trace format, written so that Perfetto reads the exact times.

The format's times are decimal microseconds. Perfetto multiplies them by 1,000 and truncates, which turns 4.35 into
4,349 ns: a slice that ends together with the slice around it then seems to end after it, and Perfetto drops it and
reports a faulty file. So times are counted in nanoseconds, and only `micros` converts them to microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastrt.observe.drawing import Drawing, Process, Slice

Event = dict[str, Any]


def micros(nanoseconds: int) -> float:
    """Convert a time to the format's microseconds, from which Perfetto reads the same nanoseconds.

    Source:
        `CoerceToTs` in Perfetto's `json_utils.cc`.
    """
    value = nanoseconds / 1000
    return value if int(value * 1000.0) >= nanoseconds else math.nextafter(value, math.inf)


def write(events: Iterable[Event], filename: str | Path) -> None:
    """Write events as a file that Perfetto opens."""
    with open(filename, "w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for k, event in enumerate(events):
            file.write((",\n" if k else "") + json.dumps(event))
        file.write("\n]}\n")


def events(drawing: Drawing) -> list[Event]:
    """The events of a drawing: metadata, then all others in the order of time."""
    if not drawing.slices:
        return []
    zero = min(one.start for one in drawing.slices)
    found = [_event(drawing.processes[one.process], one, zero) for one in drawing.slices]
    for task, (submitted, ran) in drawing.arrows.items():
        for phase, one in (("s", submitted), ("f", ran)):
            arrow = {"ph": phase, "id": f"{task:x}", "name": "submit", "cat": "submit", "ts": micros(one.start - zero)}
            place = {"pid": drawing.processes[one.process].pid, "tid": one.lane}
            found.append({**arrow, **place, **({"bp": "e"} if phase == "f" else {})})
    found.sort(key=lambda event: event["ts"])
    return [*_titles(drawing.processes), *found]


def _event(process: Process, one: Slice, zero: int) -> Event:
    event: Event = {"name": one.name, "cat": one.category, "pid": process.pid, "args": one.args}
    event |= {"ts": micros(one.start - zero), "tid": one.lane}
    return {**event, "ph": "i", "s": "t"} if one.is_point else {**event, "ph": "X", "dur": micros(one.end - one.start)}


def _titles(processes: Iterable[Process]) -> Iterator[Event]:
    """Metadata events: the names and the order of tracks."""
    for process in processes:
        base = {"ph": "M", "pid": process.pid, "tid": 0, "ts": 0}
        yield {**base, "name": "process_name", "args": {"name": process.title}}
        yield {**base, "name": "process_sort_index", "args": {"sort_index": process.rank}}
        for lane, title in enumerate(process.lane_titles()):
            yield {**base, "tid": lane, "name": "thread_name", "args": {"name": title}}
