"""The newest dialect: `xla.coordination.CoordinationService`. Members are plain numbers, of the first role.

Every call but RegisterTask names the service's incarnation, and is rejected if it names another one.
"""

from __future__ import annotations

from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.dialect_newer import NewerDialect, version_seen
from fastrt.coordination.dialects import Build, Method, Parse, nothing, table_methods
from fastrt.coordination.events import Event
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure, Member, failure
from fastrt.net.grpc.descriptors import message_set

_SET = message_set("coordination_xla")
_SERVICE = "xla.coordination.CoordinationService"
_CLASSES = _SET.methods(_SERVICE)
_Error = _SET.message("xla.coordination.CoordinationServiceError")


def _error_bytes(problem: Failure) -> bytes:
    rank = problem.source.rank if problem.source is not None else 0
    return bytes(_Error(is_reported_error=problem.reported, source_task_id=rank).SerializeToString())


def _put(info: Any, member: Member) -> None:
    info.task_id = member.rank


_DIALECT = NewerDialect(_SERVICE, lambda member: str(member.rank), _error_bytes, _CLASSES, "service_incarnation", _put)


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


def _barrier(request: Any, call: int, state: CoordinationState) -> Event:
    timeout_s = request.barrier_timeout_in_ms / 1000
    member, members = _member(state, request.source_task_id), _members(state, request.task_ids)
    return ev.EnterBarrier(call, request.barrier_id, request.counter, timeout_s, member, members)


def _alive(value: Any, request: Any, state: CoordinationState) -> bytes:
    answer = _DIALECT.response(request)
    for member, incarnation in value:
        answer.alive_task_ids.append(member.rank)
        answer.incarnations.append(incarnation)
    return bytes(answer.SerializeToString())


_TABLE: dict[str, tuple[Parse, Build]] = {
    "RegisterTask": (
        lambda r, c, s: ev.Register(c, _member(s, r.source_task_id), r.incarnation),
        _DIALECT.incarnation,
    ),
    "Heartbeat": (
        _checked(lambda r, c, s: ev.Heartbeat(c, _member(s, r.source_task_id), r.incarnation)),
        _DIALECT.incarnation,
    ),
    "ShutdownTask": (_checked(lambda r, c, s: ev.Shutdown(c, _member(s, r.source_task_id))), nothing),
    "WatchTasks": (_checked(lambda r, c, s: ev.WatchMembers(c, s.first_role, version_seen(r))), _DIALECT.watched),
    **{name: (_checked(parse), build) for name, (parse, build) in _DIALECT.key_table().items()},
    "Barrier": (_checked(_barrier), _DIALECT.counter),
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
