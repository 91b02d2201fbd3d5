"""Converts the seed's messages to events and answers to messages, and validates every request.

Each length and count of a request is checked before it is used, and a rejection names the field. The values of a call
are passed on unchanged; only the references in them are collected, to the greatest depth allowed.

Source: protos/ray; the limits are those of SECURITY.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Code, Event, Refused

# Larger values travel between stores in chunks.
MESSAGE_BYTES_MAX = 8 << 20
NAME_BYTES_MAX = 256
ADDRESS_BYTES_MAX = 256
ARGS_MAX = 10_000
RESULTS_MAX = 10_000
REFS_MAX = 1_000_000
CONTAINED_MAX = 1_000_000
DEPTH_MAX = 32

_SET = message_set("ray")
SERVICE = "Scheduler"
CLASSES = _SET.methods(SERVICE)
_Call = _SET.message("Call")
# Batches for fastrt's peers, protos/scheduler.
LINK_SERVICE = "fastrt.scheduler.Link"
LINK = message_set("scheduler").methods(LINK_SERVICE)
LinkAnswer = message_set("scheduler").message("fastrt.scheduler.Answer")
ATTACH, EXCHANGE = (f"/{LINK_SERVICE}/{name}" for name in ("Attach", "Exchange"))
_InfoMark = message_set("transfer").message("fastrt.transfer.SchedulerInfoMark")
_ACK = b""

Parse = Callable[[Any, int], Event]
Build = Callable[[Any], bytes]


class Method(NamedTuple):
    """One method of the protocol.

    Attributes:
        request: the class of its request.
        parse: makes an event of a request and a call number; raises `Refused`.
        build: makes the response's bytes of the answer's value.
        changes: whether it changes the state, so that the log keeps it.
    """

    request: Any
    parse: Parse
    build: Build
    changes: bool = True


def parse_request(path: str, body: bytes, call: int) -> Event:
    """The event of a request.

    Raises:
        Refused: the body cannot be parsed, or a field is outside of its limits.
    """
    method = METHODS[path]
    try:
        request = method.request.FromString(body)
    except Exception:  # protobuf's DecodeError differs between its runtimes
        name = method.request.DESCRIPTOR.full_name
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"{path}: the request's {len(body)} bytes are no valid {name}. Check the client's version.",
        ) from None
    return method.parse(request, call)


def invoke_request(body: bytes, results: Sequence[int]) -> bytes:
    """The bytes of an InvokeCallRequest: the submitted call, which has no results yet, with those references."""
    # Two messages in a row are one with the fields of both.
    call = body + bytes(_Call(result=results).SerializeToString())
    return _CALL_FIELD + _varint(len(call)) + call


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: 7 bits a byte, the lowest first."""
    done = bytearray()
    while number > 127:
        done.append(number & 127 | 128)
        number >>= 7
    done.append(number)
    return bytes(done)


def _ack(value: Any) -> bytes:
    return _ACK


def _refs(field: str, values: Any, most: int = REFS_MAX) -> array[int]:
    if len(values) > most:
        raise Refused(Code.INVALID_ARGUMENT, f"{field} has {len(values)} references; at most {most} in one message.")
    return array("Q", values)


def _text(field: str, value: str, most: int) -> str:
    size = len(value.encode())
    if not 1 <= size <= most:
        shown = f"{value[:40]!r}..." if size > most else "empty"
        raise Refused(Code.INVALID_ARGUMENT, f"{field} is {shown}, of {size} bytes; it must have 1 to {most}.")
    return value


def _remote_call(request: Any, call: int) -> Event:
    said = request.call
    _text("call.name", said.name, NAME_BYTES_MAX)
    if len(said.arg) > ARGS_MAX:
        raise Refused(Code.INVALID_ARGUMENT, f"call.arg has {len(said.arg)} values; at most {ARGS_MAX}.")
    if said.result:
        raise Refused(Code.INVALID_ARGUMENT, "call.result is set; the scheduler makes the references of results.")
    args: list[int] = []
    nested: list[int] = []
    for index, value in enumerate(said.arg):
        if value.HasField("obj"):
            _find_refs(value.obj, f"call.arg[{index}].obj", nested)
        else:
            args.append(value.ref)
    return ev.RemoteCall(call, said.name, said.SerializeToString(), args, nested)


def _find_refs(obj: Any, field: str, found: list[int]) -> None:
    """Collect the references inside of a value, level by level."""
    level, depth = [obj], 1
    while level:
        if depth > DEPTH_MAX:
            raise Refused(Code.INVALID_ARGUMENT, f"{field} is nested deeper than {DEPTH_MAX} levels.")
        inner: list[Any] = []
        for each in level:
            if each.HasField("objref_data"):
                found.append(each.objref_data.data)
            found.extend(each.array_data.objref_data)
            inner.extend(each.list_data.elem)
            inner.extend(each.tuple_data.elem)
            for entry in each.dict_data.elem:
                inner += [entry.key, entry.value]
        if len(found) > REFS_MAX:
            raise Refused(Code.INVALID_ARGUMENT, f"{field} has more than {REFS_MAX} references in it.")
        level, depth = inner, depth + 1


def _register_function(request: Any, call: int) -> Event:
    name = _text("fnname", request.fnname, NAME_BYTES_MAX)
    if request.num_return_vals > RESULTS_MAX:
        raise Refused(
            Code.INVALID_ARGUMENT, f"num_return_vals is {request.num_return_vals}; it must be at most {RESULTS_MAX}."
        )
    return ev.RegisterFunction(call, request.workerid, name, request.num_return_vals)


def _register_worker(request: Any, call: int) -> Event:
    worker = _text("worker_address", request.worker_address, ADDRESS_BYTES_MAX)
    return ev.RegisterWorker(call, worker, _text("objstore_address", request.objstore_address, ADDRESS_BYTES_MAX))


def _info(info: ev.Info) -> bytes:
    reply = CLASSES["SchedulerInfo"][1]()
    for body, results in info.tasks:
        task = reply.task.add()
        task.MergeFromString(body)
        task.result.extend(results)
    for name, function in info.functions.items():
        entry = reply.function_table[name]
        entry.workerid.extend(function.workers)
        entry.num_return_vals = function.result_count
    reply.avail_worker.extend(info.idle_workers)
    reply.target_objref.extend(info.targets)
    reply.reference_count.extend(info.counts)
    mark = _InfoMark(first_objref=info.first)
    for ref, count, target in info.older:
        mark.older.add(objref=ref, count=count, target=target)
    return bytes(reply.SerializeToString() + mark.SerializeToString())


_REPLIES = {name: reply for name, (_, reply) in CLASSES.items()}
_CALL_FIELD = b"\x0a"  # field 1 of an InvokeCallRequest, with its length

_TABLE: dict[str, tuple[Parse, Build]] = {
    "RegisterWorker": (
        _register_worker,
        lambda value: bytes(_REPLIES["RegisterWorker"](workerid=value).SerializeToString()),
    ),
    "RegisterObjStore": (
        lambda r, c: ev.RegisterObjStore(c, _text("objstore_address", r.objstore_address, ADDRESS_BYTES_MAX)),
        lambda value: bytes(_REPLIES["RegisterObjStore"](objstoreid=value).SerializeToString()),
    ),
    "RegisterFunction": (_register_function, _ack),
    "RemoteCall": (_remote_call, lambda value: bytes(_REPLIES["RemoteCall"](result=value).SerializeToString())),
    "IncrementCount": (lambda r, c: ev.IncrementRefs(c, array("Q", [r.objref])), _ack),
    "DecrementCount": (lambda r, c: ev.DecrementRefs(c, array("Q", [r.objref])), _ack),
    "PushObj": (
        lambda r, c: ev.PushObj(c, r.workerid),
        lambda value: bytes(_REPLIES["PushObj"](objref=value).SerializeToString()),
    ),
    "RequestObj": (lambda r, c: ev.RequestObj(c, r.workerid, r.objref), _ack),
    "AliasObjRefs": (lambda r, c: ev.AliasObjRefs(c, r.alias_objref, r.target_objref), _ack),
    "ObjReady": (lambda r, c: ev.ObjReady(c, r.objref, r.objstoreid), _ack),
    "IncrementRefCount": (lambda r, c: ev.IncrementRefs(c, _refs("objref", r.objref)), _ack),
    "DecrementRefCount": (lambda r, c: ev.DecrementRefs(c, _refs("objref", r.objref)), _ack),
    "AddContainedObjRefs": (
        lambda r, c: ev.AddContained(c, r.objref, _refs("contained_objref", r.contained_objref, CONTAINED_MAX)),
        _ack,
    ),
    "WorkerReady": (lambda r, c: ev.WorkerReady(c, r.workerid), _ack),
    "SchedulerInfo": (lambda r, c: ev.SchedulerInfo(c), _info),
}
METHODS = {
    f"/{SERVICE}/{name}": Method(CLASSES[name][0], parse, build, name != "SchedulerInfo")
    for name, (parse, build) in _TABLE.items()
}
