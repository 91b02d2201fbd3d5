"""The processes that have joined a session: their client slots, pidfds and connections."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastrt._core.memory.clients import (
    JOB_BITS,
    KIND_ACTOR,
    KIND_DRIVER,
    KIND_TOOL,
    KIND_WORKER,
    admit,
    readmit,
)
from fastrt._core.memory.segment import Segment
from fastrt.errors import FastrtError
from fastrt.node.worker_pool import kill_group, pidfd_of
from fastrt.store.join import Link
from fastrt.store.messages import CollectGarbage, Join, JoinAgain, Joined, Reconnect, Reconnected, Refused
from fastrt.versions import are_versions, disagreement

_KINDS = {"driver": KIND_DRIVER, "worker": KIND_WORKER, "tool": KIND_TOOL, "actor": KIND_ACTOR, "child": KIND_TOOL}
FORKED = ("worker", "actor")  # processes that the zygote forks
_HOLDERS = ("driver", *FORKED)  # processes whose code may hold references
_GARBAGE_S = 10.0
_MAY_RETURN = ("driver", "tool")  # processes that may leave and join again
_RESERVED_SLOTS = {"driver": 2, "tool": 4}  # slots above the limit, so that one can always examine a full session


class Member:
    """A process that has joined: its slot, its pidfd, its connection (None until it connects to a new daemon)."""

    def __init__(self, pid: int, index: int, gen: int, kind: str, pidfd: int, link: Link | None) -> None:
        self.pid = pid
        self.index = index
        self.gen = gen  # of the slot
        self.kind = kind
        self.pidfd = pidfd
        self.link = link
        self.logs = ""  # which output of workers it reads, see `join.join`
        self.left = False
        self.gone_at = 0.0  # by the clock, once it has ended

    @property
    def job(self) -> int:
        """The number of its job if it is a driver."""
        return self.gen << 16 | (self.index + 1)  # as `Client.job`


class Members:
    """The members of a session by their pids.

    Args:
        segment: the session's.
        selector: watches the pidfds.
        log_to_driver: whether members may read the output of workers.

    Attributes:
        had_driver: whether a driver has ever joined.
    """

    def __init__(self, segment: Segment, selector: selectors.BaseSelector, log_to_driver: bool) -> None:
        self._segment = segment
        self._selector = selector
        self._log_to_driver = log_to_driver
        self._members: dict[int, Member] = {}
        self._garbage_due = float("-inf")
        self.had_driver = False

    def __contains__(self, pid: int) -> bool:
        return pid in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, pid: int) -> Member | None:
        """The member with this pid."""
        return self._members.get(pid)

    def by_index(self, index: int) -> Member | None:
        """The member with this client slot."""
        return next((member for member in self if member.index == index), None)

    def slot_of(self, link: Link) -> int | None:
        """The client slot of the process at a connection; None: it has ended."""
        return next((member.index for member in self if member.link is link and not member.gone_at), None)

    def has_drivers(self) -> bool:
        """Whether a driver uses the session."""
        return any(member.kind == "driver" and not member.left for member in self)

    def readers(self, job: int) -> list[Link]:
        """The connections of the processes that show the output of a job's tasks; 0: unknown, which all show.

        A driver shows that of its own job, and of those of children that it has forked. For a job of another node only
        those that show everything are named here: the uplink knows its driver.
        """
        driver = None if job >> JOB_BITS else next((one for one in self if one.job == job), None)
        is_shared = job == 0 or (driver is not None and driver.kind != "driver")  # by a child of a worker: by no driver
        while driver is not None and driver.kind == "driver" and not driver.logs:
            driver = self.get(_parent_of(driver.pid))
        links = [(one, one.link) for one in self if one.link is not None and one.logs]
        return [link for one, link in links if is_shared or one is driver or one.logs == "node"]

    def has_job(self, job: int) -> bool:
        """Whether the process with this job uses the session: a driver, or an uplink for jobs that it does not know."""
        return any(one.job == job and not one.left and not one.gone_at for one in self)

    def collect_garbage(self) -> None:
        """Have drivers, workers and actors collect their garbage, unless they were asked a moment ago."""
        if time.monotonic() < self._garbage_due:
            return
        self._garbage_due = time.monotonic() + _GARBAGE_S
        for member in self:
            if member.kind in _HOLDERS and member.link is not None and not member.link.backlog:  # else it reads nothing
                member.link.send(CollectGarbage())

    def take_over(self, row: dict[str, Any], is_orphan: bool) -> None:
        """Watch a process that joined at an earlier daemon.

        Args:
            row: of the client table.
            is_orphan: whether its zygote has ended, and a process that it forked with it. The kernel kills that one,
                but not the processes that its tasks have started.
        """
        pid, kind = row["pid"], next(name for name, known in _KINDS.items() if known == row["kind"])
        self.had_driver |= kind == "driver"
        if kind in FORKED and is_orphan:
            kill_group(pid)
        pidfd = pidfd_of(pid, row["start_time"])
        self._watch(Member(pid, row["client"], row["gen"], kind, pidfd, None))

    def join(self, link: Link, message: Join) -> bool:
        """Give a process a client slot; False when it is refused."""
        pid, kind = link.peer()[0], message.kind
        if kind not in _KINDS or pid in self:
            link.send(Refused(f"process {pid} cannot join as {kind[:40]!r}" + (" twice" if pid in self else "")))
            return False
        why = disagreement(message.versions, f"process {pid}", here="this node") if kind == "driver" else ""
        if why:
            link.send(Refused(why if are_versions(message.versions) else "it reports invalid versions"))
            return False
        try:
            # The pidfd first: from here on the process cannot be mistaken for another with its number.
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            index, gen = admit(self._segment, pid, _KINDS[kind], message.name, _RESERVED_SLOTS.get(kind, 0))
        except FastrtError as exc:
            os.close(pidfd)
            link.send(Refused(str(exc)))
            return False
        member = Member(pid, index, gen, kind, pidfd, link)
        self._watch(member)
        self._connect(member, link, message.logs)
        link.send(Joined(self._segment.name, index, gen))
        return True

    def join_again(self, link: Link, message: JoinAgain) -> None:
        """Give a process that has left the slot that it had."""
        pid = link.peer()[0]
        member = self.get(pid)
        if member is None or message.kind not in _MAY_RETURN or member.kind not in _MAY_RETURN:
            link.send(Refused(f"process {pid} cannot join again as {message.kind[:40]!r}: it has no slot to return to"))
            return
        member.kind, member.left = message.kind, False
        member.gen = readmit(self._segment, member.index, _KINDS[member.kind], message.name)
        self._connect(member, link, message.logs)
        link.send(Joined(self._segment.name, member.index, member.gen))

    def reconnect(self, link: Link, message: Reconnect) -> None:
        """Take the connection of a process that joined at an earlier daemon."""
        pid = link.peer()[0]
        member = self.get(pid)
        if member is None:
            link.send(Refused(f"process {pid} has no client slot in this session"))
            return
        self._connect(member, link, message.logs)
        link.send(Reconnected())

    def leaver(self, pid: int) -> Member | None:
        """The member with this pid if it may leave and join again."""
        member = self.get(pid)
        return member if member is not None and member.kind in _MAY_RETURN else None

    def remove(self, member: Member) -> None:
        """Forget a member that has ended."""
        if member.pidfd >= 0:
            os.close(member.pidfd)
        del self._members[member.pid]

    def _connect(self, member: Member, link: Link, logs: str) -> None:
        self.had_driver |= member.kind == "driver"
        member.link = link
        member.logs = logs if self._log_to_driver else ""

    def _watch(self, member: Member) -> None:
        self._members[member.pid] = member
        if member.pidfd < 0:
            member.gone_at = time.monotonic()
        else:
            self._selector.register(member.pidfd, selectors.EVENT_READ, lambda fd: self._on_death(member))

    def _on_death(self, member: Member) -> None:
        self._selector.unregister(member.pidfd)
        member.gone_at = time.monotonic()


def _parent_of(pid: int) -> int:
    """The process that has started another one; 0: that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
