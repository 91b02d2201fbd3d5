"""Recovers the slots of processes that have ended, once it is known how they ended.

Two reports of one death come in any order: the pidfd of a member, and the zygote's report with the wait status of a
process that it has forked. The slot of a worker is recovered when both are there, or without a status after a moment.
"""

from __future__ import annotations

import time

from fastrt.errors import LockStuck
from fastrt.node.actors import Actors
from fastrt.node.janitor import Janitor, explain
from fastrt.node.members import FORKED, Members
from fastrt.node.memory_limit import KillCounters
from fastrt.node.memory_monitor import MemoryMonitor

_STATUS_PATIENCE_S = 0.2  # between a pidfd and the zygote's report of the same death


class Deaths:
    """The processes of a session that have ended and are not recovered yet.

    Args:
        members: the processes with slots.
        actors: learn that a process has ended.
        janitor: recovers a slot.
        monitor: knows which processes it has ended itself.
    """

    def __init__(self, members: Members, actors: Actors, janitor: Janitor, monitor: MemoryMonitor) -> None:
        self._members = members
        self._actors = actors
        self._janitor = janitor
        self._monitor = monitor
        self._kills = KillCounters(time.monotonic())
        self._statuses: dict[int, int] = {}  # by pid, of members
        self._unreported: set[int] = set()  # workers recovered before the zygote reported how they ended

    def look(self) -> None:
        """Read the kernel's counters of kills for lack of memory: a later death may be one of them."""
        self._kills.look(time.monotonic())

    def reported(self, pid: int, status: int) -> bool:
        """Take the zygote's report of how a process has ended; False: it was a worker that had not joined."""
        if pid in self._members:
            self._statuses[pid] = status
        elif pid in self._unreported:
            self._unreported.remove(pid)
        elif pid in self._actors:
            self._actors.ended(pid, explain(status))
        else:
            return False
        return True

    def bury(self) -> bool:
        """Recover the slots of dead processes; a worker's once the zygote has reported its end, or after a while.

        Returns:
            Whether there were any.
        """
        now = time.monotonic()
        has_buried = False
        for member in [m for m in self._members if m.gone_at]:
            reported = member.kind not in FORKED or member.pid in self._statuses
            if not reported and now - member.gone_at < _STATUS_PATIENCE_S:
                continue
            try:
                status = self._statuses.get(member.pid)
                how = self._monitor.how(member.pid, status, self._kills.story())
                self._actors.fell(member.index, member.pid, how)
                self._janitor.bury(member.index, member.pid, how, status, member.left)
            except LockStuck:
                continue  # by a stopped process; the next tick tries again
            self._actors.ended(member.pid, how)
            self._monitor.forget(member.pid)
            self._statuses.pop(member.pid, None)
            if not reported:
                self._unreported.add(member.pid)
            self._members.remove(member)
            has_buried = True
        if has_buried:
            self._janitor.end_round()
        return has_buried
