"""The use of the store's memory: the processes that hold it, the lines that created it, and objects that look leaked.

An object lives while a process holds a reference, or a value, a waiting task, an actor or the table of functions names
it. All of that is in shared memory; only the creating lines are recorded on demand (`record_call_sites`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.objects import spill
from fastrt._core.repair import fsck, holdings, pages
from fastrt.foreign_text import ForeignTextError, check_object
from fastrt.observe import listing
from fastrt.observe.listing import Row
from fastrt.store.client import Store
from fastrt.tasks import call_sites

UNKNOWN = "(not recorded)"
OTHERS = "(other lines)"
_MANY = 1000  # objects of one line that are alive at once
_USES = {pages.VALUE: "value", pages.RESULT: "result", pages.ACTOR: "actor", pages.FUNCTION: "function"}
_KINDS = {
    "pending": holdings.PENDING, "sealed": holdings.STORED, "spilled": holdings.SPILLED, "remote": holdings.REMOTE,
    "pinned": holdings.PINNED, "inline": holdings.INLINE,
}  # fmt: skip
_ROWS_MAX = 200  # processes, and lines, that another node is sent
_HOLDERS_MAX = 8  # of one line, that another node is sent


@dataclass
class Group:
    """Objects of one kind that one line created.

    Attributes:
        site: the line; UNKNOWN if it was not recorded; OTHERS for all lines beyond the first 2,048.
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
        spill_dir: the folder of spilled values.
        more: groups that another node has left out.
    """

    totals: dict[str, int]
    processes: list[Row]
    groups: list[Group]
    spill_dir: str
    more: int = 0

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON for programs."""
        return {
            "totals": self.totals, "processes": self.processes, "spill_dir": self.spill_dir,
            "groups": [{**asdict(group), "holders": dict(group.holders)} for group in self.groups],
        }  # fmt: skip

    def compare(self, before: Summary) -> None:
        """Set the growth of each group since an earlier summary of the same node."""
        earlier = {(group.site, group.what): group.count for group in before.groups}
        for group in self.groups:
            group.grown = group.count - earlier.get((group.site, group.what), 0)
            group.suspect = _suspicion(group)

    def to_rows(self) -> list[Row]:
        """The summary for another node: the totals, then the processes and the lines that hold the most."""
        processes = sorted(self.processes, key=lambda row: -row["bytes"])[:_ROWS_MAX]
        groups = self.groups[:_ROWS_MAX]
        more = self.more + len(self.groups) - len(groups)
        return [
            {"totals": self.totals, "spill_dir": self.spill_dir, "more": more},
            *({"process": row} for row in processes),
            *({"line": {**asdict(one), "holders": one.holders.most_common(_HOLDERS_MAX)}} for one in groups),
        ]  # fmt: skip

    @classmethod
    def from_rows(cls, rows: list[Row]) -> Summary:
        """The summary that another node has sent as `to_rows`.

        Raises:
            ForeignTextError: the rows are no summary.
        """
        what = "the memory of another node"
        first = check_object(rows[0] if rows else None, what, {"totals": dict, "spill_dir": str, "more": int})
        found = cls(dict.fromkeys(_TOTALS, 0), [], [], first["spill_dir"], first["more"])
        found.totals.update(check_object(first["totals"], what, dict.fromkeys(first["totals"], int)))
        for row in rows[1:]:
            if "process" in row:
                found.processes.append(check_object(row["process"], what, _PROCESS))
                continue
            line = check_object(row.get("line"), what, _LINE)
            holders = line["holders"]
            if not all(isinstance(one, list) and [type(part) for part in one] == [int, int] for one in holders):
                raise ForeignTextError(f"{what}: the holders of a line are no pairs of numbers")
            found.groups.append(Group(**{name: line[name] for name in _LINE if name != "holders"}))
            found.groups[-1].holders.update(dict(holders))
        return found


_TOTALS = ("bytes_used", "bytes_max", *(f"{name}_{what}" for name in _KINDS for what in ("objects", "bytes")))
_PROCESS = {"pid": int, "kind": str, "name": str, "objects": int, "bytes": int, "pinned": int}
_LINE = {
    "site": str, "what": str, "count": int, "bytes": int, "stored": int, "pinned": int, "spilled": int, "holders": list,
    "suspect": str,
}  # fmt: skip


def summary(store: Store) -> Summary:
    """Summarize all objects of a node, by one pass over their table.

    Args:
        store: any process's attachment.
    """
    client = store.client
    lines, held, sums = holdings.holdings(client)
    usage = fsck.usage(client)
    totals = {"bytes_used": usage["bytes_used"], "bytes_max": usage["bytes_max"]}
    for name, kind in _KINDS.items():
        totals[f"{name}_objects"], totals[f"{name}_bytes"] = sums[kind]
    rows = [
        row
        for row in clients.table(client.segment)
        if row["client"] != client.index or row["kind"] != clients.KIND_TOOL
    ]
    processes = [
        {
            "pid": row["pid"], "kind": listing.KINDS.get(row["kind"], "?"), "name": row["name"],
            **dict(zip(("objects", "bytes", "pinned"), held.get(row["client"], (0, 0, 0)), strict=False)),
        }
        for row in rows
    ]  # fmt: skip
    groups = _grouped(lines, call_sites.read(store.socket_path), {row["client"]: row["pid"] for row in rows})
    return Summary(totals, processes, groups, spill.directory(client))


def _grouped(lines: list[tuple[Any, ...]], sites: Mapping[int, str], pids: Mapping[int, int]) -> list[Group]:
    groups: dict[tuple[str, str], Group] = {}
    for site, use, count, nbytes, stored, pinned, spilled, holders in lines:
        place = OTHERS if site is None else sites.get(site) or UNKNOWN
        group = groups.setdefault((place, _USES[use]), Group(place, _USES[use]))
        group.count += count
        group.bytes += nbytes
        group.stored += stored
        group.pinned += pinned
        group.spilled += spilled
        for client, objects in holders.items():
            if client in pids:
                group.holders[pids[client]] += objects
    for group in groups.values():
        group.suspect = _suspicion(group)
    return sorted(groups.values(), key=lambda group: (-group.bytes, -group.count))


def _suspicion(group: Group) -> str:
    """Why these objects may be leaked, in a few words. The text states facts; the conclusion is a guess."""
    if group.what in ("function", "actor"):
        return ""
    if group.grown >= _MANY:
        return f"{group.grown:,} more than at the first look"
    if group.count >= _MANY and len(group.holders) == 1:
        (pid,) = group.holders
        return f"process {pid} alone holds {group.count:,} of one line" if group.site not in (UNKNOWN, OTHERS) else ""
    if group.count and not group.holders and group.bytes >= 1 << 20:
        return "held only inside other values or by waiting tasks"
    return ""
