"""The use of the store's memory: the processes that hold it, the lines that created it, and objects that look leaked.

An object lives while a process holds a reference, or a value, a waiting task, an actor or the table of functions names
it. All of that is in shared memory; only the creating lines are recorded on demand (`record_call_sites`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.observe import listing
from fastrt.observe.listing import Row
from fastrt.store.client import Store

UNKNOWN = "(not recorded)"
_MANY = 1000  # objects of one line that are alive at once


@dataclass
class Group:
    """Objects of one kind that one line created.

    Attributes:
        site: the line; UNKNOWN if it was not recorded.
        what: "value", "result", "function" or "actor".
        count, bytes: objects, and the bytes of their values.
        stored: bytes of memory that their blocks take.
        pinned, spilled: number of objects that a view or a running argument pins, and of those in files.
        holders: number of objects by the pid of the process that holds a reference or a view.
        suspect: why the objects look leaked; empty if they do not.
        grown: number of objects more than in `before`; 0 without it.
    """

    site: str
    what: str
    count: int = 0
    bytes: int = 0
    stored: int = 0
    pinned: int = 0
    spilled: int = 0
    holders: Counter[int] = field(default_factory=Counter)
    suspect: str = ""
    grown: int = 0


@dataclass
class Summary:
    """The result of `summary`.

    Attributes:
        totals: objects and bytes by state: pending, sealed, spilled, remote; pinned and inline (in the table itself)
            are parts of sealed. And bytes_used, bytes_max of the store.
        processes: rows with pid, kind, name, objects, bytes (that it holds), pinned (bytes that it has in use).
        groups: largest first.
        objects: the rows of `listing.objects`.
        spill_dir: the folder of spilled values.
    """

    totals: dict[str, int]
    processes: list[Row]
    groups: list[Group]
    objects: list[Row]
    spill_dir: str

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON for programs."""
        return {
            "totals": self.totals, "processes": self.processes, "spill_dir": self.spill_dir,
            "groups": [{**asdict(group), "holders": dict(group.holders)} for group in self.groups],
            "objects": self.objects,
        }  # fmt: skip


def summary(store: Store, before: Sequence[Row] | None = None) -> Summary:
    """Summarize all objects of a node.

    Args:
        store: any process's attachment.
        before: the objects of an earlier call, to show the growth since then.
    """
    client = store.client
    objects = listing.objects(store)
    usage = fsck.usage(client)
    totals: Counter[str] = Counter(bytes_used=usage["bytes_used"], bytes_max=usage["bytes_max"])
    for row in objects:
        state = row["state"] if row["state"] in ("pending", "spilled", "remote") else "sealed"
        totals[f"{state}_objects"] += 1
        totals[f"{state}_bytes"] += row["bytes"]
        if row["pins"]:
            totals["pinned_objects"] += 1
            totals["pinned_bytes"] += row["bytes"]
        if state == "sealed" and not row["stored"]:
            totals["inline_objects"] += 1
    groups = _grouped(objects)
    if before is not None:
        earlier = {(group.site, group.what): group.count for group in _grouped(before)}
        for group in groups:
            group.grown = group.count - earlier.get((group.site, group.what), 0)
    for group in groups:
        group.suspect = _suspicion(group)
    rows = [
        row
        for row in clients.table(client.segment)
        if row["client"] != client.index or row["kind"] != clients.KIND_TOOL
    ]
    return Summary(dict(totals), _processes(rows, objects), groups, objects, spill.directory(client))


def _processes(rows: list[Row], objects: list[Row]) -> list[Row]:
    held: dict[int, Counter[str]] = {row["pid"]: Counter() for row in rows}
    for row in objects:
        for pid in {*row["refs"], *row["pins"]} & held.keys():
            held[pid].update(objects=1, bytes=row["bytes"], pinned=row["bytes"] if pid in row["pins"] else 0)
    return [
        {
            "pid": row["pid"], "kind": listing.KINDS.get(row["kind"], "?"), "name": row["name"],
            **{name: held[row["pid"]][name] for name in ("objects", "bytes", "pinned")},
        }
        for row in rows
    ]  # fmt: skip


def _grouped(objects: Sequence[Row]) -> list[Group]:
    groups: dict[tuple[str, str], Group] = {}
    for row in objects:
        what = row["what"].split()[0]
        group = groups.setdefault((row["site"], what), Group(row["site"] or UNKNOWN, what))
        group.count += 1
        group.bytes += row["bytes"]
        group.stored += row["stored"]
        group.pinned += bool(row["pins"])
        group.spilled += row["state"] == "spilled"
        group.holders.update({*row["refs"], *row["pins"]})
    return sorted(groups.values(), key=lambda group: (-group.bytes, -group.count))


def _suspicion(group: Group) -> str:
    """Why these objects may be leaked, in a few words. The text states facts; the conclusion is a guess."""
    if group.what in ("function", "actor"):
        return ""
    if group.grown >= _MANY:
        return f"{group.grown:,} more than at the first look"
    if group.count >= _MANY and len(group.holders) == 1:
        (pid,) = group.holders
        return f"process {pid} alone holds {group.count:,} of one line" if group.site != UNKNOWN else ""
    if group.count and not group.holders and group.bytes >= 1 << 20:
        return "held only inside other values or by waiting tasks"
    return ""
