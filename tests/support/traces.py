"""What a file must keep to for Perfetto to show all of it, read as Perfetto reads it: in whole nanoseconds.

Source: `json_trace_parser_impl.cc` and `slice_tracker.cc` of Perfetto 52: a number is multiplied by 1,000 and cut off,
events are sorted by that, one that was written before another stays before it; a slice that begins inside of another
and ends after it is dropped, and the whole file called faulty.
"""

from typing import Any

REQUIRED = {"M": {"args"}, "X": {"dur"}, "i": {"s"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}}


def nanoseconds(micros: float) -> int:
    """As Perfetto takes a number of microseconds."""
    return int(micros * 1000.0)


def check(events: list[dict[str, Any]]) -> None:
    """Raise AssertionError for the first rule that an event breaks."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    flows: dict[str, dict[str, Any]] = {}
    last = 0.0
    for event in events:
        kind = event["ph"]
        assert {"ph", "pid", "tid", "ts", "name"} | REQUIRED[kind] <= event.keys(), event
        assert all(isinstance(event[name], int) for name in ("pid", "tid"))
        assert event["name"]
        assert event["ts"] >= 0
        if kind == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            continue
        assert event["ts"] >= last, "events are in the order of time"
        last = event["ts"]
        if kind == "X":
            assert event["dur"] >= 0
            start = nanoseconds(event["ts"])
            lanes.setdefault((event["pid"], event["tid"]), []).append((start, start + nanoseconds(event["dur"])))
        elif kind == "i":
            assert event["s"] == "t"
        else:
            flows.setdefault(event["id"], {})[kind] = event
    for slices in lanes.values():
        check_nested(slices)
    for both in flows.values():
        assert both.keys() == {"s", "f"}
        assert both["s"]["ts"] <= both["f"]["ts"]
        assert both["f"]["bp"] == "e"
        for one in both.values():
            at = nanoseconds(one["ts"])
            slices = lanes[one["pid"], one["tid"]]
            assert any(start <= at <= end for start, end in slices), "an arrow needs a slice at both ends"


def check_nested(slices: list[tuple[int, int]]) -> None:
    """Slices of a track, in the order of the file, lie beside or inside each other."""
    open_ends: list[int] = []
    for start, end in slices:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{start} to {end} begins in a slice that ends at {open_ends[-1]}"
        open_ends.append(end)
