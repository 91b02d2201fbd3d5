"""Events and effects of a cluster's membership: the interface between its state machine and the shell around it.

Events are facts that the shell reports. Effects are actions that the shell must carry out. `call` is an opaque number
that the shell gives to a request, to find the caller that waits for its answer. `link` is the number of a connection;
it is never used again, so a member that reconnects has another link.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrt.errors import FastrtError
from fastrt.transitions import Transitions


class Role(enum.IntEnum):
    """A process's role in the cluster; the wire's numbers."""

    SERVER = 0
    WORKER = 1
    SCHEDULER = 2


class Phase(enum.IntEnum):
    """A cluster's state; the numbers of the wire's ClusterState."""

    STARTING = 0
    READY = 1
    EXIT = 2
    NODE_TIMEOUT = 3
    SCALE_OUT = 4
    SCALE_IN = 5
    NEW_INSTANCE = 6
    ENABLE_FLS = 7
    DISABLE_FLS = 8


_INSTRUCTED = {"instructed": Phase.READY, "incomplete": Phase.NODE_TIMEOUT, "all_finished": Phase.EXIT}
_ROUND = {"round_over": Phase.READY, "round_over_incomplete": Phase.NODE_TIMEOUT, "all_finished": Phase.EXIT}
# "complete": every rank has an owner that is alive or has finished; "incomplete": an owner is lost. "start_timeout":
# not all members came in time. "round_over" and "round_over_incomplete": a scaling has ended or was undone.
CLUSTER = Transitions(
    "cluster",
    {
        Phase.STARTING: {
            "complete": Phase.READY, "start_timeout": Phase.NODE_TIMEOUT, "all_finished": Phase.EXIT
        },
        Phase.READY: {
            "incomplete": Phase.NODE_TIMEOUT, "scale_out": Phase.SCALE_OUT, "scale_in": Phase.SCALE_IN,
            "new_instance": Phase.NEW_INSTANCE, "enable_fls": Phase.ENABLE_FLS, "disable_fls": Phase.DISABLE_FLS,
            "all_finished": Phase.EXIT,
        },
        Phase.NODE_TIMEOUT: {"complete": Phase.READY, "all_finished": Phase.EXIT},
        Phase.SCALE_OUT: _ROUND,
        Phase.SCALE_IN: _ROUND,
        Phase.NEW_INSTANCE: _INSTRUCTED,
        Phase.ENABLE_FLS: _INSTRUCTED,
        Phase.DISABLE_FLS: _INSTRUCTED,
        Phase.EXIT: {},
    },
)  # fmt: skip


class Instruction(enum.IntEnum):
    """An instruction that all servers execute; the wire's user commands."""

    NEW_INSTANCE = 19
    QUERY_INSTANCE = 20
    ENABLE_FLS = 21
    DISABLE_FLS = 22


class Refused(FastrtError):
    """A request was rejected and has changed nothing. The message says why."""


class NotReady(Refused):
    """The cluster's current phase does not allow a request; it may be allowed later."""


# Requests of members. Each docstring names the answer.


@dataclass(slots=True)
class Register:
    """A process joins, returns, or is ready for a scaling to be applied. Answered with None.

    Its rank comes with `Metadata`, once all members are present.
    """

    call: int
    link: int
    member_id: str
    role: Role
    host: str
    port: int


@dataclass(slots=True)
class Heartbeat:
    """A member reports that it is alive. Answered with an `Overview`."""

    call: int
    link: int
    member_id: str


@dataclass(slots=True)
class Fetch:
    """A member asks for the list of members. Answered with an `Overview`."""

    call: int
    member_id: str


@dataclass(slots=True)
class Finish:
    """A member has finished its work. Answered with None. When all have finished, `Ended` goes to all."""

    call: int
    link: int
    member_id: str


@dataclass(slots=True)
class ScaleDone:
    """A member continues after a scaling. Answered with None. When all continue, `ScaleEnded` goes to all."""

    call: int
    link: int
    member_id: str
    phase: Phase


@dataclass(slots=True)
class Publish:
    """A member sends a number to all members, itself included. Answered with None."""

    call: int
    link: int
    member_id: str
    number: int


# Management requests


@dataclass(slots=True)
class ScaleOut:
    """Add workers and servers. Answered with None when the scaling has begun."""

    call: int
    workers: int
    servers: int


@dataclass(slots=True)
class ScaleIn:
    """Remove members. Answered with None when the scaling has begun."""

    call: int
    member_ids: Sequence[str]


@dataclass(slots=True)
class TakeBack:
    """Abandon the scaling in progress. Answered with None when it is undone or, if its leavers have gone already, when
    it has been completed."""

    call: int


@dataclass(slots=True)
class Instruct:
    """Send an instruction to all servers. Answered with the result that `Instructed` brings."""

    call: int
    instruction: Instruction
    body: bytes


@dataclass(slots=True)
class Instructed:
    """The servers have answered an instruction, or failed to: `result` is the answer of `Instruct`."""

    call: int
    result: Any


@dataclass(slots=True)
class View:
    """Ask for the list of members. Answered with an `Overview`."""

    call: int


# Facts without an answer


@dataclass(slots=True)
class LinkLost:
    """A connection has ended."""

    link: int


@dataclass(slots=True)
class Tick:
    """Time has passed."""


Event = (
    Register
    | Heartbeat
    | Fetch
    | Finish
    | ScaleDone
    | Publish
    | ScaleOut
    | ScaleIn
    | TakeBack
    | Instruct
    | Instructed
    | View
    | LinkLost
    | Tick
)


class MemberView(NamedTuple):
    """The public data of a member. A change replaces the object, so that encodings can be cached by it."""

    member_id: str
    role: Role
    rank: int
    host: str
    port: int
    alive: bool
    finished: bool


class Overview(NamedTuple):
    """The cluster's state at one moment.

    Attributes:
        phase: the cluster's state.
        workers: number of workers that it should have.
        servers: number of servers that it should have.
        members: by role and rank.
        is_impaired: whether a worker or server 0 is lost.
    """

    phase: Phase
    workers: int
    servers: int
    members: tuple[MemberView, ...]
    is_impaired: bool


# Effects. Those for one link are carried out in the order given; none of them waits for a peer.


class Answer(NamedTuple):
    """Answer a caller with a value or the `Refused` of its request."""

    call: int
    value: Any


class Metadata(NamedTuple):
    """All members are present. `ranks` has the rank of the member at each link; None: it is no member any more."""

    overview: Overview
    ranks: Sequence[int | None]


class PrepareScale(NamedTuple):
    """Finish your work and register again: a scaling to these counts begins; `leaving`: the receiver is to leave."""

    phase: Phase
    workers: int
    servers: int
    leaving: bool = False


class ScaleEnded(NamedTuple):
    """All members continue after a scaling."""

    phase: Phase


class Published(NamedTuple):
    """A number that a member sent to all."""

    number: int


class Ended(NamedTuple):
    """All members have finished."""


Order = Metadata | PrepareScale | ScaleEnded | Published | Ended


class Send(NamedTuple):
    """Send an order to the members at these links."""

    links: Sequence[int]
    order: Order


class Changed(NamedTuple):
    """Notify the members that asked for changes of the cluster's phase and of the lost members."""


class Ask(NamedTuple):
    """Send an instruction to servers (link and rank), collect their answers by rank, and report `Instructed`."""

    call: int
    servers: Sequence[tuple[int, int]]
    instruction: Instruction
    body: bytes


class Drop(NamedTuple):
    """Close a connection after the orders for it were sent."""

    link: int
    reason: str


class Persist(NamedTuple):
    """Write a record, or delete it (None), before any other effect of this batch is carried out."""

    kind: str
    key: str
    value: bytes | None


Effect = Answer | Send | Changed | Ask | Drop | Persist
