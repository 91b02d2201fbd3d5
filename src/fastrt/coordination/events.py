"""What can happen to the coordination state machine, and what it orders in return.

Events are facts that a shell reports together with the time; effects are what the shell must do. `call` is an
opaque number by which the shell knows the caller that waits for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrt.coordination.status import Code, Failure, Member


@dataclass
class Register:
    """A member starts (or starts again): answered with None once all members have registered.

    `waited_s`: how long its caller has waited already, at an earlier process of this service.
    """

    call: int
    member: Member
    incarnation: int
    recoverable: bool | None = None
    waited_s: float = 0.0


@dataclass
class Heartbeat:
    """A sign of life: answered with None at once."""

    call: int
    member: Member
    incarnation: int


@dataclass
class Shutdown:
    """A member is done: answered with None when all are (the shutdown barrier). `waited_s` as in `Register`.

    `leaves`: the member disconnects also when the barrier times out, and is not in error then.
    """

    call: int
    member: Member
    waited_s: float = 0.0
    leaves: bool = False


@dataclass
class Reset:
    """A member disconnects by itself, also out of an error."""

    call: int
    member: Member


@dataclass
class ReportError:
    """A member reports its own error, which goes to all that poll."""

    call: int
    member: Member
    code: int
    message: str


@dataclass
class ExchangeDevices:
    """A member's devices: answered with everybody's, in order of rank, when all have called."""

    call: int
    member: Member
    devices: bytes


@dataclass
class QueryMembers:
    """Answered with `MemberView`s: of the members named, or of one role, or of all."""

    call: int
    members: list[Member] | None = None
    role: str | None = None


@dataclass
class WatchMembers:
    """As `QueryMembers`, but waits until the version differs from the one the caller has seen (None: at once)."""

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
    """Set a key; refused when it exists, unless `overwrite`."""

    call: int
    key: str
    value: bytes
    overwrite: bool


@dataclass
class GetKey:
    """Answered with the value, as soon as there is one."""

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
    """Remove a key and all below it."""

    call: int
    key: str


@dataclass
class EnterBarrier:
    """A member reaches a barrier: answered with the round's number when all have."""

    call: int
    barrier_id: str
    counter: int
    timeout_s: float
    member: Member
    members: tuple[Member, ...] = ()


@dataclass
class CancelBarrier:
    """Fail a barrier for all that wait at it, and for all that come later in this round."""

    call: int
    barrier_id: str
    counter: int
    member: Member


@dataclass
class AliveMembers:
    """Answered, alike to all askers, with (member, incarnation) of the connected ones once all of those have asked."""

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
    """The older runtime service: a node's topology; answered with everybody's in order of node."""

    call: int
    session: int
    node: int
    topology: bytes


@dataclass
class NodeHeartbeat:
    """The older runtime service: a sign of life."""

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
    """The older runtime service: a barrier of all nodes, each id once."""

    call: int
    session: int
    node: int
    barrier_id: bytes
    timeout_s: float


@dataclass
class Forget:
    """The caller of `call` went away: it needs no answer."""

    call: int


@dataclass
class Tick:
    """Time has passed."""


@dataclass
class Stop:
    """The service shuts down: everybody who waits is told."""


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
    """Order: answer `call`; `value` is a Failure, or what the event's docstring says."""

    call: int
    value: Any


class Persist(NamedTuple):
    """Order: keep a record (None: drop it) before any answer of the same step is sent."""

    kind: str
    key: str
    value: bytes | None


Effect = Answer | Persist


class MemberView(NamedTuple):
    """A member as others may see it."""

    member: Member
    state: int
    incarnation: int
    error: Failure | None


__all__ = ["Answer", "Code", "Effect", "Event", "Failure", "Member", "MemberView", "Persist"]
