"""`free` and `memory_summary`, which some programs call although they are not public."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastrt.config import size_text
from fastrt.errors import UnsupportedError
from fastrt.observe.memory import Summary, summary
from fastrt.ray.refusals import refuse
from fastrt.store import client, engine

__all__ = ["free", "memory_summary"]


def free(object_refs: Any, local_only: bool = False) -> None:
    """Do nothing: an object is freed with its last reference, which may belong to another process."""


def memory_summary(
    address: Any = None,
    group_by: str = "NODE_ADDRESS",
    sort_by: str = "OBJECT_SIZE",
    units: str = "B",
    line_wrap: bool = True,
    stats_only: bool = False,
    num_entries: int | None = None,
) -> str:
    """Describe the objects of this node by the line of code that made them, as `fastrt memory` does.

    Args:
        address: taken for Ray's sake, as are group_by, sort_by, units and line_wrap: the session of this program.
        stats_only: only the totals.
        num_entries: how many lines of code at most; default: all.
    Raises:
        UnsupportedError: the program runs by another engine.
    """
    if engine.current() is not None:
        raise UnsupportedError(refuse("memory_summary", "this engine has no object store"))
    found = summary(client.require())
    lines = [] if stats_only else list(_lines(found, num_entries))
    totals, size = found.totals, size_text(found.totals["bytes_max"])
    counts = [f"{totals[f'{kind}_objects']:,} {kind}" for kind in ("sealed", "pinned", "spilled", "pending")]
    return "\n".join([*lines, f"objects: {', '.join(counts)}; {size_text(totals['bytes_used'])} used of {size}"])


def _lines(found: Summary, most: int | None) -> Iterator[str]:
    for group in found.groups[:most]:
        holders = ", ".join(f"{pid} ({count:,})" for pid, count in group.holders.most_common()) or "other values, tasks"
        yield f"{group.site}: {group.count:,} x {group.what}, {size_text(group.bytes)}, held by {holders}"
