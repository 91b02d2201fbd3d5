"""After a client's death: have the core give back what it held, and end the tasks that cannot go on."""

from __future__ import annotations

import os
import signal

from fastrt._core.objects.functions import function_name
from fastrt._core.repair.recovery import end_job, recover, wake_all
from fastrt._core.tasks import actors, cancel
from fastrt._core.tasks import tasks as core
from fastrt.errors import (
    ActorDiedError,
    FastrtError,
    ObjectLostError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerCrashedError,
)
from fastrt.node.memory_limit import LACK
from fastrt.store import unread
from fastrt.store.client import Store
from fastrt.tasks.cancel import interrupt


class Janitor:
    """Recovers dead clients through the daemon's own attachment."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def bury(self, client: int, pid: int, how: str) -> None:
        """Recover the client slot of a process that has ended. `wake_all` is still to be called.

        Args:
            client: its slot.
            pid: its process id.
            how: it ended, for `WorkerCrashedError`; see `explain`.
        """
        found = recover(self._store.client, client, False)
        unread.discard()  # errors that the dead process held: no process is left that they are for
        self._end_all(found, pid, how)

    def end_job(self, client: int, pid: int) -> None:
        """End the tasks of a driver that leaves the session, and whose process goes on.

        Args:
            client: its slot.
            pid: its process id.
        """
        self._end_all(end_job(self._store.client, client), pid, "has left")

    def _end_all(self, found: dict[str, list[int]], pid: int, how: str) -> None:
        for task in found["ending"]:
            self._end(task, pid, how)
        for other in set(found["running"]):
            # A dead driver's task: nobody wants its result, so its worker is not worth waiting for. One that only
            # lent it to another node is told to ask for its end there.
            interrupt(self._store, other, True)

    def wake_all(self) -> None:
        """Make all clients look again at what they wait for; after the last of some burials."""
        wake_all(self._store.client)

    def _end(self, task: int, pid: int, how: str) -> None:
        store = self._store
        info = core.info(store.client, task)
        name = function_name(store.client, info["function"][0])
        error: FastrtError
        if info["flags"] & cancel.LATE and not core.cancelled(store.client, task):
            what = "task" if info["actor"] is None else "a call of actor"
            error = TaskTimeoutError(
                f"{what} {name!r} ran for longer than its timeout, and did not end when it was told"
            )
        elif info["actor"] is not None and not core.cancelled(store.client, task):
            error = ActorDiedError(f"actor {name} died while it ran this call: its process {pid} {how}")
            error.attempts = info["attempts"]
            error.on_purpose = actors.info(store.client, info["actor"])["ended"] == actors.KILLED
        elif not info["function"][0]:  # a stand-in, of which another process was to make an object of another node
            error = ObjectLostError(f"an object of another node is lost: process {pid}, which fetched it, ended")
        elif core.cancelled(store.client, task) or info["attempts"] == 0:
            error = TaskCancelledError(f"task {name!r} was cancelled")
        else:
            kind = OutOfMemoryError if LACK in how else WorkerCrashedError
            error = kind(
                f"task {name!r} was given up after {info['attempts']} attempts: its worker, process {pid}, "
                f"{how}; raise max_retries if the cause may pass by itself"
            )
        store.put_error(task, error)
        core.finish(store.client, task)


def explain(status: int | None, memory: str = "") -> str:
    """Say in words how a process ended.

    Args:
        status: its wait status where known: it names the signal.
        memory: what the kernel's counters say of lack of memory; only SIGKILL can have come from that.
    """
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        words = f"was killed by signal {number} ({signal.strsignal(number) or 'unknown'})"
        return f"{words}; {memory}" if memory and number == signal.SIGKILL else words
    return f"exited with code {os.waitstatus_to_exitcode(status)}"
