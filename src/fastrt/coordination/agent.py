"""A member of a coordinated job, for asyncio: the caller's side of the coordination service.

In the background an agent sends heartbeats and polls for errors of other tasks. It gives up a coordinator that does
not answer for `lost_after_s`, so that no call waits forever.

Source: `CoordinationServiceAgent` in XLA.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from fastrt.coordination.connection import LONG_S, RETRY_S, Connection, message
from fastrt.coordination.errors import CoordinationError, CoordinationTimeoutError, CoordinatorLostError
from fastrt.coordination.keys import AsyncKeys
from fastrt.coordination.status import Code
from fastrt.net.grpc.descriptors import message_set

_log = logging.getLogger(__name__)

_Task = message_set("coordination_tensorflow").message("tensorflow.CoordinatedTask")
_LAST_WORDS_S = 2.0
_STATES = {2: "disconnected", 3: "connected", 4: "error"}
# Added to a barrier's timeout before this side gives up: the service's answer names the missing tasks.
_GRACE_S = 10.0


@dataclass(frozen=True)
class TaskView:
    """The view of a task that `watch` returns.

    Attributes:
        task_id: its number.
        state: "disconnected", "connected" or "error".
        incarnation: the incarnation of its process; 0 before it first registered.
        error: the message of its error, else "".
    """

    task_id: int
    state: str
    incarnation: int
    error: str


class AsyncAgent(AsyncKeys):
    """One task's connection to its coordinator. Made by `connect_async`; all methods belong to its event loop.

    Attributes:
        task_id: this task's number.
        incarnation: this process's incarnation, random.
        error: the failure that was reported to this task; None while there is none.
    """

    def __init__(
        self,
        address: str,
        task_id: int,
        job: str,
        heartbeat_interval_s: float,
        recoverable: bool,
        lost_after_s: float,
        on_error: Callable[[CoordinationError], None] | None,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        # Before the connection is opened: an argument that cannot be sent raises here.
        self._task = message("RegisterTask", _Task, job_name=job, task_id=task_id, recoverable=recoverable)
        super().__init__(Connection(address, "this agent has left the job. Connect again.", credentials))
        self.task_id = task_id
        self.incarnation = random.SystemRandom().getrandbits(63) | 1
        self.error: CoordinationError | None = None
        self._job = job
        self._interval_s = heartbeat_interval_s
        self._lost_after_s = lost_after_s
        self._on_error = [on_error] if on_error is not None else []
        self._rounds: dict[str, int] = {}
        self._background: list[asyncio.Task[None]] = []
        self._reported = False
        self._closed = False

    async def __aenter__(self) -> AsyncAgent:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and self.error is None and not self._closed:
            self._reported = True
            fields = {"error_code": int(Code.INTERNAL), "error_origin": self._task}
            await self._quietly("ReportErrorToService", error_message=f"{kind.__name__}: {error}", **fields)
        await self.close(wait=error is None)

    async def register(self, timeout_s: float) -> None:
        """Join the job: returns when all its tasks have joined. `connect_async` calls this.

        Raises:
            CoordinationTimeoutError: not all tasks joined in time.
            CoordinationError: the service does not expect this task, or has another process for it.
        """
        try:
            await self._call("RegisterTask", timeout_s, incarnation=self.incarnation, source_task=self._task)
        except BaseException:
            await self._connection.close()
            raise
        self._background = [asyncio.create_task(self._beat()), asyncio.create_task(self._poll())]

    async def close(self, wait: bool = True, timeout_s: float = 300.0) -> None:
        """Leave the job.

        Args:
            wait: wait until all tasks close too (the shutdown barrier); else just disconnect. After an error, neither.
            timeout_s: how long to wait at most.

        Raises:
            CoordinationError: other tasks failed, or did not close in time.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self.error is None and not self._reported:
                if wait:
                    await self._call("ShutdownTask", timeout_s, source_task=self._task)
                else:
                    await self._quietly("ResetTask", source_task=self._task)
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._connection.close()

    async def barrier(self, barrier_id: str, timeout_s: float = 60.0, tasks: Iterable[int] | None = None) -> None:
        """Wait until all tasks (or those given) have arrived. An id may be used repeatedly.

        Raises:
            CoordinationTimeoutError: some tasks did not arrive in time; the message names them.
            CoordinationError: a task failed, or the tasks disagree about the participants.
        """
        counter = self._rounds.get(barrier_id, -1) + 1
        self._rounds[barrier_id] = counter
        await self._call(
            "Barrier",
            timeout_s + _GRACE_S,
            barrier_id=barrier_id,
            barrier_timeout_in_ms=int((max(timeout_s, 0.0) if timeout_s < LONG_S else LONG_S) * 1000),
            tasks=self._tasks(tasks),
            source_task=self._task,
            counter=counter,
        )

    async def report_error(self, message: str, code: str = "INTERNAL") -> None:
        """Report to all tasks that this one has failed.

        Args:
            message: what happened.
            code: a gRPC status code's name.

        Raises:
            CoordinationError: there is no such code, or this task has an error already.
        """
        if code not in Code.__members__ or code == "OK":
            words = f"{code!r} is not an error code; use the name of a gRPC status code."
            raise CoordinationError(words, "INVALID_ARGUMENT")
        number = int(Code[code])
        self._reported = True  # before the call: the service reports to the reporter too, perhaps before it answers
        try:
            await self._call(
                "ReportErrorToService", None, error_code=number, error_message=message, error_origin=self._task
            )
        except CoordinationError:
            self._reported = False
            raise

    async def alive_tasks(self, tasks: Iterable[int] | None = None, timeout_s: float | None = None) -> dict[int, int]:
        """The incarnations of the tasks that are alive, by task. All of them must make this call.

        Raises:
            CoordinationTimeoutError: a task that is alive did not make the call in time.
        """
        asked = self._tasks(tasks) or [
            _Task(job_name=self._job, task_id=one.task_id) for one in (await self.watch())[1]
        ]
        answer = await self._call("GetAliveTasks", timeout_s, requesting_task=self._task, tasks=asked)
        return {task.task_id: number for task, number in zip(answer.alive_tasks, answer.incarnations, strict=True)}

    async def watch(self, version: int | None = None, timeout_s: float | None = None) -> tuple[int, list[TaskView]]:
        """The state of all tasks, and its version.

        Args:
            version: wait until the version differs from this one; None answers at once.
            timeout_s: how long to wait.

        Raises:
            CoordinationTimeoutError: nothing changed in time.
        """
        seen = -1 if version is None else version
        answer = await self._call("WatchJobState", timeout_s, job_name=self._job, version_number=seen)
        views = [
            TaskView(info.task.task_id, _STATES.get(info.state, "unknown"), info.incarnation, info.error_message)
            for info in answer.task_state
        ]
        return answer.version_number, views

    def on_error(self, callback: Callable[[CoordinationError], None]) -> None:
        """Register a callback that runs once, when any task fails; at once if one has failed already."""
        if self.error is not None:
            callback(self.error)
        else:
            self._on_error.append(callback)

    def fail(self, error: CoordinationError) -> None:
        """Set this task's error, unless it has one, and run the callbacks."""
        if self.error is not None:
            return
        self.error = error
        callbacks, self._on_error = self._on_error, []
        for callback in callbacks:
            try:
                callback(error)
            except Exception:  # the other callbacks must run all the same
                _log.exception("a callback of on_error failed")

    def _tasks(self, tasks: Iterable[int] | None) -> list[Any]:
        return [message("tasks", _Task, job_name=self._job, task_id=number) for number in tasks or ()]

    async def _quietly(self, method: str, **fields: Any) -> None:
        """Make a call while leaving; an error is logged, because raising it would hide the original one."""
        try:
            await self._call(method, _LAST_WORDS_S, **fields)
        except CoordinationError as error:
            _log.warning("the coordinator could not be notified that this task leaves: %s", error)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._call("Heartbeat", self._lost_after_s, incarnation=self.incarnation, source_task=self._task)
            except CoordinationTimeoutError:
                lost = f"No coordinator answered on {self._connection.address} for {self._lost_after_s:g} s."
                self.fail(CoordinatorLostError(lost, "UNAVAILABLE"))
                self._connection.give_up(lost)
                return
            except CoordinationError as error:
                self.fail(error)
                return

    async def _poll(self) -> None:
        while True:
            try:
                await self._call("PollForError", None, source_task=self._task)
            except CoordinationError as error:
                if error.code == "CANCELLED":
                    # The service shuts down, perhaps to restart: heartbeats decide whether it is lost.
                    await asyncio.sleep(RETRY_S)
                    continue
                self.fail(error)
                return


async def connect_async(
    address: str,
    task_id: int = 0,
    *,
    job: str = "jax_worker",
    timeout_s: float = 60.0,
    heartbeat_interval_s: float = 2.0,
    recoverable: bool = False,
    lost_after_s: float = 300.0,
    on_error: Callable[[CoordinationError], None] | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncAgent:
    """Join a job as one of its tasks, from asyncio.

    Args:
        address: `host:port` of the coordinator.
        task_id: this task's number, from 0.
        job: the job's name, the same as at the coordinator.
        timeout_s: how long to wait for the coordinator and for all other tasks.
        heartbeat_interval_s: seconds between heartbeats; keep it well below the coordinator's timeout.
        recoverable: this task may die and restart without the others failing.
        lost_after_s: how long the coordinator may be unreachable, for instance to restart, before this task gives it
            up: all its calls then end with `CoordinatorLostError`, and that is its error.
        on_error: called, once, when any task has failed.
        credentials: for a coordinator that uses TLS.
    Returns:
        The agent; use it with `async with`, or `close` it.
    Raises:
        CoordinationTimeoutError: the coordinator did not answer, or not all tasks joined, in time.
        CoordinationError: the coordinator does not expect this task, or has another process for it.

    Source: `jax.distributed.initialize` and the agent behind it.
    """
    agent = AsyncAgent(address, task_id, job, heartbeat_interval_s, recoverable, lost_after_s, on_error, credentials)
    await agent.register(timeout_s)
    return agent
