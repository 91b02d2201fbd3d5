"""The members of the cluster: who is expected, who is connected, who failed, and when each was last heard of.

A member is DISCONNECTED before it registers and after it leaves, CONNECTED between, ERROR from its first failure
until it is reset. These are the only moves:

    DISCONNECTED -> CONNECTED (connect)    CONNECTED -> CONNECTED (connect again)
    CONNECTED or DISCONNECTED -> ERROR (fail)    CONNECTED or ERROR -> DISCONNECTED (disconnect)
    ERROR -> CONNECTED (a recoverable member that comes back)

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


class State(enum.IntEnum):
    """A member's state, with the numbers of the wire."""

    DISCONNECTED = 2
    CONNECTED = 3
    ERROR = 4


@dataclass
class Record:
    """What is known of one member. `last_heard` and `grace_until` are times of the events' clock."""

    state: State = State.DISCONNECTED
    incarnation: int = 0
    error: Failure | None = None
    recoverable: bool = False
    last_heard: float | None = None
    grace_until: float = 0.0


class Members:
    """All members, in order of role and rank. Changes are kept by `Persist("member", ...)`.

    Args:
        roles: how many members each role has.
        recoverable: what a member is that does not say it of itself.
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
        """Note what a member said of itself when it registered."""
        self._records[member].recoverable = recoverable

    def set_incarnation(self, member: Member, incarnation: int) -> None:
        """Note the incarnation of a member that is about to connect."""
        self._records[member].incarnation = incarnation
        self._keep(member)

    def connect(self, member: Member, now: float) -> None:
        """The member takes part, as the incarnation set before."""
        self._move(member, State.CONNECTED, None, now)

    def fail(self, member: Member, error: Failure) -> bool:
        """The member is in error; False when it was already."""
        if self._records[member].state is State.ERROR:
            return False
        self._move(member, State.ERROR, error, None)
        return True

    def disconnect(self, member: Member, grace_until: float) -> None:
        """The member left. Until `grace_until`, calls it had under way are still taken."""
        self._records[member].grace_until = grace_until
        self._move(member, State.DISCONNECTED, None, None)

    def is_gone(self, member: Member, now: float) -> bool:
        """Whether a member is disconnected, and its last calls can no longer be under way."""
        record = self._records[member]
        return record.state is State.DISCONNECTED and now > record.grace_until

    def heard(self, member: Member, now: float) -> None:
        """A sign of life."""
        self._records[member].last_heard = now

    def stale(self, now: float, timeout_s: float) -> list[Member]:
        """Connected members not heard of for longer than the timeout."""
        limit = now - timeout_s
        return [member for member in self._connected if (self._records[member].last_heard or 0.0) <= limit]

    def oldest(self) -> float | None:
        """When the connected member was heard of that has been silent longest."""
        return min((self._records[member].last_heard or 0.0 for member in self._connected), default=None)

    def views(self, named: Iterable[Member]) -> list[MemberView]:
        """How members look from outside."""
        views = []
        for member in named:
            record = self._records[member]
            views.append(MemberView(member, int(record.state), record.incarnation, record.error))
        return views

    def restore(self, key: str, data: bytes, now: float) -> None:
        """Take a member from the durable store; a connected one counts as heard of just now."""
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

    def _move(self, member: Member, state: State, error: Failure | None, now: float | None) -> None:
        record = self._records[member]
        record.state, record.error = state, error
        if now is not None:
            record.last_heard = now
        self._index(member, state)
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
