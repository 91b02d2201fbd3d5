"""The last processes of the session that have ended, and how: `ray.util.state` lists them, and the actors they ran.

The daemon keeps these rows in its own memory, because nothing depends on them: a daemon that takes over has none.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.objects.functions import function_name
from fastrt._core.tasks import actors
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError
from fastrt.node.memory_limit import LACK
from fastrt.store.join import Link
from fastrt.store.messages import Message
from fastrt.store.process_messages import EndedProcess, EndedProcessList, ListEndedProcesses
from fastrt.tasks.actor_records import CONSTRUCTOR_RAISED

_KEPT_MAX = 500  # the answer stays far below the greatest size of a message
_KINDS = clients.KIND_DRIVER, clients.KIND_WORKER, clients.KIND_ACTOR


class EndedProcesses:
    """Rows of drivers, workers and actors' processes that have ended.

    Args:
        client: the daemon's attachment.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rows: deque[EndedProcess] = deque(maxlen=_KEPT_MAX)

    @property
    def handlers(self) -> dict[type[Message], Callable[[Link, Any], None]]:
        """The method for each message that asks for the rows."""
        return {ListEndedProcesses: self._on_list}

    def _on_list(self, link: Link, message: ListEndedProcesses) -> None:
        link.send(EndedProcessList(list(self._rows)))

    def about(self, slot: int, how: str, status: int | None, has_left: bool) -> EndedProcess | None:
        """Return the row of a process that has ended, from its records, which its recovery will change.

        Args:
            slot: its client slot.
            how: how it ended, see `janitor.explain`.
            status: its wait status, where known.
            has_left: whether it said before that it leaves the session.
        """
        rows = clients.table(self._client.segment, slot)
        if not rows or rows[0]["kind"] not in _KINDS:
            return None
        (row,) = rows
        how = how.partition("\n")[0]
        actor: tuple[str, str, str, int] = "", "", "", 0
        try:
            cause, detail = self._cause(row, how, status, has_left)
            actor = self._actor(row) or actor
        except (FastrtError, LookupError, ValueError):  # the process has damaged its records; its recovery copes
            cause, detail = "SYSTEM_ERROR", f"the process {how}"
        return EndedProcess(
            slot, row["gen"], row["pid"], row["kind"], row["start_time"], int(time.time() * 1000), cause, detail, *actor
        )

    def add(self, row: EndedProcess | None) -> None:
        """Keep the row of a process."""
        if row is not None:
            self._rows.append(row)

    def _actor(self, row: dict[str, Any]) -> tuple[str, str, str, int] | None:
        """Return what `EndedProcess` has of an actor; None if the process ran none, or its actor may start again."""
        for actor in actors.of_client(self._client, row["client"]) if row["kind"] == clients.KIND_ACTOR else ():
            info = actors.info(self._client, actor)
            if info["ended"] or info["released"]:
                its_class = function_name(self._client, info["function"])
                return f"{info['object'][0]:016x}", its_class, info["name"], info["restarts"]
        return None

    def _cause(self, row: dict[str, Any], how: str, status: int | None, has_left: bool) -> tuple[str, str]:
        """The kind of the cause, in Ray's words, and the cause in ours."""
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        if LACK in how:
            return "NODE_OUT_OF_MEMORY", how
        if row["kind"] == clients.KIND_DRIVER and has_left:
            return "INTENDED_USER_EXIT", "the driver has left the session, by shutdown() or at its end"
        for actor in actors.of_client(self._client, row["client"]) if row["kind"] == clients.KIND_ACTOR else ():
            info = actors.info(self._client, actor)
            if info["ended"] == actors.FAILED and info["reason"].startswith(CONSTRUCTOR_RAISED):
                return "USER_ERROR", f"an exception in the initialization method: {info['reason']}"
            if info["ended"] or info["released"]:
                by_user = info["ended"] == actors.EXITED
                return f"INTENDED_{'USER' if by_user else 'SYSTEM'}_EXIT", info["reason"] or "its last handle is gone"
        if row["task"] is not None and core.cancelled(self._client, row["task"]):
            return "INTENDED_USER_EXIT", "its task was cancelled with force"
        if number == signal.SIGKILL:
            why = "the kernel does this when memory is short (OOM), or a program did"
            return "SYSTEM_ERROR", f"the process {how}; {why}"
        if number or status is None:
            return "SYSTEM_ERROR", f"the process {how}"
        if code := os.waitstatus_to_exitcode(status):
            return "SYSTEM_ERROR", f"the process ended with exit code {code}"
        if row["kind"] == clients.KIND_WORKER:
            return "INTENDED_SYSTEM_EXIT", "the worker was idle, or had run as many tasks as max_calls allows"
        return "INTENDED_USER_EXIT", f"the process {how}"
