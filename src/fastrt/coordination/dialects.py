"""The common part of the three wire dialects. Each dialect's table is in a module of its name; the common part of the
two newer ones is in `dialect_newer`.

A dialect is a table of methods: each makes an event of a request, and a response of the answer's value. A dialect also
has its form of a member's name, because failure messages name members.

| module | service | spoken by |
|---|---|---|
| `dialect_xla` | `xla.coordination.CoordinationService` | JAX 0.7 and later |
| `dialect_tensorflow` | `tensorflow.CoordinationService` | the seed, TensorFlow, JAX up to 0.6 |
| `dialect_runtime` | `xla.DistributedRuntimeService` | the seed, JAX up to 0.4.13 without coordination service |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastrt.coordination.events import Event
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure, Member, failure
from fastrt.net.grpc.descriptors import message_set

_WIRE = message_set("coordination")
_XLA = message_set("coordination_xla")

_URL = "type.googleapis.com/tensorflow."
_StatusPayloads = _WIRE.message("fastrt.coordination.StatusPayloads")
_BarrierError = _XLA.message("xla.coordination.BarrierError")
_MismatchError = _XLA.message("xla.coordination.ServiceMismatchError")

# Messages and payloads travel in HTTP/2 headers. Clients accept 8 KiB of those; a longer text would be lost.
_MESSAGE_CHARS_MAX = 3000
_BARRIER_ID_CHARS_MAX = 500
_C_ESCAPES = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x22: '\\"', 0x27: "\\'", 0x5C: "\\\\"}

Parse = Callable[[Any, int, CoordinationState], "Event | Failure"]
Build = Callable[[Any, Any, CoordinationState], bytes]


class RefusedAnswer(Exception):
    """Raised by a `Build` whose value cannot be put into a response; the call fails instead."""

    def __init__(self, problem: Failure) -> None:
        super().__init__()
        self.problem = problem


@dataclass(frozen=True)
class Method:
    """One method of a dialect.

    Attributes:
        path: its gRPC path, `/package.Service/Method`.
        request: the class of its request.
        parse: makes an event, or a failure to answer at once, of request, call and state.
        build: makes the response's bytes of the answer's value, the request and the state.
        mutates: whether the call must be carried out once only, even if it is submitted again after a crash.
        dialect: the dialect, which renders failures.
    """

    path: str
    request: Any
    parse: Parse
    build: Build
    mutates: bool
    dialect: Dialect


class Dialect:
    """The form of members and errors in one service.

    Args:
        service: its full name.
        write: makes the text of a member for messages.
        error: makes the CoordinationServiceError of a failure, as bytes.
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
        """A failure's message, with members in this dialect's form."""
        words = shown("".join(self._part(part) for part in problem.parts))
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


# The form of members outside of any caller's dialect.
INSIDE = Dialect("", lambda member: f"{member.role}/{member.rank}", lambda problem: b"")


def shown(text: str) -> str:
    """Make a text with a key of the runtime dialect printable: bytes that are not UTF-8 are written as `\\xff`.

    Neither gRPC nor protobuf accepts a string with surrogates, and a service must not fail over a quoted key.
    """
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def parse_request(method: Method, body: bytes, call: int, state: CoordinationState) -> tuple[Any, Event | Failure]:
    """Parse a request: returns its message, and its event or the failure to answer with."""
    try:
        request = method.request.FromString(body)
    except Exception:  # protobuf's DecodeError differs between its runtimes
        name = method.request.DESCRIPTOR.full_name
        words = f"{method.path}: the request's {len(body)} bytes are no valid {name}. Check the client's version."
        return None, failure(Code.INVALID_ARGUMENT, words, marked=False)
    return request, method.parse(request, call, state)


def nothing(value: Any, request: Any, state: CoordinationState) -> bytes:
    """The empty response of a method that only confirms."""
    return b""


def _c_escaped(data: bytes) -> str:
    return "".join(_C_ESCAPES.get(c) or (chr(c) if 0x20 <= c < 0x7F else f"\\x{c:02x}") for c in data)


READS = frozenset(
    {"GetKeyValue", "TryGetKeyValue", "GetKeyValueDir", "KeyValueGet", "Heartbeat", "PollForError", "GetTaskState"}
    | {"GetJobState", "WatchJobState", "WatchTasks", "GetAliveTasks", "WaitForAllTasks", "EnumerateDevices"}
    | {"ReportErrorToTask"}
)


def table_methods(
    dialect: Dialect, classes: Mapping[str, Any], table: Mapping[str, tuple[Parse, Build]]
) -> list[Method]:
    """The methods of one dialect, from its message classes and its table."""
    return [
        Method(f"/{dialect.service}/{name}", classes[name][0], parse, build, name not in READS, dialect)
        for name, (parse, build) in table.items()
    ]
