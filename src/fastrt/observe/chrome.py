"""Events of Chrome's trace format, written so that Perfetto reads the exact times.

The format's times are decimal microseconds. Perfetto multiplies them by 1,000 and truncates, which turns 4.35 into
4,349 ns: a slice that ends together with the slice around it then seems to end after it, and Perfetto drops it and
reports a faulty file. So times are counted in nanoseconds, and only `micros` converts them to microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
