"""Options of a cluster member, the events that it reports, and the errors that its calls raise."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from fastrt.errors import FastrtError
from fastrt.membership.events import Phase, Role
from fastrt.membership.framing import FRAME_BYTES_MAX


class RegistrationRefusedError(FastrtError):
    """The scheduler rejected this member: the cluster is full, or another member with this id is connected."""


class ClusterTimeoutError(FastrtError, TimeoutError):
    """A member or response of the cluster did not come in time. Wait again, or look at `fastrt ps status`."""


class MemberEvent(enum.IntEnum):
    """Event that a member reports to `on_event`; up to 6 the numbers of upstream's ClusterEvent."""

    NODE_TIMEOUT = 1
    SCHEDULER_TIMEOUT = 2
    READY_FOR_SCALE_OUT = 3
    READY_FOR_SCALE_IN = 4
    SCALE_OUT_DONE = 5
    SCALE_IN_DONE = 6
    RECOVERED = 1001
    SCALE_TAKEN_BACK = 1002


@dataclass
class MemberOptions:
    """Options of a cluster member.

    Attributes:
        scheduler: `host:port` of the scheduler's frames.
        member_id: a name under which this member gets the same rank back after a restart; None: a random one.
        host: IP address on which to accept connections of other members.
        port: 0 takes any free one.
        heartbeat_s: seconds between two heartbeats.
        scheduler_timeout_s: the member gives up after the scheduler was unreachable for this long.
        call_timeout_s: default time limit for a response.
        frame_bytes_max: largest frame accepted.
        on_event: called with each `MemberEvent`.
        on_message: called with each number that a member publishes.
        on_data: called with the user command, the sender's role and rank, and the bytes; returns the response.
        before_scale: called with SCALE_OUT or SCALE_IN; stops work that must not run during a scaling. The round waits
            for its return.
        after_scale: called with the same phase once ranks and members are the new ones; the round ends after it.
        token: the cluster's; None for a scheduler that allows anonymous members: every process that reaches this
            member's port can then send it requests.
    """

    scheduler: str
    member_id: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    heartbeat_s: float = 3.0
    scheduler_timeout_s: float = 30.0
    call_timeout_s: float = 30.0
    frame_bytes_max: int = FRAME_BYTES_MAX
    on_event: Callable[[MemberEvent], None] | None = None
    on_message: Callable[[int], None] | None = None
    on_data: Callable[[int, Role, int, bytes], bytes] | None = None
    before_scale: Callable[[Phase], None] | None = None
    after_scale: Callable[[Phase], None] | None = None
    token: str | None = field(default=None, repr=False)
