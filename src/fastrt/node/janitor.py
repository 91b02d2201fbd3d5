"""Recovery after a client's death: the core releases what it held, and its unfinished tasks end or run again."""

from __future__ import annotations

import os
import signal

from fastrt._core.memory.clients import KIND_DRIVER
from fastrt._core.objects.functions import function_name
from fastrt._core.repair.recovery import end_job, recover, wake_all
from fastrt._core.tasks import actors, cancel, tally
from fastrt._core.tasks import tasks as core
from fastrt.errors import (
    FastrtError,
    ObjectLostError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerCrashedError,
)
from fastrt.node.ended_processes import EndedProcesses
from fastrt.node.kept import StandIns
from fastrt.node.memory_limit import LACK
from fastrt.node.orphan_tasks import OrphanTasks
from fastrt.store import unread
from fastrt.store.client import Store
from fastrt.tasks.actor_records import death_of_call
from fastrt.tasks.cancel import interrupt

_SIGNALS = {one.value: f"{one.name}, " for one in signal.Signals}  # most of the real-time signals have none


class Janitor:
    """Recovers dead clients through the daemon's own attachment.

    Args:
        store: the daemon's attachment.

    Attributes:
        stand_ins: promises of values of other nodes, which another uplink may fetch.
        ended: the last processes that have ended.
        orphans: the tasks of killed processes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.stand_ins = StandIns(store.client, self._lose)
        self.ended = EndedProcesses(store.client)
        self.orphans = OrphanTasks(store)
        self.ends_session = False  # processes end by order of the daemon: errors of their calls are not news

    def bury(self, client: int, pid: int, how: str, status: int | None = None, has_left: bool = False) -> None:
        """Recover the client slot of a process that has ended. The caller calls `end_round` afterwards.

        Args:
            client: its slot.
            pid: its process id.
            how: how it ended, for `WorkerCrashedError`; see `explain`.
            status: its wait status where known: it names the signal.
            has_left: whether it said before that it leaves the session.
        """
        row = self.ended.about(client, how, status, has_left)
        kind = OutOfMemoryError if LACK in how else WorkerCrashedError
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        found = recover(self._store.client, client, False, kind.__name__, how, number)
        unread.discard()  # errors that only the dead process held
        self._end_all(found, pid, how, row is not None and row.kind == KIND_DRIVER)
        self.ended.add(row)

    def end_job(self, client: int, pid: int) -> None:
        """End the tasks of a driver that leaves the session while its process goes on.

        Args:
            client: its slot.
            pid: its process id.
        """
        self._end_all(end_job(self._store.client, client), pid, "has left", True)

    def _end_all(self, found: dict[str, list[int]], pid: int, how: str, cancels: bool) -> None:
        """End the tasks that a recovery has found; with `cancels` as cancelled: their driver has ended."""
        outlasting = [task for task in found["ending"] if self._outlasts(task)]
        for task in found["ending"]:
            if task not in outlasting:
                self._end(task, pid, how, cancels)
        self.stand_ins.add(outlasting)
        for other in set(found["running"]):
            # The result of a task of a dead driver or uplink is not needed, so its worker is not waited for. An uplink
            # that has forwarded it asks the other node to cancel it.
            interrupt(self._store, other, True)

    def end_round(self) -> None:
        """End a round of recoveries: wake all clients that wait, and end the tasks that nothing refers to any more."""
        wake_all(self._store.client)
        if not self.ends_session:
            self.orphans.find()

    def _end(self, task: int, pid: int, how: str, cancels: bool) -> None:
        store = self._store
        info = core.info(store.client, task)
        name = function_name(store.client, info["function"][0])
        error: FastrtError
        outcome = tally.CRASHED
        if info["flags"] & cancel.LATE and not core.cancelled(store.client, task):
            what = "task" if info["actor"] is None else "a call of actor"
            error = TaskTimeoutError(
                f"{what} {name!r} ran for longer than its timeout, and did not end when it was interrupted"
            )
        elif info["actor"] is not None and not cancels and not core.cancelled(store.client, task):
            record = actors.info(store.client, info["actor"])
            killed = record["ended"] == actors.KILLED
            why = (record["reason"] if killed else "") or f"its process {pid} {how}"
            error = death_of_call(store, info["actor"], f"actor {name} died while it ran this call: {why}")
            error.attempts = info["attempts"]
            error.on_purpose = self.ends_session or killed
        elif not info["function"][0]:  # a stand-in for an object of another node, which a dead process was fetching
            error = ObjectLostError(f"an object of another node is lost: process {pid}, which fetched it, ended")
        elif cancels or core.cancelled(store.client, task) or info["attempts"] == 0:
            error = TaskCancelledError(f"task {name!r} was cancelled")
            outcome = tally.CANCELLED
        else:
            kind = OutOfMemoryError if LACK in how else WorkerCrashedError
            how, line, table = how.partition("\n")
            error = kind(
                f"task {name!r} was given up after attempt {info['attempts']}: its worker, process {pid}, "
                f"{how}; raise max_retries if the cause may pass by itself{line}{table}"
            )
        store.put_error(task, error)
        core.finish(store.client, task, outcome)

    def _outlasts(self, task: int) -> bool:
        """Return whether a task is the promise of a value that the next uplink can ask for."""
        client = self._store.client
        info = core.info(client, task)
        return info["actor"] is None and not info["function"][0] and bool(core.arguments(client, task, True)[1])

    def _lose(self, task: int) -> None:
        """End a stand-in that no uplink has taken over."""
        error = ObjectLostError("an object of another node is lost: this node's uplink ended, and no other one came")
        self._store.put_error(task, error)
        core.finish(self._store.client, task)


def explain(status: int | None, memory: str = "") -> str:
    """Say in words how a process ended.

    Args:
        status: its wait status where known: it names the signal.
        memory: the report of `KillCounters`; only SIGKILL can come from a lack of memory.
    """
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        words = f"was killed by signal {number} ({_SIGNALS.get(number, '')}{signal.strsignal(number) or 'unknown'})"
        return f"{words}; {memory}" if memory and number == signal.SIGKILL else words
    return f"exited with code {os.waitstatus_to_exitcode(status)}"
