"""The store's memory: by kind of object, by process, and by the line of code that created the values."""

from __future__ import annotations

from collections.abc import Mapping

from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.dashboard import sections
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.observe import listing, reading
from fastrt.observe import memory as by_line
from fastrt.store.client import Store

_ROWS = 30
_LINES_MAX = 20_000  # objects; beyond that, `fastrt memory` reads them once


def memory(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Objects by state and type, the processes that hold them, and their lines."""
    counts = reading.counts(store, tasks=False).objects
    most = max((one.bytes for one in counts), default=0)
    totals = spill.totals(store.client)
    now = session.samples[-1] if session.samples else None
    held = {row["client"]: row["bytes"] for row in fsck.holders(store.client)}
    processes = [row for row in listing.workers(store) if row["bytes_held"]]
    return [
        sections.facts("store", [
            ("in use", now.used if now else None, "bytes"), ("size", now.room if now else None, "bytes"),
            ("objects", sum(one.count for one in counts), "count"), ("held by processes", sum(held.values()), "bytes"),
            ("written to files", totals["spilled_bytes"], "bytes"), ("read back", totals["restored_bytes"], "bytes"),
            ("put into files", totals["mapped_bytes"], "bytes"),
        ]),
        sections.table(
            "kinds", "Objects by kind", [
                ("kind", "text"), ("type", "text"), ("state", "state"), ("objects", "count"), ("bytes", "bytes"),
                ("", "share"),
            ], (
                (one.what, one.type, one.state, one.count, one.bytes, sections.share(one.bytes, most))
                for one in sorted(counts, key=lambda one: (-one.bytes, -one.count))
            ), "The store is empty.",
        ),
        sections.table(
            "holders", "Processes that hold values", [
                ("pid", "code"), ("kind", "text"), ("name", "text"), ("holds", "bytes"),
            ], (
                (sections.link(row["pid"], "process", pid=row["pid"]), row["kind"], row["name"], row["bytes_held"])
                for row in sorted(processes, key=lambda row: -row["bytes_held"])[:_ROWS]
            ), "No process holds a large value.",
        ),
        _lines(store, sum(one.count for one in counts)),
    ]  # fmt: skip


def _lines(store: Store, objects: int) -> Section:
    columns = [("line", "code"), ("kind", "text"), ("objects", "count"), ("bytes", "bytes"), ("pinned", "count"),
               ("held by", "text"), ("looks leaked", "text")]  # fmt: skip
    title = "Values by the line that created them"
    if objects > _LINES_MAX:
        return sections.table("lines", title, columns, [], (
            f"There are more than {_LINES_MAX:,} objects: run `fastrt memory`, which reads them once."
        ))  # fmt: skip
    groups = [one for one in by_line.summary(store).groups if one.site != by_line.UNKNOWN]
    return sections.table("lines", title, columns, (
        (one.site, one.what, one.count, one.bytes, one.pinned,
         ", ".join(str(pid) for pid, _ in one.holders.most_common(3)), one.suspect)
        for one in groups[:_ROWS]
    ), "Lines are not recorded. Start the program with FASTRT_RECORD_CALL_SITES=1, or "
       "fastrt.init(record_call_sites=True).")  # fmt: skip
