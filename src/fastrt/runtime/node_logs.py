"""Reads the logs of one or several nodes together: a node on this machine by its files, another one by its uplink."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from fastrt.errors import AttachError, FastrtError
from fastrt.node.log_files import LogFolder, LogLine, Page, find_folders
from fastrt.observe import elsewhere, log_files
from fastrt.observe.answers import ROWS_MAX
from fastrt.runtime.nodefile import NodeFile
from fastrt.runtime.nodes import nodes_at

_POLL_S = 0.2
_BATCH = 500


class LocalLog(NamedTuple):
    """The log of a session on this machine.

    Attributes:
        node: the name of its node where several are read; else empty.
        folder: its files.
        wanted: task, actor, worker as for `log_files.read`.
    """

    node: str
    folder: LogFolder
    wanted: Mapping[str, Any]

    def read(self, after: str, limit: int = ROWS_MAX) -> Page:
        """Read a page of at most `limit` lines that begins where an earlier one ended."""
        return log_files.read(self.folder.path, after=after, limit=limit, **self.wanted)

    def tail(self, count: int) -> Page:
        """Read the last lines, so many."""
        return log_files.tail(self.folder.path, count, **self.wanted)

    def goes_on(self) -> bool:
        """Whether more lines may come."""
        folders = find_folders(self.folder.path.parent.parent)
        return any(one.session == self.folder.session and one.is_alive for one in folders)


class RemoteLog(NamedTuple):
    """The log of another node of a cluster.

    Attributes:
        node: its name.
        node_id: its NodeID.
        socket_path: of the daemon of the node on this machine.
        wanted: task, actor, worker as for `log_files.read`.
    """

    node: str
    node_id: str
    socket_path: str
    wanted: Mapping[str, Any]

    def read(self, after: str, limit: int = ROWS_MAX) -> Page:
        """Read a page of at most `limit` lines that begins where an earlier one ended.

        Raises:
            NodeSilentError: the node did not answer.
        """
        return elsewhere.read_log(self.socket_path, self.node_id, self.wanted, after, limit=limit)

    def tail(self, count: int) -> Page:
        """Read the last lines, so many.

        Raises:
            NodeSilentError: the node did not answer.
        """
        return elsewhere.tail_log(self.socket_path, self.node_id, count, self.wanted)

    def goes_on(self) -> bool:
        """Whether the node is still a member of the cluster."""
        try:
            return any(one["NodeID"] == self.node_id for one in nodes_at(self.socket_path))
        except AttachError:
            return False


Log = LocalLog | RemoteLog
OnSilent = Callable[[str, FastrtError], None]


def logs_of(nodes: Sequence[NodeFile], node: str, wanted: Mapping[str, Any]) -> list[Log]:
    """Find the logs of a cluster's nodes.

    Args:
        nodes: the nodes on this machine; only their clusters are searched.
        node: the name of one node, or the beginning of its NodeID; empty: all nodes of the first cluster.
        wanted: task, actor, worker as for `log_files.read`.
    Returns:
        The logs; none if there is no such node. A node on this machine that has printed nothing is left out.
    """
    for here in nodes:
        try:
            logs = logs_at(here.socket_path, node, wanted)
        except AttachError:
            continue
        if logs is not None:
            return logs
    return []


def logs_at(socket_path: str, node: str, wanted: Mapping[str, Any]) -> list[Log] | None:
    """Find the logs of the cluster to which the daemon at a socket belongs.

    Args:
        socket_path: of the daemon of the node on this machine.
        node, wanted: as for `logs_of`.
    Returns:
        The logs, as `logs_of`; None if there is no such node.
    Raises:
        AttachError: the daemon does not answer.
    """
    members = nodes_at(socket_path)
    found = [one for one in members if not node or one["NodeName"] == node or one["NodeID"].startswith(node)]
    logs: list[Log] = []
    for one in found:
        if not one["IsHere"]:
            logs.append(RemoteLog(one["NodeName"], one["NodeID"], socket_path, wanted))
            continue
        folder = log_files.folder_of(socket_path)
        if folder is not None:
            logs.append(LocalLog(one["NodeName"], folder, wanted))
    return logs if found else None


def read(
    logs: Sequence[Log], on_silent: OnSilent, *, count: int | None = None, follow: bool = False
) -> Iterator[list[tuple[str, LogLine]]]:
    """Iterate over the lines of logs, by the time at which they were printed.

    Args:
        logs: of one or several nodes.
        on_silent: called with the name of a node that does not answer, and the reason.
        count: only the last lines, so many; None: all.
        follow: whether to wait for further lines, until no log goes on.
    Returns:
        An iterator over lists of (name of the node, line). One that follows gives lines as they come.
    """
    places = [""] * len(logs)

    def pages(k: int) -> Iterator[Page]:
        try:
            if count is not None:
                page = logs[k].tail(count)
                places[k] = page.after
                yield page
                return
            is_end = False
            while not is_end:
                page = logs[k].read(places[k])
                is_end = page.is_end or (page.after == places[k] and not page.lines)
                places[k] = page.after
                yield page
        except FastrtError as exc:
            on_silent(logs[k].node, exc)

    def lines(k: int) -> Iterator[tuple[str, LogLine]]:
        return ((logs[k].node, line) for line in chain.from_iterable(page.lines for page in pages(k)))

    merged = heapq.merge(*map(lines, range(len(logs))), key=lambda one: one[1].time)
    if count is not None:
        yield list(merged)[-count:] if count else []
    while batch := list(islice(merged, _BATCH)):
        yield batch
    if follow:
        yield from _follow(logs, places, on_silent)


def _follow(logs: Sequence[Log], places: list[str], on_silent: OnSilent) -> Iterator[list[tuple[str, LogLine]]]:
    silent: set[int] = set()
    open_ = dict(enumerate(logs))
    while open_:
        found: list[tuple[str, LogLine]] = []
        for k, log in list(open_.items()):
            goes_on = log.goes_on()  # before its last page
            try:
                page = log.read(places[k])
            except FastrtError as exc:
                if k not in silent:
                    silent.add(k)
                    on_silent(log.node, exc)
                if not goes_on:
                    del open_[k]
                continue
            silent.discard(k)
            places[k] = page.after
            found += ((log.node, line) for line in page.lines)
            if not page.lines and page.is_end and not goes_on:
                del open_[k]
        yield sorted(found, key=lambda one: one[1].time)
        if not found and open_:
            time.sleep(_POLL_S)
