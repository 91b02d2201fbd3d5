"""The blocking clients of a coordinator: a task's agent, a user of its keys, and a listener for reported errors.

Each call here runs a coroutine of `AsyncAgent` or `AsyncKeys` on an event loop in a separate thread, and waits for it.
So heartbeats continue while the caller computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from fastrt.coordination.agent import AsyncAgent, TaskView, connect_async
from fastrt.coordination.errors import CoordinationError
from fastrt.coordination.keys import AsyncKeys, open_keys_async
from fastrt.coordination.loop import ConnectionLoop
from fastrt.coordination.status import Code
from fastrt.net.address import with_port
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.server import open_server

_REPORT_PATH = "/tensorflow.CoordinationService/ReportErrorToTask"
_ReportRequest = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")["ReportErrorToTask"][
    0
]


class Keys:
    """The keys of a coordinator. Made by `open_keys`; its methods may be called from any thread.

    Every call takes `timeout_s`; by default it waits without limit, also until a coordinator can be reached. The
    methods raise the errors of `AsyncKeys`. A forked child cannot use its parent's keys, nor open its own
    (`ForkedRuntimeError`).
    """

    def __init__(self, loop: ConnectionLoop, keys: AsyncKeys) -> None:
        self._loop = loop
        self._keys = keys
        self._closed = False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._closed and not self._loop.is_inherited:
            try:
                self._loop.run(self._keys.__aexit__(kind, error, trace))
            finally:
                self._end()

    def close(self) -> None:
        """End the connection."""
        self.__exit__(None, None, None)

    def _end(self) -> None:
        self._closed = True
        self._loop.stop()

    def set(self, key: str, value: str | bytes, overwrite: bool = False, timeout_s: float | None = None) -> None:
        """Set a key.

        Raises:
            KeyExistsError: it is set already, and `overwrite` was not given.
        """
        self._loop.run(self._keys.set(key, value, overwrite, timeout_s))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key; waits until there is one.

        Raises:
            CoordinationTimeoutError: it was not set in time.
        """
        return self._loop.run(self._keys.get(key, timeout_s))

    def try_get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key.

        Raises:
            KeyMissingError: it is not set.
        """
        return self._loop.run(self._keys.try_get(key, timeout_s))

    def get_dir(self, directory: str, timeout_s: float | None = None) -> dict[str, bytes]:
        """All keys below a directory with their values, in order of key."""
        return self._loop.run(self._keys.get_dir(directory, timeout_s))

    def delete(self, key: str, timeout_s: float | None = None) -> None:
        """Remove a key and all keys below it; a missing one is no error."""
        self._loop.run(self._keys.delete(key, timeout_s))

    def increment(self, key: str, amount: int = 1, timeout_s: float | None = None) -> int:
        """Add to a decimal value, a missing one counting as 0; returns the sum.

        Raises:
            CoordinatorLostError: the coordinator broke off, and may or may not have added.
            CoordinationError: the value is not a number.
        """
        return self._loop.run(self._keys.increment(key, amount, timeout_s))


class Agent(Keys):
    """One task's connection to its coordinator. Made by `connect`; its methods may be called from any thread.

    The methods raise the errors of `AsyncAgent`. A forked child cannot use its parent's agent, nor have its own.
    """

    def __init__(self, loop: ConnectionLoop, agent: AsyncAgent, listener: ErrorListener | None) -> None:
        super().__init__(loop, agent)
        self._agent = agent
        self._listener = listener

    @property
    def task_id(self) -> int:
        """This task's number."""
        return self._agent.task_id

    @property
    def incarnation(self) -> int:
        """The incarnation of this process, random."""
        return self._agent.incarnation

    @property
    def error(self) -> CoordinationError | None:
        """The failure that was reported to this task; None while there is none."""
        return self._agent.error

    @property
    def listen_address(self) -> str | None:
        """The address that serves `ReportErrorToTask`; None when `listen` was not given."""
        return None if self._listener is None else self._listener.address

    def barrier(self, barrier_id: str, timeout_s: float = 60.0, tasks: Iterable[int] | None = None) -> None:
        """Wait until all tasks (or those given) have arrived. An id may be used repeatedly.

        Raises:
            CoordinationTimeoutError: some tasks did not arrive in time; the message names them.
            CoordinationError: a task failed, or the tasks disagree about the participants.
        """
        self._loop.run(self._agent.barrier(barrier_id, timeout_s, tasks))

    def report_error(self, message: str, code: str = "INTERNAL") -> None:
        """Report to all tasks that this one has failed; `code` is a gRPC status code's name.

        Raises:
            CoordinationError: there is no such code, or this task has an error already.
        """
        self._loop.run(self._agent.report_error(message, code))

    def alive_tasks(self, tasks: Iterable[int] | None = None, timeout_s: float | None = None) -> dict[int, int]:
        """The incarnations of the tasks that are alive, by task. All of them must make this call.

        Raises:
            CoordinationTimeoutError: a task that is alive did not make the call in time.
        """
        return self._loop.run(self._agent.alive_tasks(tasks, timeout_s))

    def watch(self, version: int | None = None, timeout_s: float | None = None) -> tuple[int, list[TaskView]]:
        """The state of all tasks and its version; waits until the version differs from `version`, if one is given.

        Raises:
            CoordinationTimeoutError: nothing changed in time.
        """
        return self._loop.run(self._agent.watch(version, timeout_s))

    def on_error(self, callback: Callable[[CoordinationError], None]) -> None:
        """Register a callback that runs once when any task fails, on the agent's thread: it must not call the agent."""
        self._loop.call(self._agent.on_error, callback)

    def close(self, wait: bool = True, timeout_s: float = 300.0) -> None:
        """Leave the job; by default when all its tasks are done too.

        Raises:
            CoordinationError: other tasks failed, or did not close in time.
        """
        if not self._closed and not self._loop.is_inherited:
            try:
                self._loop.run(self._agent.close(wait, timeout_s))
            finally:
                self._end()

    def _end(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        super()._end()


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
        job: the job's name, the same as at the coordinator.
        timeout_s: how long to wait for the coordinator and for all other tasks.
        heartbeat_interval_s: seconds between heartbeats; keep it well below the coordinator's timeout.
        recoverable: this task may die and restart without the others failing.
        lost_after_s: how long the coordinator may be unreachable, for instance to restart, before this task gives it
            up: all its calls then end with `CoordinatorLostError`, and that is its error.
        on_error: called once, on the agent's thread, when any task has failed.
        credentials: for a coordinator that uses TLS.
        listen: `host:port` to listen on for errors that others report to this task (`ReportErrorToTask`).
    Returns:
        The agent; use it with `with`, or `close` it.
    Raises:
        CoordinationTimeoutError: the coordinator did not answer, or not all tasks joined, in time.
        CoordinationError: the coordinator does not expect this task, or has another process for it.
        ForkedRuntimeError: gRPC was used in the process that this one was forked from.
        OSError: the `listen` address cannot be bound.

    Source: `jax.distributed.initialize` and the agent behind it.
    """
    loop = ConnectionLoop("This agent has left the job. Connect again.")
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


def open_keys(address: str, *, credentials: grpc.ChannelCredentials | None = None) -> Keys:
    """Open the keys of a coordinator without joining its job: the job's barriers and heartbeats ignore this process.

    Args:
        address: `host:port` of the coordinator; the first call connects to it.
        credentials: for a coordinator that uses TLS.
    Returns:
        The keys; use them with `with`, or `close` them.
    """
    loop = ConnectionLoop("These keys are closed. Open them again.")
    try:
        return Keys(loop, loop.run(open_keys_async(address, credentials=credentials)))
    except BaseException:
        loop.stop()
        raise


class ErrorListener:
    """Serves `ReportErrorToTask` for one task.

    Args:
        address: `host:port`, loopback unless the network is trusted: callers show no credentials.
        on_error: receives each error, on the listener's thread.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, on_error: Callable[[CoordinationError], None]) -> None:
        self._on_error = on_error
        self._server = open_server(self, [_REPORT_PATH])
        port = self._server.bind(address)
        self.address = with_port(address, port)
        self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Set the agent's error from a `ReportErrorToTask`."""
        try:
            request = _ReportRequest.FromString(body)
        except Exception:  # protobuf's DecodeError differs between its runtimes
            self._server.finish(call, int(Code.INVALID_ARGUMENT), "This is no ReportErrorToTaskRequest.")
            return
        task = request.error_payload.source_task
        code = Code(request.error_code).name if request.error_code in set(Code) else "UNKNOWN"
        words = f"Error reported from /job:{task.job_name}/task:{task.task_id}: {request.error_message}"
        self._on_error(CoordinationError(words, code, f"{task.job_name}/{task.task_id}"))
        self._server.finish(call)

    def on_cancel(self, call: int) -> None:
        """Do nothing: a call is answered at once."""

    def on_idle(self) -> float | None:
        """Wait for calls without a deadline."""
        return None

    def on_stop(self) -> None:
        """Do nothing: no call waits."""
