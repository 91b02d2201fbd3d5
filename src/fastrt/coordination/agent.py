"""A member of a coordinated job, for asyncio: the caller's side of the coordination service.

An agent registers its task, sends heartbeats, and polls for errors of the others, in the background. A coordinator
that stays away is given up, so that nobody waits for it for good.

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
# Added to a barrier's own timeout before this side gives up: the service's answer names who is missing.
_GRACE_S = 10.0


@dataclass(frozen=True)
class TaskView:
    """A task as `watch` shows it.

    Attributes:
        task_id: its number.
        state: "disconnected", "connected" or "error".
        incarnation: of its process; 0 before it first registered.
        error: why it is in error, else "".
    """

    task_id: int
    state: str
    incarnation: int
    error: str


class AsyncAgent(AsyncKeys):
    """One task's connection to its coordinator. Made by `connect_async`; all methods belong to its event loop.

    Attributes:
        task_id: this task's number.
        incarnation: of this process, random.
        error: the failure that this task was told of; None while there is none.
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
        # First: what cannot be sent is refused while there is no connection to close.
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
        """Join the job: returns when all its tasks have. `connect_async` calls this.

        Raises:
            CoordinationTimeoutError: not all tasks came in time.
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
            wait: for all tasks to be done too (the shutdown barrier); else just disconnect. Neither after an error.
            timeout_s: how long to wait at most.

        Raises:
            CoordinationError: others failed, or did not come to the end in time.
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
        """Wait until all tasks (or those given) have come here. An id may be used again and again.

        Raises:
            CoordinationTimeoutError: some did not come in time; the message names them.
            CoordinationError: a task failed, or the tasks disagree on who takes part.
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
        """Tell all tasks that this one has failed.

        Args:
            message: what happened.
            code: a gRPC status code's name.

        Raises:
            CoordinationError: there is no such code, or this task has an error already.
        """
        if code not in Code.__members__ or code == "OK":
            words = f"{code!r} is no error's code; use the name of a gRPC status code."
            raise CoordinationError(words, "INVALID_ARGUMENT")
        number = int(Code[code])
        self._reported = True  # before the call: the service tells the reporter too, and that may come first
        try:
            await self._call(
                "ReportErrorToService", None, error_code=number, error_message=message, error_origin=self._task
            )
        except CoordinationError:
            self._reported = False
            raise

    async def alive_tasks(self, tasks: Iterable[int] | None = None, timeout_s: float | None = None) -> dict[int, int]:
        """Which tasks are alive, with their incarnations. All living ones of those asked about must ask.

        Raises:
            CoordinationTimeoutError: a living task did not ask in time.
        """
        asked = self._tasks(tasks) or [
            _Task(job_name=self._job, task_id=one.task_id) for one in (await self.watch())[1]
        ]
        answer = await self._call("GetAliveTasks", timeout_s, requesting_task=self._task, tasks=asked)
        return {task.task_id: number for task, number in zip(answer.alive_tasks, answer.incarnations, strict=True)}

    async def watch(self, version: int | None = None, timeout_s: float | None = None) -> tuple[int, list[TaskView]]:
        """The state of all tasks, and its version.

        Args:
            version: wait until the state is another than this one; None answers at once.
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
        """Call back, once, when any task has failed; at once if that was so before."""
        if self.error is not None:
            callback(self.error)
        else:
            self._on_error.append(callback)

    def fail(self, error: CoordinationError) -> None:
        """This task was told of a failure."""
        if self.error is not None:
            return
        self.error = error
        callbacks, self._on_error = self._on_error, []
        for callback in callbacks:
            try:
                callback(error)
            except Exception:  # the others must hear of it all the same
                _log.exception("a callback of on_error failed")

    def _tasks(self, tasks: Iterable[int] | None) -> list[Any]:
        return [message("tasks", _Task, job_name=self._job, task_id=number) for number in tasks or ()]

    async def _quietly(self, method: str, **fields: Any) -> None:
        """Make a call on the way out, where an error would hide what came before and change nothing."""
        try:
            await self._call(method, _LAST_WORDS_S, **fields)
        except CoordinationError as error:
            _log.warning("leaving, the coordinator could not be told: %s", error)

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
                    # The service shuts down, perhaps to come back: heartbeats will tell.
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
        job: the job's name, as the coordinator was told.
        timeout_s: how long to wait for the coordinator and for all other tasks.
        heartbeat_interval_s: seconds between signs of life; keep it well below the coordinator's timeout.
        recoverable: this task may die and be started again without the others failing.
        lost_after_s: how long the coordinator may be away, perhaps to be started again, until this task gives it up:
            all its calls then end with `CoordinatorLostError`, and that is its error.
        on_error: called, once, when any task has failed.
        credentials: for a coordinator that uses TLS.
    Returns:
        The agent; use it with `async with`, or `close` it.
    Raises:
        CoordinationTimeoutError: the coordinator was not found, or not all tasks came, in time.
        CoordinationError: the coordinator does not expect this task, or has another process for it.

    Source: `jax.distributed.initialize` and the agent behind it.
    """
    agent = AsyncAgent(address, task_id, job, heartbeat_interval_s, recoverable, lost_after_s, on_error, credentials)
    await agent.register(timeout_s)
    return agent
