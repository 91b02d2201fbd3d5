"""Three wire dialects, translated to and from the state machine's events.

A dialect is a table of methods: how a request becomes an event, and how the answer's value becomes a response. It
also says how it writes a member, because the words of a failure name members.

| service | spoken by |
|---|---|
| `xla.coordination.CoordinationService` | JAX 0.7 and later: members are plain numbers of the first role |
| `tensorflow.CoordinationService` | the seed, TensorFlow, JAX up to 0.6: members are job and task |
| `xla.DistributedRuntimeService` | the seed, JAX up to 0.4.13 without coordination service: nodes and a session |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.events import Event, MemberView
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure, Member, failure
from fastrt.coordination.topology import DeviceInfo, SeedDeviceInfo, is_topology, merge_devices
from fastrt.coordination.topology import merge_nodes, merge_seed_devices
from fastrt.rpc.descriptors import message_set

_WIRE = message_set("coordination")
_XLA = message_set("coordination_xla")
_TENSORFLOW = message_set("coordination_tensorflow")
_RUNTIME = {1: message_set("runtime_v1"), 3: message_set("runtime_v3")}

_URL = "type.googleapis.com/tensorflow."
_StatusPayloads = _WIRE.message("fastrt.coordination.StatusPayloads")
_BarrierError = _XLA.message("xla.coordination.BarrierError")
_MismatchError = _XLA.message("xla.coordination.ServiceMismatchError")

# Messages and payloads travel in HTTP/2 headers, of which clients take 8 KiB; a longer text would reach nobody.
_MESSAGE_CHARS_MAX = 3000
_BARRIER_ID_CHARS_MAX = 500
_C_ESCAPES = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x22: '\\"', 0x27: "\\'", 0x5C: "\\\\"}

Parse = Callable[[Any, int, CoordinationState], "Event | Failure"]
Build = Callable[[Any, Any, CoordinationState], bytes]


@dataclass(frozen=True)
class Method:
    """One method of a dialect.

    Attributes:
        path: as gRPC names it, `/package.Service/Method`.
        request: the class of its request.
        parse: request, call and state to an event, or to the failure to answer at once.
        build: the answer's value, the request and the state to the response's bytes.
        mutates: whether the service must answer it just once, also when it is asked again after a crash.
        dialect: how failures are written.
    """

    path: str
    request: Any
    parse: Parse
    build: Build
    mutates: bool
    dialect: Dialect


class Dialect:
    """How one service writes members and errors.

    Args:
        service: its full name.
        write: a member, as messages write it.
        error: CoordinationServiceError of a failure, as bytes.
    """

    def __init__(self, service: str, write: Callable[[Member], str], error: Callable[[Failure], bytes]) -> None:
        self.service = service
        self._write = write
        self._error = error

    def render(self, problem: Failure) -> tuple[str, bytes]:
        """A failure's message, and the bytes for `grpc-status-details-bin` (empty for none)."""
        message = self.message(problem)
        payloads = self._payloads(problem)
        if not payloads:
            return message, b""
        return message, bytes(_StatusPayloads(payloads=payloads).SerializeToString())

    def message(self, problem: Failure) -> str:
        """A failure's words, members written this dialect's way."""
        words = "".join(self._part(part) for part in problem.parts)
        if len(words) > _MESSAGE_CHARS_MAX:
            return words[:_MESSAGE_CHARS_MAX] + f"... ({len(words) - _MESSAGE_CHARS_MAX} characters more)"
        return words

    def source_error(self, problem: Failure) -> bytes:
        """The CoordinationServiceError payload of a failure."""
        return self._error(problem)

    def _part(self, part: str | Member | Failure) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, Member):
            return self._write(part)
        quoted = "".join(f" [{url}='{_c_escaped(data)}']" for url, data in sorted(self._payloads(part).items()))
        return f"{part.code.name}: {self.message(part)}{quoted}"

    def _payloads(self, problem: Failure) -> dict[str, bytes]:
        payloads = {}
        if problem.barrier is not None:
            barrier_id, counter = problem.barrier
            error = _BarrierError(barrier_id=barrier_id[:_BARRIER_ID_CHARS_MAX], counter=counter)
            payloads[_URL + "BarrierError"] = error.SerializeToString()
        if problem.marked:
            payloads[_URL + "CoordinationServiceError"] = self._error(problem)
        if problem.mismatch is not None:
            payloads[_URL + "ServiceMismatchError"] = _MismatchError(
                service_incarnation=problem.mismatch
            ).SerializeToString()
        return payloads


# How members are written where no caller's dialect is at hand.
INSIDE = Dialect("", lambda member: f"{member.role}/{member.rank}", lambda problem: b"")


def all_methods() -> dict[str, Method]:
    """Every method of every dialect, by path."""
    found = [*_xla_methods(), *_tensorflow_methods(), *_runtime_methods()]
    return {method.path: method for method in found}


def parse_request(method: Method, body: bytes, call: int, state: CoordinationState) -> tuple[Any, Event | Failure]:
    """A request's message, and the event it is or the failure to answer it with."""
    try:
        request = method.request.FromString(body)
    except Exception:  # protobuf's DecodeError differs between its runtimes
        name = method.request.DESCRIPTOR.full_name
        words = f"{method.path}: the request's {len(body)} bytes are no valid {name}. Check the client's version."
        return None, failure(Code.INVALID_ARGUMENT, words, marked=False)
    return request, method.parse(request, call, state)


def _nothing(value: Any, request: Any, state: CoordinationState) -> bytes:
    return b""


def _key_values(message: Any, pairs: list[tuple[str, bytes]]) -> bytes:
    add = message.kv.add
    for key, value in pairs:
        try:
            add(key=key, value=value)
        except UnicodeEncodeError:
            # The older runtime service's keys are bytes; one that is no text is shown with replacements.
            add(key=key.encode("utf-8", "replace").decode(), value=value)
    return bytes(message.SerializeToString())


def _c_escaped(data: bytes) -> str:
    return "".join(_C_ESCAPES.get(c) or (chr(c) if 0x20 <= c < 0x7F else f"\\x{c:02x}") for c in data)


# xla.coordination


def _xla_methods() -> list[Method]:
    service = "xla.coordination.CoordinationService"
    classes = _XLA.methods(service)
    error = _XLA.message("xla.coordination.CoordinationServiceError")

    def error_of(problem: Failure) -> bytes:
        rank = problem.source.rank if problem.source is not None else 0
        return bytes(error(is_reported_error=problem.reported, source_task_id=rank).SerializeToString())

    dialect = Dialect(service, lambda member: str(member.rank), error_of)

    def checked(parse: Parse) -> Parse:
        """All but RegisterTask name the service's incarnation, and are refused by another one."""

        def parse_checked(request: Any, call: int, state: CoordinationState) -> Event | Failure:
            asked, current = request.incarnations.service_incarnation, state.settings.incarnation
            if asked == current:
                return parse(request, call, state)
            words = f"wrong service incarnation: requested {asked}, currently {current}"
            return failure(Code.INTERNAL, words, mismatch=current)

        return parse_checked

    def member(state: CoordinationState, rank: int) -> Member:
        return Member(state.first_role, rank)

    def members(state: CoordinationState, ranks: Any) -> tuple[Member, ...]:
        return tuple(Member(state.first_role, rank) for rank in ranks)

    def kv(value: Any, request: Any, state: CoordinationState) -> bytes:
        return bytes(response(request).SerializeToString()) if value is None else _kv(request, value)

    def response(request: Any) -> Any:
        return classes[request.DESCRIPTOR.name.removesuffix("Request")][1]()

    def _kv(request: Any, value: bytes) -> bytes:
        answer = response(request)
        answer.kv.key, answer.kv.value = request.key, value
        return bytes(answer.SerializeToString())

    def watched(value: Any, request: Any, state: CoordinationState) -> bytes:
        version, views = value
        answer = response(request)
        answer.version_number = version
        for view in views:
            _describe(view, answer.task_state.add(task_id=view.member.rank), dialect)
        return bytes(answer.SerializeToString())

    def alive(value: Any, request: Any, state: CoordinationState) -> bytes:
        ranks, incarnations = [m.rank for m, _ in value], [i for _, i in value]
        return bytes(classes["GetAliveTasks"][1](alive_task_ids=ranks, incarnations=incarnations).SerializeToString())

    def incarnation(value: Any, request: Any, state: CoordinationState) -> bytes:
        return bytes(type(response(request))(service_incarnation=state.settings.incarnation).SerializeToString())

    table: dict[str, tuple[Parse, Build]] = {
        "RegisterTask": (lambda r, c, s: ev.Register(c, member(s, r.source_task_id), r.incarnation), incarnation),
        "Heartbeat": (checked(lambda r, c, s: ev.Heartbeat(c, member(s, r.source_task_id), r.incarnation)), incarnation),
        "ShutdownTask": (checked(lambda r, c, s: ev.Shutdown(c, member(s, r.source_task_id))), _nothing),
        "WatchTasks": (checked(lambda r, c, s: ev.WatchMembers(c, s.first_role, _version(r))), watched),
        "InsertKeyValue": (
            checked(lambda r, c, s: ev.InsertKey(c, r.kv.key, r.kv.value, r.allow_overwrite)),
            _nothing,
        ),
        "GetKeyValue": (checked(lambda r, c, s: ev.GetKey(c, r.key)), kv),
        "TryGetKeyValue": (checked(lambda r, c, s: ev.TryGetKey(c, r.key)), kv),
        "IncrementKeyValue": (checked(lambda r, c, s: ev.IncrementKey(c, r.key, r.increment)), kv),
        "GetKeyValueDir": (
            checked(lambda r, c, s: ev.ListKeys(c, r.directory_key)),
            lambda v, r, s: _key_values(classes["GetKeyValueDir"][1](), v),
        ),
        "DeleteKeyValue": (checked(lambda r, c, s: ev.DeleteKey(c, r.key)), _nothing),
        "Barrier": (
            checked(
                lambda r, c, s: ev.EnterBarrier(
                    c, r.barrier_id, r.counter, r.barrier_timeout_in_ms / 1000, member(s, r.source_task_id),
                    members(s, r.task_ids),
                )  # fmt: skip
            ),
            lambda v, r, s: bytes(classes["Barrier"][1](counter=v).SerializeToString()),
        ),
        "CancelBarrier": (
            checked(lambda r, c, s: ev.CancelBarrier(c, r.barrier_id, r.counter, member(s, r.source_task_id))),
            _nothing,
        ),
        "GetAliveTasks": (
            checked(lambda r, c, s: ev.AliveMembers(c, member(s, r.requesting_task_id), members(s, r.task_ids))),
            alive,
        ),
        "PollForError": (checked(lambda r, c, s: ev.PollError(c, member(s, r.source_task_id))), _nothing),
    }
    return [_method(dialect, name, classes, *table[name]) for name in classes]


# tensorflow


def _tensorflow_methods() -> list[Method]:
    service = "tensorflow.CoordinationService"
    classes = _TENSORFLOW.methods(service)
    error = _TENSORFLOW.message("tensorflow.CoordinationServiceError")

    def error_of(problem: Failure) -> bytes:
        payload = error(is_reported_error=problem.reported)
        if problem.source is not None:
            payload.source_task.job_name, payload.source_task.task_id = problem.source
        return bytes(payload.SerializeToString())

    dialect = Dialect(service, lambda member: f"/job:{member.role}/replica:0/task:{member.rank}", error_of)

    def member(task: Any) -> Member:
        return Member(task.job_name, task.task_id)

    def members(tasks: Any) -> tuple[Member, ...]:
        return tuple(Member(task.job_name, task.task_id) for task in tasks)

    def response(request: Any) -> Any:
        return classes[request.DESCRIPTOR.name.removesuffix("Request")][1]()

    def kv(value: Any, request: Any, state: CoordinationState) -> bytes:
        answer = response(request)
        answer.kv.key, answer.kv.value = request.key, value
        return bytes(answer.SerializeToString())

    def incarnation(value: Any, request: Any, state: CoordinationState) -> bytes:
        return bytes(type(response(request))(leader_incarnation=state.settings.incarnation).SerializeToString())

    def states(value: Any, request: Any, state: CoordinationState) -> bytes:
        answer = response(request)
        views = value
        if request.DESCRIPTOR.name == "WatchJobStateRequest":
            answer.version_number, views = value
        for view in views:
            info = answer.task_state.add()
            info.task.job_name, info.task.task_id = view.member
            _describe(view, info, dialect)
        return bytes(answer.SerializeToString())

    def alive(value: Any, request: Any, state: CoordinationState) -> bytes:
        answer = response(request)
        for alive_member, number in value:
            answer.alive_tasks.add(job_name=alive_member.role, task_id=alive_member.rank)
            answer.incarnations.append(number)
        return bytes(answer.SerializeToString())

    def devices(request: Any, call: int, state: CoordinationState) -> Event:
        info = request.local_device_info if request.HasField("local_device_info") else request.device_info
        return ev.ExchangeDevices(call, member(request.source_task), info.SerializeToString())

    def all_devices(value: Any, request: Any, state: CoordinationState) -> bytes:
        answer = response(request)
        answer.leader_incarnation = state.settings.incarnation
        if request.HasField("local_device_info"):
            answer.cluster_device_info.CopyFrom(merge_seed_devices(value))
        else:
            answer.device_info.CopyFrom(merge_devices(value))
        return bytes(answer.SerializeToString())

    no_agent = "CoordinationServiceAgent is uninitialized or has already shutdown."
    table: dict[str, tuple[Parse, Build]] = {
        "RegisterTask": (
            lambda r, c, s: ev.Register(c, member(r.source_task), r.incarnation, r.source_task.recoverable or None),
            incarnation,
        ),
        "Heartbeat": (lambda r, c, s: ev.Heartbeat(c, member(r.source_task), r.incarnation), incarnation),
        "WaitForAllTasks": (devices, all_devices),
        "ShutdownTask": (lambda r, c, s: ev.Shutdown(c, member(r.source_task)), _nothing),
        "ResetTask": (lambda r, c, s: ev.Reset(c, member(r.source_task)), _nothing),
        "ReportErrorToTask": (lambda r, c, s: failure(Code.INTERNAL, no_agent), _nothing),
        "ReportErrorToService": (
            lambda r, c, s: ev.ReportError(c, member(r.error_origin), r.error_code, r.error_message),
            _nothing,
        ),
        "GetTaskState": (lambda r, c, s: ev.QueryMembers(c, list(members(r.source_task))), states),
        "GetJobState": (lambda r, c, s: ev.QueryMembers(c, role=r.job_name), states),
        "WatchJobState": (lambda r, c, s: ev.WatchMembers(c, r.job_name, _version(r)), states),
        "InsertKeyValue": (lambda r, c, s: ev.InsertKey(c, r.kv.key, r.kv.value, r.allow_overwrite), _nothing),
        "GetKeyValue": (lambda r, c, s: ev.GetKey(c, r.key), kv),
        "TryGetKeyValue": (lambda r, c, s: ev.TryGetKey(c, r.key), kv),
        "IncrementKeyValue": (lambda r, c, s: ev.IncrementKey(c, r.key, r.increment), kv),
        "GetKeyValueDir": (
            lambda r, c, s: ev.ListKeys(c, r.directory_key),
            lambda v, r, s: _key_values(response(r), v),
        ),
        "DeleteKeyValue": (lambda r, c, s: ev.DeleteKey(c, r.key), _nothing),
        "Barrier": (
            lambda r, c, s: ev.EnterBarrier(
                c, r.barrier_id, r.counter, r.barrier_timeout_in_ms / 1000, member(r.source_task), members(r.tasks)
            ),
            lambda v, r, s: bytes(classes["Barrier"][1](counter=v).SerializeToString()),
        ),
        "CancelBarrier": (
            lambda r, c, s: ev.CancelBarrier(c, r.barrier_id, r.counter, member(r.source_task)),
            _nothing,
        ),
        "GetAliveTasks": (
            lambda r, c, s: ev.AliveMembers(c, member(r.requesting_task), members(r.tasks)),
            alive,
        ),
        "PollForError": (lambda r, c, s: ev.PollError(c, member(r.source_task)), _nothing),
    }
    return [_method(dialect, name, classes, *table[name]) for name in classes]


# xla.DistributedRuntimeService


def _runtime_methods() -> list[Method]:
    service = "xla.DistributedRuntimeService"
    classes = dict(_RUNTIME[3].methods(service))
    enumerate_class = _WIRE.message("fastrt.coordination.EnumerateDevices")
    head = _WIRE.message("fastrt.coordination.TopologyHead")
    answer_classes = {version: set_.methods(service)["EnumerateDevices"][1] for version, set_ in _RUNTIME.items()}
    classes["EnumerateDevices"] = (enumerate_class, None)
    dialect = Dialect(service, lambda member: str(member.rank), lambda problem: b"")

    def key(data: bytes) -> str:
        return data.decode("utf-8", "surrogateescape")

    def version_of(request: Any, state: CoordinationState) -> int:
        rank = head.FromString(request.local_topology).node_id
        nodes = state.nodes.nodes
        return nodes[rank].version if 0 <= rank < len(nodes) else 3

    def devices(request: Any, call: int, state: CoordinationState) -> Event | Failure:
        try:
            rank = head.FromString(request.local_topology).node_id
            known = is_topology(version_of(request, state), request.local_topology)
        except Exception:  # protobuf's DecodeError differs between its runtimes
            known = False
        if not known:
            words = "EnumerateDevices: local_topology is no xla.LocalTopologyProto of the version given at Connect."
            return failure(Code.INVALID_ARGUMENT, words, marked=False)
        return ev.NodeEnumerate(call, request.session_id, rank, request.local_topology)

    def all_devices(value: Any, request: Any, state: CoordinationState) -> bytes:
        version = version_of(request, state)
        return bytes(answer_classes[version](global_topology=merge_nodes(version, value)).SerializeToString())

    table: dict[str, tuple[Parse, Build]] = {
        "Connect": (
            lambda r, c, s: ev.NodeConnect(c, r.node_id, r.client_id, r.timeout_milliseconds / 1000, r.protocol_version),
            lambda v, r, s: bytes(classes["Connect"][1](session_id=v).SerializeToString()),
        ),
        "EnumerateDevices": (devices, all_devices),
        "Heartbeat": (lambda r, c, s: ev.NodeHeartbeat(c, r.session_id, r.node_id), _nothing),
        "Shutdown": (lambda r, c, s: ev.NodeShutdown(c, r.session_id, r.node_id), _nothing),
        "KeyValueGet": (
            lambda r, c, s: ev.NodeGetKey(c, r.session_id, key(r.key), r.timeout_milliseconds / 1000),
            lambda v, r, s: bytes(classes["KeyValueGet"][1](found=True, value=v).SerializeToString()),
        ),
        "KeyValueSet": (lambda r, c, s: ev.NodeSetKey(c, r.session_id, key(r.key), r.value), _nothing),
        "WaitAtBarrier": (
            lambda r, c, s: ev.NodeBarrier(c, r.session_id, r.node_id, r.barrier_id, r.timeout_milliseconds / 1000),
            _nothing,
        ),
    }
    return [_method(dialect, name, classes, *table[name]) for name in classes]


_READS = {
    "GetKeyValue", "TryGetKeyValue", "GetKeyValueDir", "KeyValueGet", "Heartbeat", "PollForError", "GetTaskState",
    "GetJobState", "WatchJobState", "WatchTasks", "GetAliveTasks", "WaitForAllTasks", "EnumerateDevices",
    "ReportErrorToTask",
}  # fmt: skip


def _method(dialect: Dialect, name: str, classes: dict[str, Any], parse: Parse, build: Build) -> Method:
    return Method(f"/{dialect.service}/{name}", classes[name][0], parse, build, name not in _READS, dialect)


def _version(request: Any) -> int | None:
    return request.version_number if request.version_number >= 0 else None


def _describe(view: MemberView, info: Any, dialect: Dialect) -> None:
    """Fill in what both newer dialects say of a member."""
    info.state, info.incarnation = view.state, view.incarnation
    if view.error is not None:
        info.error_code = int(view.error.code)
        info.error_message = dialect.message(view.error)
        payload = Failure(view.error.code, (), source=view.member)
        info.error_payload.ParseFromString(dialect.source_error(payload))


__all__ = ["DeviceInfo", "Dialect", "Method", "SeedDeviceInfo", "all_methods", "parse_request"]
