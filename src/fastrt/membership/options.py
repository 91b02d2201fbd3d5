"""What a member of a cluster is told at its start, what it tells its user, and what can go wrong for it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from fastrt.errors import FastrtError
from fastrt.membership.events import Phase, Role
from fastrt.membership.framing import FRAME_BYTES_MAX


class RegistrationRefusedError(FastrtError):
    """The scheduler does not take this member: the cluster is full, or has another member of this id."""


class ClusterTimeoutError(FastrtError, TimeoutError):
    """What was waited for in the cluster has not come in time. Wait again, or look at `fastrt ps status`."""


class MemberEvent(enum.IntEnum):
    """What a member is told has happened; up to 6 the numbers of upstream's ClusterEvent."""

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
    """How a member takes part.

    Attributes:
        scheduler: `host:port` of the scheduler's frames.
        member_id: a name that brings this member its rank back after a restart; None: a random one.
        host: IP address on which to take what others send.
        port: 0 takes any free one.
        heartbeat_s: between two heartbeats.
        scheduler_timeout_s: a scheduler away for longer is given up.
        call_timeout_s: for a response, unless a call says otherwise.
        frame_bytes_max: largest frame taken.
        on_event: told of `MemberEvent`s.
        on_message: told of the numbers that members publish.
        on_data: given user command, role and rank of the sender, and bytes; returns the bytes to answer.
        before_scale: given SCALE_OUT or SCALE_IN, ends what must not go on during a scaling; the round waits for it.
        after_scale: given the same when ranks and members are the new ones; the round ends after it.
        token: the cluster's; None for a scheduler that allows anonymous members: every process that reaches this
            member's port can then give it orders.
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
