"""Members and failures of the coordination state machine.

A failure's message names members, and the dialects write a member differently (`1` and
`/job:jax_worker/replica:0/task:1`). Callers of several dialects get the same failure, so its message stays in parts
until a dialect renders it: plain text, members, and quoted failures.

Source: `absl::Status` with its payloads, as jaxlib's coordination service fills them.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Union


class Code(enum.IntEnum):
    """Status codes, with the numbers that gRPC and absl share."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Member(NamedTuple):
    """One process of a job; the wire calls it a task or a node."""

    role: str
    rank: int


Part = Union[str, Member, "Failure"]  # a string cannot be an operand of | before its class exists


@dataclass(frozen=True)
class Failure:
    """The failure of a call, a barrier or a member.

    Attributes:
        code: the gRPC status code.
        parts: the parts of the message, in order; `Dialect.message` joins them.
        marked: whether it has the CoordinationServiceError payload (all but plain key-value errors have).
        source: the member that failed, None when it is the caller's error.
        reported: whether the member reported the error itself.
        barrier: id and round of the barrier that failed.
        mismatch: the service's incarnation, when the caller named another one.
    """

    code: Code
    parts: tuple[Part, ...]
    marked: bool = True
    source: Member | None = None
    reported: bool = False
    barrier: tuple[str, int] | None = None
    mismatch: int | None = None

    def of_barrier(self, barrier_id: str, counter: int) -> Failure:
        """The same failure, marked as a barrier's."""
        return replace(self, barrier=(barrier_id, counter))


def failure(code: Code, *parts: Part, **fields: Any) -> Failure:
    """A failure with the given words; `fields` as in `Failure`."""
    return Failure(code, parts, **fields)


def dump_failure(value: Failure | None) -> Any:
    """A failure as plain JSON values, for the durable store."""
    if value is None:
        return None
    return {
        "code": int(value.code),
        "parts": [_dump_part(part) for part in value.parts],
        "marked": value.marked,
        "source": value.source,
        "reported": value.reported,
        "barrier": value.barrier,
        "mismatch": value.mismatch,
    }


def load_failure(data: Any) -> Failure | None:
    """The reverse of `dump_failure`."""
    if data is None:
        return None
    return Failure(
        Code(data["code"]),
        tuple(_load_part(part) for part in data["parts"]),
        data["marked"],
        Member(*data["source"]) if data["source"] is not None else None,
        data["reported"],
        (data["barrier"][0], data["barrier"][1]) if data["barrier"] is not None else None,
        data["mismatch"],
    )


def _dump_part(part: Part) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, Failure):
        return dump_failure(part)
    return list(part)


def _load_part(data: Any) -> Part:
    if isinstance(data, str):
        return data
    if isinstance(data, dict):
        loaded = load_failure(data)
        assert loaded is not None
        return loaded
    return Member(*data)


def to_json(value: Any) -> bytes:
    """Compact JSON, for records of the durable store."""
    return json.dumps(value, separators=(",", ":")).encode()
