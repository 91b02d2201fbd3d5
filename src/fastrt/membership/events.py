"""What can happen to a cluster's membership, and what its state machine orders in return.

Events are facts that a shell reports; effects are what the shell must do. `call` is an opaque number by which the
shell knows who waits for an answer, `link` one by which it knows a member's connection: a link is used once, so it
also tells a member's lives apart.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrt.errors import FastrtError


class Role(enum.IntEnum):
    """What a process is in the cluster; the wire's numbers."""

    SERVER = 0
    WORKER = 1
    SCHEDULER = 2


class Phase(enum.IntEnum):
    """What a cluster is doing; the numbers of the wire's ClusterState."""

    STARTING = 0
    READY = 1
    EXIT = 2
    NODE_TIMEOUT = 3
    SCALE_OUT = 4
    SCALE_IN = 5
    NEW_INSTANCE = 6
    ENABLE_FLS = 7
    DISABLE_FLS = 8


class Instruction(enum.IntEnum):
    """What all servers can be told to do; the wire's user commands."""

    NEW_INSTANCE = 19
    QUERY_INSTANCE = 20
    ENABLE_FLS = 21
    DISABLE_FLS = 22


class Refused(FastrtError):
    """A request that cannot be; it has changed nothing. The message says why."""


class NotReady(Refused):
    """A request that the phase of the cluster does not allow now; it may be allowed later."""


# Requests of members


@dataclass(slots=True)
class Register:
    """A process wants to be a member, or comes back, or has finished what it did before a scaling.

    Answered with None. Its rank comes with `Metadata`, once all members are there.
    """

    call: int
    link: int
    member_id: str
    role: Role
    host: str
    port: int


@dataclass(slots=True)
class Heartbeat:
    """A member is alive: answered with an `Overview`."""

    call: int
    link: int
    member_id: str


@dataclass(slots=True)
class Fetch:
    """A member wants to know who is there: answered with an `Overview`."""

    call: int
    member_id: str


@dataclass(slots=True)
class Finish:
    """A member is done: answered with None. When all are, all are told `Ended`."""

    call: int
    link: int
    member_id: str


@dataclass(slots=True)
class ScaleDone:
    """A member goes on after a scaling: answered with None. When all do, all are told `ScaleEnded`."""

    call: int
    link: int
    member_id: str
    phase: Phase


@dataclass(slots=True)
class Publish:
    """A member has a number for all of them, itself too: answered with None."""

    call: int
    link: int
    member_id: str
    number: int


# Requests of who manages the cluster


@dataclass(slots=True)
class ScaleOut:
    """So many workers and servers more: answered with None when it has begun."""

    call: int
    workers: int
    servers: int


@dataclass(slots=True)
class ScaleIn:
    """These members shall leave: answered with None when it has begun."""

    call: int
    member_ids: Sequence[str]


@dataclass(slots=True)
class TakeBack:
    """The scaling that is under way is not to be waited for: answered with None when it has been taken back, or, one in
    whose leavers have gone, when it has ended."""

    call: int


@dataclass(slots=True)
class Instruct:
    """All servers are told something: answered with what `Instructed` brings."""

    call: int
    instruction: Instruction
    body: bytes


@dataclass(slots=True)
class Instructed:
    """The servers' answers are in, or not to be had: `result` is the answer of `Instruct`."""

    call: int
    result: Any


@dataclass(slots=True)
class View:
    """Who is there? Answered with an `Overview`."""

    call: int


# Facts that nobody waits on


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
    """A member as others see it. Made anew when it changes, so that what is derived from it can be kept."""

    member_id: str
    role: Role
    rank: int
    host: str
    port: int
    alive: bool
    finished: bool


class Overview(NamedTuple):
    """The cluster at one moment.

    Attributes:
        phase: what it is doing.
        workers: how many it wants.
        servers: how many it wants.
        members: by role and rank.
        is_impaired: a worker or server 0 is lost.
    """

    phase: Phase
    workers: int
    servers: int
    members: tuple[MemberView, ...]
    is_impaired: bool


# Effects. What is for one link is carried out in the order given, and never waited for.


class Answer(NamedTuple):
    """What the caller is told: a value, or the `Refused` that it met."""

    call: int
    value: Any


class Metadata(NamedTuple):
    """All members are there. `ranks` has one for each link that is told; None: not a member any more."""

    overview: Overview
    ranks: Sequence[int | None]


class PrepareScale(NamedTuple):
    """Finish what you do, then register again. So many there will be; `leaving`: the receiver is not among them."""

    phase: Phase
    workers: int
    servers: int
    leaving: bool = False


class ScaleEnded(NamedTuple):
    """All have gone on after a scaling."""

    phase: Phase


class Published(NamedTuple):
    """A member's number for all."""

    number: int


class Ended(NamedTuple):
    """All members are done."""


Order = Metadata | PrepareScale | ScaleEnded | Published | Ended


class Tell(NamedTuple):
    """Tell the members at these links something."""

    links: Sequence[int]
    order: Order


class Changed(NamedTuple):
    """Tell the members that want to know at once which ones are lost now, and what the cluster is doing."""


class Ask(NamedTuple):
    """Give servers, by link and rank, an instruction; collect their answers by rank, and report `Instructed`."""

    call: int
    servers: Sequence[tuple[int, int]]
    instruction: Instruction
    body: bytes


class Drop(NamedTuple):
    """Close a connection, after what was to be told there."""

    link: int
    reason: str


class Persist(NamedTuple):
    """Write a record, or drop it (None), before anything else of this batch becomes known."""

    kind: str
    key: str
    value: bytes | None


Effect = Answer | Tell | Changed | Ask | Drop | Persist
