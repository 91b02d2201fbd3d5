"""The events of the coordination state machine, and the effects that it returns.

Events are facts that a shell reports together with the time; effects are orders that the shell carries out. `call` is
an opaque number by which the shell identifies the caller that waits for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrt.coordination.status import Code, Failure, Member


@dataclass
class Register:
    """A member starts or restarts: answered with None once all members have registered.

    `waited_s`: how long its caller has waited already, at an earlier process of this service.
    """

    call: int
    member: Member
    incarnation: int
    recoverable: bool | None = None
    waited_s: float = 0.0


@dataclass
class Heartbeat:
    """A heartbeat: answered with None at once."""

    call: int
    member: Member
    incarnation: int


@dataclass
class Shutdown:
    """A member shuts down: answered with None when all do (the shutdown barrier). `waited_s` as in `Register`.

    `leaves`: the member disconnects even if the barrier times out, and is not set to error then.
    """

    call: int
    member: Member
    waited_s: float = 0.0
    leaves: bool = False


@dataclass
class Reset:
    """A member disconnects on request, also after an error."""

    call: int
    member: Member


@dataclass
class ReportError:
    """A member reports its own error, which is sent to all members that poll."""

    call: int
    member: Member
    code: int
    message: str


@dataclass
class ExchangeDevices:
    """A member's devices: answered with those of all members, in order of rank, when all have called."""

    call: int
    member: Member
    devices: bytes


@dataclass
class QueryMembers:
    """Answered with `MemberView`s of the named members, of one role, or of all members."""

    call: int
    members: list[Member] | None = None
    role: str | None = None


@dataclass
class WatchMembers:
    """Waits until the version differs from the caller's (None: at once); answered with version and `MemberView`s."""

    call: int
    role: str | None
    version: int | None


@dataclass
class PollError:
    """Answered only by a failure: when any member fails, when this one disconnects, or polls again."""

    call: int
    member: Member


@dataclass
class InsertKey:
    """Set a key; rejected if it exists and `overwrite` is False."""

    call: int
    key: str
    value: bytes
    overwrite: bool


@dataclass
class GetKey:
    """Answered with the value, once the key is set."""

    call: int
    key: str


@dataclass
class TryGetKey:
    """Answered with the value, or NOT_FOUND."""

    call: int
    key: str


@dataclass
class IncrementKey:
    """Add to a decimal value; a missing one counts as 0. Answered with the new text."""

    call: int
    key: str
    amount: int


@dataclass
class ListKeys:
    """Answered with (key, value) pairs below a directory, ordered by key."""

    call: int
    directory: str


@dataclass
class DeleteKey:
    """Remove a key and all keys below it."""

    call: int
    key: str


@dataclass
class EnterBarrier:
    """A member enters a barrier: answered with the round's number when all members have."""

    call: int
    barrier_id: str
    counter: int
    timeout_s: float
    member: Member
    members: tuple[Member, ...] = ()


@dataclass
class CancelBarrier:
    """Fail a barrier for all waiting callers, and for later callers of the same round."""

    call: int
    barrier_id: str
    counter: int
    member: Member


@dataclass
class AliveMembers:
    """Answered, once all connected members of the set have asked, with (member, incarnation) of each of them."""

    call: int
    member: Member
    members: tuple[Member, ...]


@dataclass
class NodeConnect:
    """The older runtime service: a node joins; answered with the session id when all have."""

    call: int
    node: int
    client: int
    timeout_s: float
    version: int


@dataclass
class NodeEnumerate:
    """The older runtime service: a node's topology; answered with those of all nodes, in order of node."""

    call: int
    session: int
    node: int
    topology: bytes


@dataclass
class NodeHeartbeat:
    """The older runtime service: a heartbeat."""

    call: int
    session: int
    node: int


@dataclass
class NodeShutdown:
    """The older runtime service: answered when all nodes have called it."""

    call: int
    session: int
    node: int


@dataclass
class NodeGetKey:
    """The older runtime service: wait for a key, at most `timeout_s`."""

    call: int
    session: int
    key: str
    timeout_s: float


@dataclass
class NodeSetKey:
    """The older runtime service: set a key, replacing an old value."""

    call: int
    session: int
    key: str
    value: bytes


@dataclass
class NodeBarrier:
    """The older runtime service: a barrier of all nodes; each id can be used once."""

    call: int
    session: int
    node: int
    barrier_id: bytes
    timeout_s: float


@dataclass
class Forget:
    """The caller of `call` disconnected: it needs no answer."""

    call: int


@dataclass
class Tick:
    """Time has passed."""


@dataclass
class Stop:
    """The service shuts down: all waiting calls are answered."""


Event = (
    Register
    | Heartbeat
    | Shutdown
    | Reset
    | ReportError
    | ExchangeDevices
    | QueryMembers
    | WatchMembers
    | PollError
    | InsertKey
    | GetKey
    | TryGetKey
    | IncrementKey
    | ListKeys
    | DeleteKey
    | EnterBarrier
    | CancelBarrier
    | AliveMembers
    | NodeConnect
    | NodeEnumerate
    | NodeHeartbeat
    | NodeShutdown
    | NodeGetKey
    | NodeSetKey
    | NodeBarrier
    | Forget
    | Tick
    | Stop
)


class Answer(NamedTuple):
    """Order: answer `call`; `value` is a Failure, or the value in the event's docstring."""

    call: int
    value: Any


class Persist(NamedTuple):
    """Order: keep a record (None: drop it) before any answer of the same step is sent."""

    kind: str
    key: str
    value: bytes | None


Effect = Answer | Persist


class MemberView(NamedTuple):
    """The view of a member that callers get."""

    member: Member
    state: int
    incarnation: int
    error: Failure | None


__all__ = ["Answer", "Code", "Effect", "Event", "Failure", "Member", "MemberView", "Persist"]
