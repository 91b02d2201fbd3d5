"""The members of the cluster: the state of each, its error, and the time of its last heartbeat.

A member is DISCONNECTED before it registers and after it leaves, CONNECTED between, ERROR from its first failure
until it is reset. `MEMBER` lists the moves.

Source: `CoordinationService::TaskState` in XLA.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fastrt.coordination.events import MemberView, Persist
from fastrt.coordination.keyvalues import Emit
from fastrt.coordination.status import Failure, Member, dump_failure, load_failure, to_json
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.transitions import Transitions


class State(enum.IntEnum):
    """A member's state, with the numbers of the wire."""

    DISCONNECTED = 2
    CONNECTED = 3
    ERROR = 4


MEMBER = Transitions(
    "member",
    {
        State.DISCONNECTED: {"connect": State.CONNECTED, "fail": State.ERROR},
        State.CONNECTED: {"connect": State.CONNECTED, "fail": State.ERROR, "disconnect": State.DISCONNECTED},
        # Only a recoverable member connects without a reset.
        State.ERROR: {"connect": State.CONNECTED, "disconnect": State.DISCONNECTED},
    },
)


@dataclass
class Record:
    """The record of one member. `last_heard` and `grace_until` are times of the events' clock."""

    state: State = State.DISCONNECTED
    moves: int = 0
    incarnation: int = 0
    error: Failure | None = None
    recoverable: bool = False
    last_heard: float | None = None
    grace_until: float = 0.0


class Members:
    """All members, in order of role and rank. Changes are kept by `Persist("member", ...)`.

    Args:
        roles: how many members each role has.
        recoverable: the default for members that do not say it when they register.
        emit: takes the effects.
    """

    def __init__(self, roles: Mapping[str, int], recoverable: bool, emit: Emit) -> None:
        self._records = {Member(role, rank): Record() for role, count in roles.items() for rank in range(count)}
        self._emit = emit
        self._recoverable = recoverable
        self._connected: dict[Member, None] = {}
        self._erroneous: dict[Member, None] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, member: object) -> bool:
        return member in self._records

    def __getitem__(self, member: Member) -> Record:
        return self._records[member]

    def ids(self) -> Collection[Member]:
        """All members, in order."""
        return self._records.keys()

    def connected(self) -> Collection[Member]:
        """The connected members."""
        return self._connected.keys()

    def erroneous(self) -> Collection[Member]:
        """The members in error."""
        return self._erroneous.keys()

    def is_recoverable(self, member: Member) -> bool:
        """Whether a member may die and come back without the others failing."""
        record = self._records.get(member)
        return self._recoverable or (record is not None and record.recoverable)

    def first_error(self, named: frozenset[Member] | None) -> tuple[Member, Failure] | None:
        """A member in error that cannot be recovered, among those named (None: all)."""
        for member in self._erroneous:
            if (named is None or member in named) and not self.is_recoverable(member):
                error = self._records[member].error
                assert error is not None
                return member, error
        return None

    def set_recoverable(self, member: Member, recoverable: bool) -> None:
        """Note whether a member called itself recoverable when it registered."""
        self._records[member].recoverable = recoverable

    def set_incarnation(self, member: Member, incarnation: int) -> None:
        """Note the incarnation of a member that is about to connect."""
        self._records[member].incarnation = incarnation
        self._keep(member)

    def connect(self, member: Member, now: float) -> None:
        """Connect a member, as the incarnation set before."""
        self._move(member, "connect", None, now)

    def fail(self, member: Member, error: Failure) -> bool:
        """Set a member to error; False when it was already."""
        if self._records[member].state is State.ERROR:
            return False
        self._move(member, "fail", error, None)
        return True

    def disconnect(self, member: Member, grace_until: float) -> None:
        """Disconnect a member that left. Its calls that are under way are accepted until `grace_until`."""
        self._records[member].grace_until = grace_until
        self._move(member, "disconnect", None, None)

    def is_gone(self, member: Member, now: float) -> bool:
        """Whether a member is disconnected and its grace period for calls under way is over."""
        record = self._records[member]
        return record.state is State.DISCONNECTED and now > record.grace_until

    def heard(self, member: Member, now: float) -> None:
        """Note a heartbeat."""
        self._records[member].last_heard = now

    def stale(self, now: float, timeout_s: float) -> list[Member]:
        """Connected members whose last heartbeat is older than the timeout."""
        limit = now - timeout_s
        return [member for member in self._connected if (self._records[member].last_heard or 0.0) <= limit]

    def oldest(self) -> float | None:
        """The oldest last heartbeat of all connected members; None when none is connected."""
        return min((self._records[member].last_heard or 0.0 for member in self._connected), default=None)

    def views(self, named: Iterable[Member]) -> list[MemberView]:
        """The views of members that callers get."""
        views = []
        for member in named:
            record = self._records[member]
            views.append(MemberView(member, int(record.state), record.incarnation, record.error))
        return views

    def restore(self, key: str, data: bytes, now: float) -> None:
        """Restore a member from the durable store; a connected one counts as heard of now."""
        role, _, rank = key.rpartition("/")
        member = Member(role, int(rank))
        if member not in self._records:
            return
        saved = read_object(data, "the record of a member", own=True, bytes_max=STATE_BYTES_MAX)
        record = self._records[member]
        record.state = State(saved["state"])
        record.incarnation = saved["incarnation"]
        record.error = load_failure(saved["error"])
        record.recoverable = saved["recoverable"]
        record.last_heard = now if record.state is State.CONNECTED else None
        self._index(member, record.state)

    def check_invariants(self) -> None:
        """Raise AssertionError when the indexes and the records disagree."""
        for member, record in self._records.items():
            assert (member in self._connected) == (record.state is State.CONNECTED), f"{member}: connected index"
            assert (member in self._erroneous) == (record.state is State.ERROR), f"{member}: error index"
            assert (record.error is not None) == (record.state is State.ERROR), f"{member}: error and state disagree"

    def _move(self, member: Member, event: str, error: Failure | None, now: float | None) -> None:
        record = self._records[member]
        MEMBER.move(record, event, member)
        record.error = error
        if now is not None:
            record.last_heard = now
        self._index(member, record.state)
        self._keep(member)

    def _index(self, member: Member, state: State) -> None:
        self._connected.pop(member, None)
        self._erroneous.pop(member, None)
        if state is State.CONNECTED:
            self._connected[member] = None
        elif state is State.ERROR:
            self._erroneous[member] = None

    def _keep(self, member: Member) -> None:
        record = self._records[member]
        saved = {
            "state": int(record.state),
            "incarnation": record.incarnation,
            "error": dump_failure(record.error),
            "recoverable": record.recoverable,
        }
        self._emit(Persist("member", f"{member.role}/{member.rank}", to_json(saved)))
