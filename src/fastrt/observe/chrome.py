"""Events of Chrome's trace format, written so that Perfetto reads from them what was meant.

The format's times are microseconds, and decimal; Perfetto multiplies by 1,000 and cuts off. Whoever does that with
4.35 has 4,349 ns: a slice that ends where the one around it does seems to stick out of it, and Perfetto drops it and
calls the file faulty. So times are counted in nanoseconds, and become microseconds in `micros` only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def micros(nanoseconds: int) -> float:
    """A time as the format has it, from which the same nanoseconds are read again.

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
