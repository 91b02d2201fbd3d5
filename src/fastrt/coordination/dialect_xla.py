"""The newest dialect: `xla.coordination.CoordinationService`. Members are plain numbers, of the first role.

Every call but RegisterTask names the service's incarnation, and is refused when that is another one.
"""

from __future__ import annotations

from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.dialects import (
    Build,
    Dialect,
    Method,
    Parse,
    describe,
    key_values,
    nothing,
    table_methods,
    version_seen,
)
from fastrt.coordination.events import Event
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure, Member, failure
from fastrt.rpc.descriptors import message_set

_SET = message_set("coordination_xla")
_SERVICE = "xla.coordination.CoordinationService"
_CLASSES = _SET.methods(_SERVICE)
_Error = _SET.message("xla.coordination.CoordinationServiceError")


def _error_bytes(problem: Failure) -> bytes:
    rank = problem.source.rank if problem.source is not None else 0
    return bytes(_Error(is_reported_error=problem.reported, source_task_id=rank).SerializeToString())


_DIALECT = Dialect(_SERVICE, lambda member: str(member.rank), _error_bytes)


def methods() -> list[Method]:
    """The dialect's methods."""
    return table_methods(_DIALECT, _CLASSES, _TABLE)


def _checked(parse: Parse) -> Parse:
    def parse_checked(request: Any, call: int, state: CoordinationState) -> Event | Failure:
        asked, current = request.incarnations.service_incarnation, state.settings.incarnation
        if asked == current:
            return parse(request, call, state)
        words = f"wrong service incarnation: requested {asked}, currently {current}"
        return failure(Code.INTERNAL, words, mismatch=current)

    return parse_checked


def _member(state: CoordinationState, rank: int) -> Member:
    return Member(state.first_role, rank)


def _members(state: CoordinationState, ranks: Any) -> tuple[Member, ...]:
    return tuple(Member(state.first_role, rank) for rank in ranks)


def _response(request: Any) -> Any:
    return _CLASSES[request.DESCRIPTOR.name.removesuffix("Request")][1]()


def _barrier(request: Any, call: int, state: CoordinationState) -> Event:
    timeout_s = request.barrier_timeout_in_ms / 1000
    member, members = _member(state, request.source_task_id), _members(state, request.task_ids)
    return ev.EnterBarrier(call, request.barrier_id, request.counter, timeout_s, member, members)


def _incarnation(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _response(request)
    answer.service_incarnation = state.settings.incarnation
    return bytes(answer.SerializeToString())


def _key_value(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _response(request)
    answer.kv.key, answer.kv.value = request.key, value
    return bytes(answer.SerializeToString())


def _watched(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _response(request)
    answer.version_number, views = value
    for view in views:
        describe(view, answer.task_state.add(task_id=view.member.rank), _DIALECT)
    return bytes(answer.SerializeToString())


def _alive(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _response(request)
    for member, incarnation in value:
        answer.alive_task_ids.append(member.rank)
        answer.incarnations.append(incarnation)
    return bytes(answer.SerializeToString())


_TABLE: dict[str, tuple[Parse, Build]] = {
    "RegisterTask": (
        lambda r, c, s: ev.Register(c, _member(s, r.source_task_id), r.incarnation),
        _incarnation,
    ),
    "Heartbeat": (
        _checked(lambda r, c, s: ev.Heartbeat(c, _member(s, r.source_task_id), r.incarnation)),
        _incarnation,
    ),
    "ShutdownTask": (_checked(lambda r, c, s: ev.Shutdown(c, _member(s, r.source_task_id))), nothing),
    "WatchTasks": (_checked(lambda r, c, s: ev.WatchMembers(c, s.first_role, version_seen(r))), _watched),
    "InsertKeyValue": (
        _checked(lambda r, c, s: ev.InsertKey(c, r.kv.key, r.kv.value, r.allow_overwrite)),
        nothing,
    ),
    "GetKeyValue": (_checked(lambda r, c, s: ev.GetKey(c, r.key)), _key_value),
    "TryGetKeyValue": (_checked(lambda r, c, s: ev.TryGetKey(c, r.key)), _key_value),
    "IncrementKeyValue": (_checked(lambda r, c, s: ev.IncrementKey(c, r.key, r.increment)), _key_value),
    "GetKeyValueDir": (
        _checked(lambda r, c, s: ev.ListKeys(c, r.directory_key)),
        lambda value, r, s: key_values(_response(r), value),
    ),
    "DeleteKeyValue": (_checked(lambda r, c, s: ev.DeleteKey(c, r.key)), nothing),
    "Barrier": (
        _checked(_barrier),
        lambda value, r, s: bytes(_CLASSES["Barrier"][1](counter=value).SerializeToString()),
    ),
    "CancelBarrier": (
        _checked(lambda r, c, s: ev.CancelBarrier(c, r.barrier_id, r.counter, _member(s, r.source_task_id))),
        nothing,
    ),
    "GetAliveTasks": (
        _checked(lambda r, c, s: ev.AliveMembers(c, _member(s, r.requesting_task_id), _members(s, r.task_ids))),
        _alive,
    ),
    "PollForError": (_checked(lambda r, c, s: ev.PollError(c, _member(s, r.source_task_id))), nothing),
}
