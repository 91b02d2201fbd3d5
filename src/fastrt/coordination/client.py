"""A member of a coordinated job, for ordinary blocking code; and the optional listener for errors reported to it.

The agent proper is `AsyncAgent`. This one runs it on an event loop in a thread of its own, so that heartbeats go on
while the caller computes, and every call here waits for its coroutine there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc

from fastrt.coordination.agent import AsyncAgent, TaskView, connect_async
from fastrt.coordination.errors import CoordinationError
from fastrt.coordination.status import Code
from fastrt.rpc.descriptors import message_set
from fastrt.rpc.server import open_server

T = TypeVar("T")

_REPORT_PATH = "/tensorflow.CoordinationService/ReportErrorToTask"
_ReportRequest = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")["ReportErrorToTask"][
    0
]


class Agent:
    """One task's connection to its coordinator. Made by `connect`; its methods may be called from any thread.

    See `AsyncAgent` for what the methods raise. A forked child cannot use its parent's agent: connect there anew.
    """

    def __init__(self, loop: _LoopThread, agent: AsyncAgent, listener: ErrorListener | None) -> None:
        self._loop = loop
        self._agent = agent
        self._listener = listener
        self._closed = False

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._closed or self._loop.is_inherited:
            return
        try:
            self._loop.run(self._agent.__aexit__(kind, error, trace))
        finally:
            self._end()

    @property
    def task_id(self) -> int:
        """This task's number."""
        return self._agent.task_id

    @property
    def incarnation(self) -> int:
        """Of this process, random."""
        return self._agent.incarnation

    @property
    def error(self) -> CoordinationError | None:
        """The failure that this task was told of; None while there is none."""
        return self._agent.error

    @property
    def listen_address(self) -> str | None:
        """Where `ReportErrorToTask` is served; None when `listen` was not given."""
        return None if self._listener is None else self._listener.address

    def set(self, key: str, value: str | bytes, overwrite: bool = False) -> None:
        """Set a key.

        Raises:
            KeyExistsError: it is set already, and `overwrite` was not given.
        """
        self._loop.run(self._agent.set(key, value, overwrite))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key; waits until there is one.

        Raises:
            CoordinationTimeoutError: it was not set in time.
        """
        return self._loop.run(self._agent.get(key, timeout_s))

    def try_get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            KeyMissingError: it is not set.
        """
        return self._loop.run(self._agent.try_get(key))

    def get_dir(self, directory: str) -> dict[str, bytes]:
        """All keys below a directory with their values, in order of key."""
        return self._loop.run(self._agent.get_dir(directory))

    def delete(self, key: str) -> None:
        """Remove a key and all keys below it; a missing one is no error."""
        self._loop.run(self._agent.delete(key))

    def increment(self, key: str, amount: int = 1) -> int:
        """Add to a decimal value, a missing one counting as 0; returns the sum.

        Raises:
            CoordinatorLostError: the coordinator broke off, and may or may not have added.
            CoordinationError: the value is no number.
        """
        return self._loop.run(self._agent.increment(key, amount))

    def barrier(self, barrier_id: str, timeout_s: float = 60.0, tasks: Iterable[int] | None = None) -> None:
        """Wait until all tasks (or those given) have come here. An id may be used again and again.

        Raises:
            CoordinationTimeoutError: some did not come in time; the message names them.
            CoordinationError: a task failed, or the tasks disagree on who takes part.
        """
        self._loop.run(self._agent.barrier(barrier_id, timeout_s, tasks))

    def report_error(self, message: str, code: str = "INTERNAL") -> None:
        """Tell all tasks that this one has failed; `code` is a gRPC status code's name.

        Raises:
            CoordinationError: there is no such code, or this task has an error already.
        """
        self._loop.run(self._agent.report_error(message, code))

    def alive_tasks(self, tasks: Iterable[int] | None = None, timeout_s: float | None = None) -> dict[int, int]:
        """Which tasks are alive, with their incarnations. All living ones of those asked about must ask.

        Raises:
            CoordinationTimeoutError: a living task did not ask in time.
        """
        return self._loop.run(self._agent.alive_tasks(tasks, timeout_s))

    def watch(self, version: int | None = None, timeout_s: float | None = None) -> tuple[int, list[TaskView]]:
        """The state of all tasks and its version; waits for another than `version`, if one is given.

        Raises:
            CoordinationTimeoutError: nothing changed in time.
        """
        return self._loop.run(self._agent.watch(version, timeout_s))

    def on_error(self, callback: Callable[[CoordinationError], None]) -> None:
        """Call back once, on the agent's own thread (which this agent's other calls need), when any task has failed."""
        self._loop.call(self._agent.on_error, callback)

    def close(self, wait: bool = True, timeout_s: float = 300.0) -> None:
        """Leave the job; by default when all its tasks are done too.

        Raises:
            CoordinationError: others failed, or did not come to the end in time.
        """
        if not self._closed and not self._loop.is_inherited:
            try:
                self._loop.run(self._agent.close(wait, timeout_s))
            finally:
                self._end()

    def _end(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.stop()
        self._loop.stop()


def connect(
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
    listen: str | None = None,
) -> Agent:
    """Join a job as one of its tasks; returns when all its tasks have joined.

    Args:
        address: `host:port` of the coordinator.
        task_id: this task's number, from 0.
        job: the job's name, as the coordinator was told.
        timeout_s: how long to wait for the coordinator and for all other tasks.
        heartbeat_interval_s: seconds between signs of life; keep it well below the coordinator's timeout.
        recoverable: this task may die and be started again without the others failing.
        lost_after_s: how long the coordinator may be away, perhaps to be started again, until this task gives it up:
            all its calls then end with `CoordinatorLostError`, and that is its error.
        on_error: called once, on the agent's own thread, when any task has failed.
        credentials: for a coordinator that uses TLS.
        listen: `host:port` on which to take errors that others report to this task (`ReportErrorToTask`).
    Returns:
        The agent; use it with `with`, or `close` it.
    Raises:
        CoordinationTimeoutError: the coordinator was not found, or not all tasks came, in time.
        CoordinationError: the coordinator does not expect this task, or has another process for it.
        OSError: the `listen` address cannot be bound.

    Source: `jax.distributed.initialize` and the agent behind it.
    """
    loop = _LoopThread()
    try:
        agent = loop.run(
            connect_async(
                address,
                task_id,
                job=job,
                timeout_s=timeout_s,
                heartbeat_interval_s=heartbeat_interval_s,
                recoverable=recoverable,
                lost_after_s=lost_after_s,
                on_error=on_error,
                credentials=credentials,
            )
        )
        listener = None
        if listen is not None:
            try:
                listener = ErrorListener(listen, lambda error: loop.call(agent.fail, error))
            except OSError:
                loop.run(agent.close(wait=False))
                raise
    except BaseException:
        loop.stop()
        raise
    return Agent(loop, agent, listener)


class ErrorListener:
    """Serves `ReportErrorToTask` for one task.

    Args:
        address: `host:port`, loopback unless the network is trusted: callers show no credentials.
        told: given each error, on the listener's thread.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, told: Callable[[CoordinationError], None]) -> None:
        self._told = told
        self._server = open_server(self, [_REPORT_PATH])
        port = self._server.bind(address)
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def stop(self) -> None:
        """Serve no more."""
        self._server.stop()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """See `Handler`."""
        try:
            request = _ReportRequest.FromString(body)
        except Exception:  # protobuf's DecodeError differs between its runtimes
            self._server.finish(call, int(Code.INVALID_ARGUMENT), "This is no ReportErrorToTaskRequest.")
            return
        task = request.error_payload.source_task
        code = Code(request.error_code).name if request.error_code in set(Code) else "UNKNOWN"
        words = f"Error reported from /job:{task.job_name}/task:{task.task_id}: {request.error_message}"
        self._told(CoordinationError(words, code, f"{task.job_name}/{task.task_id}"))
        self._server.finish(call)

    def on_cancel(self, call: int) -> None:
        """See `Handler`."""

    def on_idle(self) -> float | None:
        """See `Handler`."""
        return None

    def on_stop(self) -> None:
        """See `Handler`."""


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastrt-coordination", daemon=True)
        self._thread.start()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine run there; an interrupt here cancels it there.

        Raises:
            CoordinationError: the loop has ended, is another process's, or is what calls here.
        """
        problem = self._problem()
        if problem is not None:
            work.close()
            raise CoordinationError(problem, "FAILED_PRECONDITION")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function there, soon.

        Raises:
            CoordinationError: the loop has ended, or is another process's.
        """
        problem = self._problem()
        if problem is not None and threading.current_thread() is not self._thread:
            raise CoordinationError(problem, "FAILED_PRECONDITION")
        self._loop.call_soon_threadsafe(function, *arguments)

    def _problem(self) -> str | None:
        """Why nothing can be run there, None when it can."""
        if self.is_inherited:
            return "This agent belongs to the process that this one was forked from. Connect here anew."
        if self._loop.is_closed():
            return "This agent has left the job. Connect again."
        if threading.current_thread() is self._thread:
            return "A callback of on_error called its own agent, which would wait for itself. Use another thread."
        return None

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
