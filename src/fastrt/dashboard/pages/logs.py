"""Logs, the output of tasks and actors: the end as it grows, or page by page. They stay when the session ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrt.dashboard import sections
from fastrt.dashboard.log_readers import LINES, LogReader, LogReaders
from fastrt.dashboard.sections import Section
from fastrt.dashboard.watched import LIVE, Watched
from fastrt.errors import AttachError
from fastrt.node.log_files import LogFolder
from fastrt.runtime.node_logs import LocalLog, Log, RemoteLog
from fastrt.runtime.nodes import nodes_at

_FILTERS = ("task", "actor", "worker", "node", "of")
_EMPTY = (
    "No line matches. What tasks and actors print is here, also after the end of the program, unless the session was "
    "started with log_bytes=0."
)


def logs(readers: LogReaders, session: Watched | None, args: Mapping[str, str]) -> list[Section]:
    """A log: of a task, an actor, a process or a node, of this session or of one that has ended.

    Args:
        readers: of the dashboard.
        session: the chosen one; None: none runs here.
        args: task (its id, or the beginning of it), actor (name, class or number), worker (pid), node (name or the
            beginning of its NodeID), of (an earlier session); after: "start" or the place of a page; without it, the
            end of the log is followed.
    Raises:
        ValueError: worker is no number.
    """
    wanted = {name: args[name] for name in _FILTERS if args.get(name)}
    after, folders = args.get("after", ""), readers.sessions()
    nodes = _nodes(session)
    log, words = _chosen(session, wanted, folders, nodes)
    found = [
        sections.choices("filter", [
            ("task", "task", args.get("task", ""), ()),
            ("actor", "actor, its name or class", args.get("actor", ""), ()),
            ("worker", "process", args.get("worker", ""), ()),
            *([("node", "node", args.get("node", ""), ["", *nodes.values()])] if len(nodes) > 1 else []),
        ]),
        sections.links("ways", [
            sections.link("follow the end", "logs", **wanted),
            sections.link("from the beginning", "logs", **wanted, after="start"),
        ]),
    ]  # fmt: skip
    if log is None:
        found.append(sections.text("nothing", words))
    else:
        name = session.name if session is not None else ""
        reader = readers.reader((name, *(wanted.get(one, "") for one in _FILTERS)), log, after)
        found += _of_reader(reader, wanted, after)
    return [*found, _sessions(folders)]


def _of_reader(reader: LogReader, wanted: Mapping[str, str], after: str) -> list[Section]:
    if reader.why:
        return [sections.text("silent", f"The log cannot be read: {reader.why}", "warn")]
    if not reader.is_read.is_set():
        return [sections.text("wait", "The log is being read.")]
    lines = reader.lines
    if after:
        title = "From the beginning" if after == "start" else "Further lines"
    else:
        title = f"The last {len(lines):,} lines" if reader.seen > len(lines) else "All lines"
    more = sections.link("next page", "logs", **wanted, after=reader.next) if reader.next else None
    rows = [
        [line.time, line.is_error, line.source.name, line.pid, f"{line.source.task:016x}" if line.source.task else "",
         line.text] for line in lines
    ]  # fmt: skip
    node = {"node": wanted["node"]} if "node" in wanted else {}
    return [sections.log("log", title, rows, _EMPTY, not after, node, more)]


def _chosen(
    session: Watched | None, wanted: Mapping[str, str], folders: list[LogFolder], nodes: Mapping[str, str]
) -> tuple[Log | None, str]:
    """The log to read; None and the reason if there is none."""
    worker = wanted.get("worker", "0")
    if not (worker.isascii() and worker.isdecimal() and len(worker) < 10):
        raise ValueError(f"process {worker!r} is no number")
    filters: dict[str, Any] = {
        "task": wanted.get("task", "").lower(), "actor": wanted.get("actor", ""), "worker": int(worker),
    }  # fmt: skip
    node = wanted.get("node", "")
    if node and "of" not in wanted and session is not None and nodes:
        ids = [one for one, name in nodes.items() if name == node or one.startswith(node)]
        if not ids:
            return None, f"There is no node {node} in the cluster."
        if ids[0] != next(iter(nodes)):
            return RemoteLog(nodes[ids[0]], ids[0], str(session.path), filters), ""
    name = wanted.get("of", session.name if session is not None else "")
    folder = next((one for one in folders if one.session == name), None)
    if folder is None:
        return None, "The session has printed nothing yet." if name else "No session runs here: choose one below."
    return LocalLog("", folder, filters), ""


def _nodes(session: Watched | None) -> dict[str, str]:
    """The names of the cluster's nodes by NodeID, this one first; none if the daemon does not answer."""
    if session is None or session.state != LIVE:
        return {}
    try:
        return {one["NodeID"]: one["NodeName"] or "this node" for one in nodes_at(str(session.path))}
    except AttachError:
        return {}


def _sessions(folders: list[LogFolder]) -> Section:
    return sections.table(
        "sessions", "Sessions whose lines are kept on this machine", [
            ("session", "code"), ("program", "text"), ("node", "text"), ("state", "state"), ("first line", "time"),
            ("last line", "time"), ("bytes", "bytes"),
        ], (
            (
                sections.link(one.session[:8], "logs", of=one.session), one.program, one.node,
                "running" if one.is_alive else "ended", one.started, one.written, one.nbytes,
            ) for one in folders
        ), f"None. The lines of the last five sessions stay, and {LINES} lines are a page.",
    )  # fmt: skip
