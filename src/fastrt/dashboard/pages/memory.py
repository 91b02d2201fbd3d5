"""The store's memory: by kind of object, by process, and by the line of code that created the values."""

from __future__ import annotations

from collections.abc import Mapping

from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.dashboard import sections
from fastrt.dashboard.pages import far
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import Watched
from fastrt.observe import listing, reading
from fastrt.observe import memory as by_line
from fastrt.store.client import Store

_ROWS = 30
_LINES_MAX = 1_000_000  # objects; the pass over them takes some 50 ms


def memory(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """Objects by state and type, the processes that hold them, and their lines; of the node that `args` choose."""
    if args.get("node"):
        return _of_node(session, store, args["node"], far.name_of(store, args))
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
        _lines(by_line.summary(store) if sum(one.count for one in counts) <= _LINES_MAX else None),
        *far.links(store, "memory"),
    ]  # fmt: skip


def _of_node(session: Watched, store: Store, node: str, name: str) -> list[Section]:
    """The memory of another node: totals, and the processes and lines that hold the most."""
    way = sections.way("way", [sections.link("this node", "memory")])
    found, why = far.memory(session, store, node)
    if found is None:
        return [way, *why]
    totals = found.totals
    return [
        way,
        sections.facts("store", [
            ("in use", totals["bytes_used"], "bytes"), ("size", totals["bytes_max"], "bytes"),
            *((f"{state} objects", totals[f"{state}_objects"], "count") for state in ("sealed", "pending", "spilled")),
            ("in files", totals["spilled_bytes"], "bytes"),
        ]),
        sections.table(
            "holders", f"Processes of node {name} that hold values", [
                ("pid", "code"), ("kind", "text"), ("name", "text"), ("holds", "bytes"),
            ], (
                (sections.link(row["pid"], "process", pid=row["pid"], node=node), row["kind"], row["name"],
                 row["bytes"])
                for row in sorted(found.processes, key=lambda row: -row["bytes"])[:_ROWS] if row["bytes"]
            ), "No process holds a value.",
        ),
        _lines(found),
    ]  # fmt: skip


def _lines(found: by_line.Summary | None) -> Section:
    """The table of lines; without a summary there are too many objects to sum them once a second."""
    columns = [("line", "place"), ("kind", "text"), ("objects", "count"), ("bytes", "bytes"), ("pinned", "count"),
               ("held by", "text"), ("looks leaked", "text")]  # fmt: skip
    title = "Values by the line that created them"
    if found is None:
        words = f"There are more than {_LINES_MAX:,} objects: run `fastrt memory`, which sums them once."
        return sections.table("lines", title, columns, [], words)
    groups = [one for one in found.groups if one.site != by_line.UNKNOWN]
    return sections.table("lines", title, columns, (
        (one.site, one.what, one.count, one.bytes, one.pinned,
         ", ".join(str(pid) for pid, _ in one.holders.most_common(3)), one.suspect)
        for one in groups[:_ROWS]
    ), "Lines are not recorded. Start the program with FASTRT_RECORD_CALL_SITES=1, or "
       "fastrt.init(record_call_sites=True).")  # fmt: skip
