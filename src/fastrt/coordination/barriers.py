"""Barriers: the members that have arrived, those that are missing, and the result of each barrier's last round.

A barrier is one id with rounds counted from 0. The first call of the first round fixes its members; the first call of
each round fixes that round's deadline. The result of the last round is kept, success or failure, so that a late call
of the same round gets the same answer. `BARRIER` lists the moves.

Barriers of the whole cluster share one member set and one index of open barriers: ten thousand of them must not cost
ten thousand copies of two thousand members.

Invariants (`check_invariants`): arrived and waiting callers are members; an open round is in exactly the indexes that
the errors of its members look it up in; a round that ended has no waiting caller.

Source: `CoordinationService::BarrierAsync` and the functions it calls, in XLA; results and texts are those of jaxlib
0.10.2.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from fastrt.coordination.events import Answer, EnterBarrier, Persist
from fastrt.coordination.keyvalues import Emit
from fastrt.coordination.members import Members
from fastrt.coordination.status import Code, Failure, Member, Part, dump_failure, failure, load_failure, to_json
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.transitions import Transitions

# How many missing members a failure names: long lists would overflow the header that carries the message.
_MISSING_NAMED_MAX = 2

REGISTER_ID = "[Init]Wait_for_all_tasks_to_register"


@dataclass
class Waiter:
    """A caller blocked at a barrier.

    Attributes:
        call: the call that gets the answer.
        purpose: "barrier", "register", "shutdown" or "devices": decides the form of the answer.
        incarnation: of the member, for "register".
    """

    call: int
    purpose: str = "barrier"
    incarnation: int = 0


class BarrierState(enum.Enum):
    """The state of a barrier's current round: not begun, open to callers, or ended with a result."""

    NEW = "new"
    OPEN = "open"
    ENDED = "ended"


BARRIER = Transitions(
    "barrier",
    {
        # A round can end before it opens: a member is in error already, or a caller cancelled it in advance.
        BarrierState.NEW: {"open": BarrierState.OPEN, "end": BarrierState.ENDED},
        BarrierState.OPEN: {"end": BarrierState.ENDED},
        # A late caller that disagrees about the round or its members replaces the result.
        BarrierState.ENDED: {"end": BarrierState.ENDED, "next_round": BarrierState.NEW},
    },
)


@dataclass
class Barrier:
    """One barrier id and its current round. `members` is None for the whole cluster."""

    barrier_id: str
    counter: int = 0
    members: frozenset[Member] | None = None
    first: Member | None = None
    deadline: float = 0.0
    state: BarrierState = BarrierState.NEW
    moves: int = 0
    result: Failure | None = None
    arrived: set[Member] = field(default_factory=set)
    waiters: dict[Member, Waiter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Id and round, as messages write them."""
        return f"{self.barrier_id}::{self.counter}"

    @property
    def open(self) -> bool:
        """Whether the round waits for callers."""
        return self.state is BarrierState.OPEN

    @property
    def ended(self) -> bool:
        """Whether the round has a result."""
        return self.state is BarrierState.ENDED


Finish = Callable[[Barrier, Member, Waiter], None]


class Barriers:
    """The barrier part of the coordination state machine.

    Args:
        members: the cluster.
        emit: takes the effects.
        finish: answers one waiting caller of a barrier that ended, by `barrier.result`.
        ended: called after all callers of a round have been answered.
    """

    def __init__(self, members: Members, emit: Emit, finish: Finish, ended: Callable[[Barrier], None]) -> None:
        self._members = members
        self._emit = emit
        self._finish = finish
        self._ended = ended
        self._barriers: dict[str, Barrier] = {}
        self._open_for_all: dict[str, None] = {}
        self._open_of_member: dict[Member, dict[str, None]] = {}
        self._deadlines: list[tuple[float, str, int]] = []
        self._barrier_of_call: dict[int, tuple[str, Member]] = {}
        self.once_only: set[str] = {REGISTER_ID}

    def __len__(self) -> int:
        return len(self._barriers)

    def restore(self, barrier_id: str, data: bytes) -> None:
        """Restore the result of a past round from the durable store."""
        record = read_object(data, "the record of a barrier", own=True, bytes_max=STATE_BYTES_MAX)
        listed = record["members"]
        self._barriers[barrier_id] = Barrier(
            barrier_id,
            record["counter"],
            None if listed is None else frozenset(Member(*item) for item in listed),
            state=BarrierState.ENDED,
            result=load_failure(record["result"]),
        )

    def find(self, barrier_id: str) -> Barrier | None:
        """A barrier by its id, None when no caller has named it yet."""
        return self._barriers.get(barrier_id)

    def views(self) -> list[Barrier]:
        """All barriers, in the order of their first call."""
        return list(self._barriers.values())

    def size(self, barrier: Barrier) -> int:
        """How many members a barrier has."""
        return len(self._members) if barrier.members is None else len(barrier.members)

    def missing(self, barrier: Barrier) -> list[Member]:
        """Members that have not arrived, in order of rank."""
        if barrier.members is None:
            return [member for member in self._members.ids() if member not in barrier.arrived]
        return sorted(barrier.members - barrier.arrived)

    def next_deadline(self) -> float | None:
        """When the next open round times out."""
        heap = self._deadlines
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def enter(self, event: EnterBarrier, waiter: Waiter, now: float) -> None:
        """Enter a member: its call waits, or is answered at once."""
        barrier = self._barriers.get(event.barrier_id)
        known = barrier is not None
        if barrier is None:
            barrier = Barrier(event.barrier_id)
        member, counter = event.member, event.counter
        if member not in self._members:
            # Upstream lets an unknown task fail a barrier, or even count as arrived. Here only its own call fails.
            words = ("A non-participating task (", member, f") called the barrier: {event.barrier_id}::{counter}")
            problem = failure(Code.INVALID_ARGUMENT, *words, barrier=(event.barrier_id, counter))
            self._finish_one(barrier, member, waiter, problem)
            return
        restarted = (
            barrier.ended
            and counter == 0
            and barrier.barrier_id not in self.once_only
            and self._members.is_recoverable(member)
        )
        if restarted:
            counter = barrier.counter + 1
        if (not known and counter == 0) or (barrier.ended and counter == barrier.counter + 1):
            if not known:
                self._barriers[event.barrier_id] = barrier
            at_once = self._begin(barrier, counter, event, now)
            if at_once is not None:
                self._finish_one(barrier, member, waiter, at_once)
                return
        elif not known:
            self._finish_one(barrier, member, waiter, _other_round(barrier, counter))
            return
        self._wait(barrier, member, waiter)
        rejoins = counter == 0 and self._members.is_recoverable(member)
        if counter != barrier.counter and not rejoins:
            self.end(barrier, _other_round(barrier, counter))
            return
        disagreement = self._disagreement(barrier, member, event.members)
        if disagreement is not None:
            self.end(barrier, disagreement)
        elif barrier.ended:
            self._repeat(barrier, member)
        else:
            self._arrive(barrier, member)

    def cancel(self, call: int, barrier_id: str, counter: int, member: Member) -> None:
        """Fail a round for all waiting callers, and keep that result for later callers."""
        barrier = self._barriers.get(barrier_id)
        if barrier is None:
            # No caller has arrived yet: callers that arrive later in this round get the cancellation.
            barrier = self._barriers[barrier_id] = Barrier(barrier_id, counter)
        asked = f"{barrier_id}::{counter}"
        if barrier.counter != counter:
            words = (
                f"Barrier ({asked}) is cancelled by task, but the service thinks it is the {barrier.counter}-th "
                "instance. This is likely due to a restart in the task or service."
            )
            problem = failure(Code.FAILED_PRECONDITION, words, barrier=(barrier_id, barrier.counter))
            self._emit(Answer(call, problem))
        elif barrier.ended:
            code = 0 if barrier.result is None else int(barrier.result.code)
            words = f"Barrier ({asked}) has already been passed with status code: {code}"
            self._emit(Answer(call, failure(Code.FAILED_PRECONDITION, words, barrier=(barrier_id, counter))))
        else:
            self.end(barrier, failure(Code.CANCELLED, f"Barrier ({asked}) is cancelled by task: ", member))
            self._emit(Answer(call, None))

    def leave(self, member: Member, reason: tuple[Part, ...]) -> None:
        """Note that a member failed or left: open rounds that need it fail, or wait for a recoverable one to return."""
        opened = [*self._open_of_member.get(member, ()), *self._open_for_all]
        recoverable = self._members.is_recoverable(member)
        for barrier_id in opened:
            barrier = self._barriers[barrier_id]
            if not barrier.open:
                continue
            if recoverable:
                barrier.arrived.discard(member)
                self._cancel_waiter(
                    barrier,
                    member,
                    "Stale barrier invocation is cancelled because:  ",
                    *reason,
                    f". Barrier: {barrier.name} Task ",
                    member,
                )
            else:
                words = ("Barrier failed because: ", *reason, f". Barrier Id: {barrier.name}, Task: ", member)
                self.end(barrier, failure(Code.INTERNAL, *words))

    def expire(self, now: float) -> None:
        """Fail the rounds whose deadline has passed."""
        while True:
            deadline = self.next_deadline()
            if deadline is None or deadline > now:
                return
            barrier = self._barriers[heapq.heappop(self._deadlines)[1]]
            self.end(barrier, self._timeout(barrier))

    def end(self, barrier: Barrier, result: Failure | None) -> None:
        """End a round: keep its result, and answer all waiting callers."""
        if result is not None and result.barrier is None:
            result = result.of_barrier(barrier.barrier_id, barrier.counter)
        self._close(barrier)
        BARRIER.move(barrier, "end", barrier.name)
        barrier.result = result
        self._emit(Persist("barrier", barrier.barrier_id, _record(barrier)))
        waiters, barrier.waiters = barrier.waiters, {}
        for member, waiter in waiters.items():
            self._barrier_of_call.pop(waiter.call, None)
            self._finish(barrier, member, waiter)
        self._ended(barrier)

    def forget(self, call: int) -> bool:
        """Drop a waiting caller that disconnected. Its member still counts as arrived."""
        place = self._barrier_of_call.pop(call, None)
        if place is None:
            return False
        self._barriers[place[0]].waiters.pop(place[1], None)
        return True

    def waiting_count(self) -> int:
        """How many callers wait."""
        return len(self._barrier_of_call)

    def stop(self) -> None:
        """Fail all open rounds, because the service shuts down."""
        for barrier in list(self._barriers.values()):
            if barrier.open:
                words = f"Barrier failed because service is shutting down. Barrier_id: {barrier.name}"
                self.end(barrier, failure(Code.ABORTED, words))

    def clear(self) -> None:
        """Forget all barriers, for a new run; rounds that are open fail."""
        for barrier in list(self._barriers.values()):
            if barrier.open:
                words = f"Barrier failed because a new run begins. Barrier_id: {barrier.name}"
                self.end(barrier, failure(Code.ABORTED, words))
        for barrier_id in self._barriers:
            self._emit(Persist("barrier", barrier_id, None))
        self._barriers.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError when a barrier and the indexes disagree."""
        for barrier in self._barriers.values():
            expected = barrier.members if barrier.members is not None else set(self._members.ids())
            assert barrier.arrived <= expected, f"{barrier.name}: unknown members have arrived"
            assert barrier.open or barrier.ended, f"{barrier.name}: neither open nor ended"
            assert not (barrier.ended and barrier.waiters), f"{barrier.name}: ended, but callers wait"
            assert (barrier.barrier_id in self._open_for_all) == (barrier.open and barrier.members is None)
            for member in barrier.members or ():
                listed = barrier.barrier_id in self._open_of_member.get(member, ())
                assert listed == barrier.open, f"{barrier.name}: index of {member} is wrong"
            for member, waiter in barrier.waiters.items():
                assert self._barrier_of_call.get(waiter.call) == (barrier.barrier_id, member)

    def _begin(self, barrier: Barrier, counter: int, event: EnterBarrier, now: float) -> Failure | None:
        """Start a round; returns the failure if it ended at once."""
        first_round = not barrier.ended
        if not first_round:
            BARRIER.move(barrier, "next_round", barrier.name)
        barrier.counter, barrier.first, barrier.result = counter, event.member, None
        barrier.arrived = set()
        stranger = next((member for member in event.members if member not in self._members), None)
        if first_round and stranger is not None:
            words = ("Unexpected task (", stranger, ") that is not in the cluster called the barrier. Barrier Id: ")
            self.end(barrier, failure(Code.INVALID_ARGUMENT, *words, barrier.name))
            return barrier.result
        if first_round and event.members:
            barrier.members = frozenset(event.members)
            if len(barrier.members) == len(self._members):
                barrier.members = None
        erroneous = self._members.first_error(barrier.members)
        if erroneous is not None:
            member, error = erroneous
            before = f") is already in error before the barrier was called. Barrier Id: {barrier.name} Task error: "
            self.end(barrier, failure(Code.INTERNAL, "Task (", member, before, error))
            return barrier.result
        barrier.deadline = now + event.timeout_s
        self._open(barrier)
        return None

    def _disagreement(self, barrier: Barrier, member: Member, named: tuple[Member, ...]) -> Failure | None:
        """The failure if a caller names other members than the barrier has."""
        count = self.size(barrier)
        if not named:
            if count == len(self._members):
                return None
            return failure(
                Code.INVALID_ARGUMENT,
                f"{barrier.name}: No tasks were specified by the client, which implies that the entire cluster is "
                "participating in the barrier. However, the service disagrees. Check that the callers are invoking "
                "the barrier with the same arguments.",
            )
        if len(named) != count or any(not self._belongs(barrier, other) for other in named):
            return failure(
                Code.INVALID_ARGUMENT,
                f"Conflicting tasks specified by different processes for the same barrier: {barrier.name}. Check that "
                "the callers are invoking the barrier with the same arguments.",
            )
        if not self._belongs(barrier, member):
            words = ("A non-participating task (", member, f") called the barrier: {barrier.name}")
            return failure(Code.INVALID_ARGUMENT, *words)
        return None

    def _belongs(self, barrier: Barrier, member: Member) -> bool:
        return member in (self._members if barrier.members is None else barrier.members)

    def _arrive(self, barrier: Barrier, member: Member) -> None:
        barrier.arrived.add(member)
        if len(barrier.arrived) == self.size(barrier):
            self.end(barrier, None)

    def _wait(self, barrier: Barrier, member: Member, waiter: Waiter) -> None:
        words = f"Cancelled because there's a more recent barrier call for {barrier.name} from the same task."
        self._cancel_waiter(barrier, member, words, marked=False)
        barrier.waiters[member] = waiter
        self._barrier_of_call[waiter.call] = (barrier.barrier_id, member)

    def _cancel_waiter(self, barrier: Barrier, member: Member, *words: Part, marked: bool = True) -> None:
        old = barrier.waiters.pop(member, None)
        if old is not None:
            self._barrier_of_call.pop(old.call, None)
            place = (barrier.barrier_id, barrier.counter) if marked else None
            self._finish_one(barrier, member, old, failure(Code.CANCELLED, *words, marked=marked, barrier=place))

    def _repeat(self, barrier: Barrier, member: Member) -> None:
        waiter = barrier.waiters.pop(member)
        self._barrier_of_call.pop(waiter.call, None)
        if waiter.purpose == "shutdown":
            waiter.purpose = "shutdown-late"
        self._finish(barrier, member, waiter)

    def _finish_one(self, barrier: Barrier, member: Member, waiter: Waiter, result: Failure) -> None:
        """Answer one caller with a result of its own, while the barrier has another one or none."""
        self._finish(Barrier(barrier.barrier_id, barrier.counter, result=result), member, waiter)

    def _timeout(self, barrier: Barrier) -> Failure:
        missing = self.missing(barrier)
        count = self.size(barrier)
        named: list[Part] = []
        for member in missing[:_MISSING_NAMED_MAX]:
            named += [member, "\n"]
        return failure(
            Code.DEADLINE_EXCEEDED,
            f"Barrier timed out. Id: {barrier.name}. This usually happens because a task triggered the barrier too "
            "early or too slowly. Please look at the task logs (both timed out and first task) to debug further.\n"
            f"# of tasks that reached the barrier: {count - len(missing)}/{count}.\nThe first task at the barrier: ",
            barrier.first or "",
            ". Some timed out task names:\n",
            *named,
        )

    def _open(self, barrier: Barrier) -> None:
        BARRIER.move(barrier, "open", barrier.name)
        if barrier.members is None:
            self._open_for_all[barrier.barrier_id] = None
        for member in barrier.members or ():
            self._open_of_member.setdefault(member, {})[barrier.barrier_id] = None
        heapq.heappush(self._deadlines, (barrier.deadline, barrier.barrier_id, barrier.counter))

    def _close(self, barrier: Barrier) -> None:
        self._open_for_all.pop(barrier.barrier_id, None)
        for member in barrier.members or ():
            opened = self._open_of_member.get(member)
            if opened is not None:
                opened.pop(barrier.barrier_id, None)
                if not opened:
                    del self._open_of_member[member]

    def _is_current(self, entry: tuple[float, str, int]) -> bool:
        barrier = self._barriers.get(entry[1])
        return barrier is not None and barrier.open and barrier.counter == entry[2] and barrier.deadline == entry[0]


def _other_round(barrier: Barrier, counter: int) -> Failure:
    """The failure for a caller that is in another round than the service: one restarted, or is far ahead."""
    if counter == 0 or barrier.counter == 0:
        reason = (
            "The service or task probably restarted, check the earlier logs to debug further. Usually, a restart on "
            "the stale tasks will resolve the issue."
        )
    else:
        reason = (
            "One task is probably way too quick / slow in its execution. For example, one task started a barrier "
            "early, which timed out, and started a second barrier before the late task even joined once."
        )
    words = (
        f"Barrier ({barrier.barrier_id}::{counter}) is invoked by the task, but the service thinks it is the "
        f"{barrier.counter}-th instance. {reason}"
    )
    return failure(Code.INTERNAL, words, barrier=(barrier.barrier_id, barrier.counter))


def _record(barrier: Barrier) -> bytes:
    members = None if barrier.members is None else sorted(barrier.members)
    return to_json({"counter": barrier.counter, "members": members, "result": dump_failure(barrier.result)})
