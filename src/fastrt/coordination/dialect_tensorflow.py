"""The seed's dialect with all later additions: `tensorflow.CoordinationService`. A member is a job and a task."""

from __future__ import annotations

from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.dialect_newer import NewerDialect, version_seen
from fastrt.coordination.dialects import Build, Method, Parse, RefusedAnswer, nothing, table_methods
from fastrt.coordination.events import Event
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure, Member, Part, failure
from fastrt.coordination.topology import merge_devices, merge_seed_devices, seed_devices_kind
from fastrt.net.grpc.descriptors import message_set

_SET = message_set("coordination_tensorflow")
_SERVICE = "tensorflow.CoordinationService"
_CLASSES = _SET.methods(_SERVICE)
_Error = _SET.message("tensorflow.CoordinationServiceError")
# The answer of jaxlib's service: errors are reported to tasks by the agent of each, which may serve this method.
_NO_AGENT = "CoordinationServiceAgent is uninitialized or has already shutdown."


def _error_bytes(problem: Failure) -> bytes:
    payload = _Error(is_reported_error=problem.reported)
    if problem.source is not None:
        payload.source_task.job_name, payload.source_task.task_id = problem.source
    return bytes(payload.SerializeToString())


def _write(member: Member) -> str:
    return f"/job:{member.role}/replica:0/task:{member.rank}"


def _put(info: Any, member: Member) -> None:
    info.task.job_name, info.task.task_id = member


_DIALECT = NewerDialect(_SERVICE, _write, _error_bytes, _CLASSES, "leader_incarnation", _put)


def methods() -> list[Method]:
    """The dialect's methods."""
    return table_methods(_DIALECT, _CLASSES, _TABLE)


def _member(task: Any) -> Member:
    return Member(task.job_name, task.task_id)


def _members(tasks: Any) -> tuple[Member, ...]:
    return tuple(Member(task.job_name, task.task_id) for task in tasks)


def _register(request: Any, call: int, state: CoordinationState) -> Event:
    # Versions without the field leave it False, which must not override the service's setting.
    return ev.Register(call, _member(request.source_task), request.incarnation, request.source_task.recoverable or None)


def _devices(request: Any, call: int, state: CoordinationState) -> Event:
    info = request.local_device_info if request.HasField("local_device_info") else request.device_info
    return ev.ExchangeDevices(call, _member(request.source_task), info.SerializeToString())


def _barrier(request: Any, call: int, state: CoordinationState) -> Event:
    timeout_s = request.barrier_timeout_in_ms / 1000
    member, members = _member(request.source_task), _members(request.tasks)
    return ev.EnterBarrier(call, request.barrier_id, request.counter, timeout_s, member, members)


def _all_devices(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _DIALECT.response_with_incarnation(request, state)
    if request.HasField("local_device_info"):
        _refuse_mixed_devices(dict(zip(state.members.ids(), value, strict=True)))
        answer.cluster_device_info.CopyFrom(merge_seed_devices(value))
    else:
        answer.device_info.CopyFrom(merge_devices(value))
    return bytes(answer.SerializeToString())


def _refuse_mixed_devices(devices: dict[Member, bytes]) -> None:
    """Reject device lists that one answer cannot hold.

    Raises:
        RefusedAnswer: one member lists TensorFlow's devices and another XLA's.
    """
    kinds = {kind: member for member, data in devices.items() if (kind := seed_devices_kind(data)) is not None}
    if len(kinds) > 1:
        words: list[Part] = ["All tasks of a job must list devices of one kind. "]
        for kind, member in sorted(kinds.items(), key=lambda item: item[1]):
            words += [member, f" has {kind}'s. "]
        raise RefusedAnswer(failure(Code.INVALID_ARGUMENT, *words, marked=False))


def _alive(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _DIALECT.response(request)
    for member, incarnation in value:
        answer.alive_tasks.add(job_name=member.role, task_id=member.rank)
        answer.incarnations.append(incarnation)
    return bytes(answer.SerializeToString())


_TABLE: dict[str, tuple[Parse, Build]] = {
    "RegisterTask": (_register, _DIALECT.incarnation),
    "Heartbeat": (lambda r, c, s: ev.Heartbeat(c, _member(r.source_task), r.incarnation), _DIALECT.incarnation),
    "WaitForAllTasks": (_devices, _all_devices),
    "ShutdownTask": (lambda r, c, s: ev.Shutdown(c, _member(r.source_task), leaves=True), nothing),
    "ResetTask": (lambda r, c, s: ev.Reset(c, _member(r.source_task)), nothing),
    "ReportErrorToTask": (lambda r, c, s: failure(Code.INTERNAL, _NO_AGENT), nothing),
    "ReportErrorToService": (
        lambda r, c, s: ev.ReportError(c, _member(r.error_origin), r.error_code, r.error_message),
        nothing,
    ),
    "GetTaskState": (lambda r, c, s: ev.QueryMembers(c, list(_members(r.source_task))), _DIALECT.states),
    "GetJobState": (lambda r, c, s: ev.QueryMembers(c, role=r.job_name), _DIALECT.states),
    "WatchJobState": (lambda r, c, s: ev.WatchMembers(c, r.job_name, version_seen(r)), _DIALECT.watched),
    **_DIALECT.key_table(),
    "Barrier": (_barrier, _DIALECT.counter),
    "CancelBarrier": (
        lambda r, c, s: ev.CancelBarrier(c, r.barrier_id, r.counter, _member(r.source_task)),
        nothing,
    ),
    "GetAliveTasks": (
        lambda r, c, s: ev.AliveMembers(c, _member(r.requesting_task), _members(r.tasks)),
        _alive,
    ),
    "PollForError": (lambda r, c, s: ev.PollError(c, _member(r.source_task)), nothing),
}
