"""A member of a coordinated job, for asyncio: the caller's side of the coordination service.

An agent registers its task, sends heartbeats, and polls for errors of the others, in the background. A coordinator
that is restarted on its records is found again: blocked and failed calls are made again, except those whose effect
would then be doubled. One that stays away is given up, so that nobody waits for it for good.

Source: `CoordinationServiceAgent` in XLA; the wire is `tensorflow.CoordinationService`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from fastrt.coordination.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    CoordinatorLostError,
    KeyExistsError,
    KeyMissingError,
)
from fastrt.coordination.status import Code
from fastrt.rpc.channel import open_aio_channel
from fastrt.rpc.descriptors import message_set

_log = logging.getLogger(__name__)

_SERVICE = "tensorflow.CoordinationService"
_SET = message_set("coordination_tensorflow")
_METHODS = _SET.methods(_SERVICE)
_Task = _SET.message("tensorflow.CoordinatedTask")
_ErrorPayload = _SET.message("tensorflow.CoordinationServiceError")
_Payloads = message_set("coordination").message("fastrt.coordination.StatusPayloads")
_ERROR_URL = "type.googleapis.com/tensorflow.CoordinationServiceError"
_RETRY_S = 0.2
_LAST_WORDS_S = 2.0
_STATES = {2: "disconnected", 3: "connected", 4: "error"}
# Added to a barrier's own timeout before this side gives up: the service's answer names who is missing.
_GRACE_S = 10.0
# Longer timeouts, infinite ones too, are none: neither gRPC's clock nor the wire's milliseconds hold them all.
_LONG_S = 1e9


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


class AsyncAgent:
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
        self.task_id = task_id
        self.incarnation = random.SystemRandom().getrandbits(63) | 1
        self.error: CoordinationError | None = None
        self._address = address
        self._job = job
        self._task = _message("RegisterTask", _Task, job_name=job, task_id=task_id, recoverable=recoverable)
        self._interval_s = heartbeat_interval_s
        self._lost_after_s = lost_after_s
        self._on_error = [on_error] if on_error is not None else []
        self._channel = open_aio_channel(address, credentials)
        self._stubs: dict[str, Any] = {}
        self._rounds: dict[str, int] = {}
        self._calls: set[Any] = set()
        self._lost = ""
        self._background: list[asyncio.Task[None]] = []
        self._reported = False
        self._closed = False
        self._left = False

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
            await self._channel.close()
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
            self._left = True
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._channel.close()

    async def set(self, key: str, value: str | bytes, overwrite: bool = False) -> None:
        """Set a key.

        Raises:
            KeyExistsError: it is set already, and `overwrite` was not given.
        """
        data = value.encode() if isinstance(value, str) else value
        asked: list[bool] = []
        try:
            await self._call(
                "InsertKeyValue", None, again=asked, kv={"key": key, "value": data}, allow_overwrite=overwrite
            )
        except KeyExistsError:
            # When the call was made twice, it may be the first one that set the key.
            if not asked or await self.try_get(key) != data:
                raise

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key; waits until there is one.

        Raises:
            CoordinationTimeoutError: it was not set in time.
        """
        return bytes((await self._call("GetKeyValue", timeout_s, key=key)).kv.value)

    async def try_get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            KeyMissingError: it is not set.
        """
        return bytes((await self._call("TryGetKeyValue", None, key=key)).kv.value)

    async def get_dir(self, directory: str) -> dict[str, bytes]:
        """All keys below a directory with their values, in order of key."""
        answer = await self._call("GetKeyValueDir", None, directory_key=directory)
        return {pair.key: pair.value for pair in answer.kv}

    async def delete(self, key: str) -> None:
        """Remove a key and all keys below it; a missing one is no error."""
        await self._call("DeleteKeyValue", None, key=key, is_directory=True)

    async def increment(self, key: str, amount: int = 1) -> int:
        """Add to a decimal value, a missing one counting as 0; returns the sum.

        Raises:
            CoordinatorLostError: the coordinator broke off, and may or may not have added.
            CoordinationError: the value is no number.
        """
        answer = await self._call("IncrementKeyValue", None, repeatable=False, key=key, increment=amount)
        return int(answer.kv.value)

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
            barrier_timeout_in_ms=int((max(timeout_s, 0.0) if timeout_s < _LONG_S else _LONG_S) * 1000),
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
        return [_message("tasks", _Task, job_name=self._job, task_id=number) for number in tasks or ()]

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
                self._lost = f"No coordinator answered on {self._address} for {self._lost_after_s:g} s."
                self.fail(CoordinatorLostError(self._lost, "UNAVAILABLE"))
                for call in list(self._calls):
                    call.cancel()
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
                    await asyncio.sleep(_RETRY_S)
                    continue
                self.fail(error)
                return

    async def _call(
        self,
        method: str,
        timeout_s: float | None,
        repeatable: bool = True,
        again: list[bool] | None = None,
        **fields: Any,
    ) -> Any:
        """Make a call, again if the coordinator broke it off; `again` gets an entry when that happened."""
        request_class, response_class = _METHODS[method]
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = self._channel.unary_unary(
                f"/{_SERVICE}/{method}", request_class.SerializeToString, response_class.FromString
            )
        if self._left:
            raise CoordinationError(f"{method}: this agent has left the job. Connect again.", "FAILED_PRECONDITION")
        request = _message(method, request_class, **fields)
        if timeout_s is not None and not timeout_s < _LONG_S:
            timeout_s = None
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
            self._refuse_if_lost(method)
            call = stub(request, timeout=left_s, wait_for_ready=True)
            self._calls.add(call)
            try:
                return await call
            except asyncio.CancelledError:
                self._refuse_if_lost(method)
                raise
            except grpc.aio.AioRpcError as error:
                if not _is_broken_off(error):
                    unanswered = self._unanswered(method, timeout_s, fields)
                    raise _explained(method, error, unanswered) from None
                if not repeatable:
                    words = f"{method} on {self._address} was broken off: {error.details()}."
                    raise CoordinatorLostError(words, "UNAVAILABLE") from None
            finally:
                self._calls.discard(call)
            if again is not None:
                again.append(True)
            await asyncio.sleep(_RETRY_S)

    def _refuse_if_lost(self, method: str) -> None:
        if self._lost:
            raise CoordinatorLostError(f"{method}: {self._lost}", "UNAVAILABLE")

    def _unanswered(self, method: str, timeout_s: float | None, fields: dict[str, Any]) -> str:
        """What no answer in time means, as far as this side can tell."""
        within = f"within {timeout_s or 0.0:g} s"
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return f"nobody answered on {self._address} {within}; is the coordinator running?"
        if method == "RegisterTask":
            look = f"`fastrt coordinator barriers --address {self._address}` names the missing"
            return f"not all tasks have come to the coordinator on {self._address} {within}; {look}."
        if method == "GetKeyValue":
            return f"key {fields['key']!r} was not set {within}."
        return f"the coordinator on {self._address} had no answer {within}."


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


def _is_broken_off(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call ended because its coordinator did, and not by an answer to it."""
    ended = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() in ended and _source(error) is None


def _source(error: grpc.aio.AioRpcError) -> str | None:
    """The task that an error names as its source; "" for the caller's own, None when it is no error of the service."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            payload = _Payloads.FromString(value).payloads.get(_ERROR_URL)
            if payload is not None:
                named = _ErrorPayload.FromString(payload)
                has_source = named.HasField("source_task")
                return f"{named.source_task.job_name}/{named.source_task.task_id}" if has_source else ""
    return None


def _message(method: str, kind: Any, **fields: Any) -> Any:
    """A message, or a refusal of what it cannot hold."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise CoordinationError(f"{method}: an argument cannot be sent: {error}.", "INVALID_ARGUMENT") from None


def _explained(method: str, error: grpc.aio.AioRpcError, unanswered: str) -> CoordinationError:
    code, details = error.code().name, error.details() or ""
    kind: type[CoordinationError] = CoordinationError
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = CoordinationTimeoutError
        if _source(error) is None:
            details = unanswered
    elif error.code() is grpc.StatusCode.ALREADY_EXISTS and method == "InsertKeyValue":
        kind = KeyExistsError
    elif error.code() is grpc.StatusCode.NOT_FOUND:
        kind = KeyMissingError
    return kind(f"{method}: {details}", code, _source(error) or None)
