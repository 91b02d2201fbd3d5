"""The coordination service's decisions: a pure state machine.

`handle(event, now)` takes one fact and returns the effects that follow from it. It has no socket, clock, thread or log,
so one test can play thousands of members in any order. Calls that cannot be answered yet wait here by their numbers: a
blocked caller costs one table entry.

Members, barriers and the older service's session move by the tables `MEMBER`, `BARRIER` and `SESSION`.

Invariants: those of the parts (members, key-values, barriers, nodes); each waiting call waits in one place; each call
is answered once.

Source: `CoordinationService` in XLA (seen in jaxlib 0.10.2) and, for the part `nodes`, the older
`DistributedRuntimeServiceImpl`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.barriers import REGISTER_ID, Barrier, Barriers, Waiter
from fastrt.coordination.events import Answer, Effect, Event, Persist
from fastrt.coordination.keyvalues import KeyValues, normalized
from fastrt.coordination.legacy_runtime import Nodes
from fastrt.coordination.members import Members, State
from fastrt.coordination.polls import Polls
from fastrt.coordination.status import Code, Failure, Member, Part, failure, to_json
from fastrt.foreign_text import STATE_BYTES_MAX, read_json

# How many silent members a failure names.
_STALE_NAMED_MAX = 3
_DEVICES_TIMEOUT_S = 3600.0
# A client's barrier timeout may be any 64-bit number; this bound is longer than any job and fits into a clock.
_TIMEOUT_S_MAX = 1e9


@dataclass
class Settings:
    """The settings of a state machine.

    Attributes:
        roles: the number of members of each role; dialects without roles use the first one.
        heartbeat_timeout_s: a member silent for longer is in error.
        register_timeout_s: how long the first member to register waits for the last.
        shutdown_timeout_s: how long the first member to shut down waits for the last; 0: no wait.
        recoverable: members may die and come back without the others failing.
        clear_after_shutdown: a run is over when all members had registered and none is connected any more; the next
            member to register then finds an empty service: no keys, no barriers, no errors.
        incarnation: this service's incarnation, random; kept over restarts.
        keys_bytes_max: the most bytes of all keys and values.
        keys_max: the most keys.
    """

    roles: Mapping[str, int]
    heartbeat_timeout_s: float = 100.0
    register_timeout_s: float = 3600.0
    shutdown_timeout_s: float = 300.0
    recoverable: bool = False
    clear_after_shutdown: bool = False
    incarnation: int = 1
    keys_bytes_max: int = 2 << 30
    keys_max: int = 10_000_000


@dataclass
class _AliveRound:
    """Callers that ask which members of one set are alive."""

    members: frozenset[Member]
    calls: dict[int, Member] = field(default_factory=dict)
    asked: set[Member] = field(default_factory=set)


class CoordinationState:
    """The state machine. Not thread-safe: one shell owns it.

    Args:
        settings: timeouts, roles and limits.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.first_role = next(iter(settings.roles))
        self.version = 0
        self.stopped = False
        self._effects: list[Effect] = []
        emit = self._emit
        self.members = Members(settings.roles, settings.recoverable, emit)
        self.keys = KeyValues(emit, settings.keys_bytes_max, settings.keys_max)
        self.barriers = Barriers(self.members, emit, self._finish_waiter, self._barrier_ended)
        self.polls = Polls(emit)
        self.nodes = Nodes(self.keys, settings, emit)
        self.keys.on_answered = self.nodes.key_arrived
        self.shutdown_id = f"Shutdown::{settings.incarnation}"
        self._devices_id = f"WaitForAllTasks::{settings.incarnation}"
        self.barriers.once_only |= {self.shutdown_id, self._devices_id}
        self._devices: dict[Member, bytes] = {}
        self._watchers: dict[int, str | None] = {}
        self._alive: list[_AliveRound] = []
        self._steady: tuple[Member, ...] | None = None
        self._leaving: set[Member] = set()  # members at the shutdown barrier that disconnect even when it times out
        self._now = 0.0
        self._check_at: float | None = None
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.Register: self._on_register,
            ev.Heartbeat: self._on_heartbeat,
            ev.Shutdown: self._on_shutdown,
            ev.Reset: self._on_reset,
            ev.ReportError: self._on_report_error,
            ev.ExchangeDevices: self._on_exchange_devices,
            ev.QueryMembers: self._on_query_members,
            ev.WatchMembers: self._on_watch_members,
            ev.PollError: self._on_poll_error,
            ev.InsertKey: lambda e, now: self.keys.insert(e.call, e.key, e.value, e.overwrite),
            ev.GetKey: self._on_get_key,
            ev.TryGetKey: lambda e, now: self.keys.try_get(e.call, e.key),
            ev.IncrementKey: lambda e, now: self.keys.increment(e.call, e.key, e.amount),
            ev.ListKeys: lambda e, now: self.keys.list_below(e.call, e.directory),
            ev.DeleteKey: lambda e, now: self.keys.delete(e.call, e.key),
            ev.EnterBarrier: self._on_enter_barrier,
            ev.CancelBarrier: lambda e, now: self.barriers.cancel(e.call, e.barrier_id, e.counter, e.member),
            ev.AliveMembers: self._on_alive_members,
            ev.Forget: self._on_forget,
            ev.Tick: self._on_tick,
            ev.Stop: self._on_stop,
            **self.nodes.handlers(),
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event and return its effects, in order.

        Args:
            event: one of `fastrt.coordination.events`.
            now: seconds of any clock that never goes back.
        """
        if self.stopped and not isinstance(event, (ev.Forget, ev.Tick, ev.Stop)):
            self._emit(Answer(event.call, failure(Code.INTERNAL, "Coordination service has stopped.")))
        else:
            self._now = now
            self._handlers[type(event)](event, now)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """The latest time for the next `Tick`; None when nothing can time out."""
        soonest = self._check_at
        for other in (self.barriers.next_deadline(), self.nodes.next_deadline()):
            if other is not None and (soonest is None or other < soonest):
                soonest = other
        return soonest

    def restore(self, records: Iterable[tuple[str, str, bytes]], now: float) -> None:
        """Restore the records of an earlier process, before the first event."""
        for kind, key, value in records:
            if kind == "key":
                self.keys.restore(key, value)
            elif kind == "barrier":
                self.barriers.restore(key, value)
            elif kind == "member":
                self.members.restore(key, value, now)
            elif kind == "devices":
                role, _, rank = key.rpartition("/")
                self._devices[Member(role, int(rank))] = value
            elif kind == "node":
                self.nodes.restore(key, value, now)
            elif kind == "state":
                self._restore_state(key, value)
        if self.members.connected():
            self._check_at = now + self.settings.heartbeat_timeout_s

    def waiting_count(self) -> int:
        """How many calls wait for an answer."""
        waiting = len(self.keys.waiting_calls()) + self.barriers.waiting_count() + len(self.polls)
        return waiting + len(self._watchers) + sum(len(r.calls) for r in self._alive) + self.nodes.waiting_count()

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        self.members.check_invariants()
        self.keys.check_invariants()
        self.barriers.check_invariants()
        self.polls.check_invariants()
        for alive in self._alive:
            assert alive.asked <= alive.members, "a member outside of the set asks which are alive"

    # Members

    def _on_register(self, event: ev.Register, now: float) -> None:
        member = event.member
        if member not in self.members:
            problem = failure(Code.INVALID_ARGUMENT, "Unexpected task registered with task=", member)
            self._emit(Answer(event.call, problem))
            return
        self._maybe_reset()
        record = self.members[member]
        if event.recoverable is not None:
            self.members.set_recoverable(member, event.recoverable)
        recoverable = self.members.is_recoverable(member)
        lost = record.error is not None and record.error.code is Code.UNAVAILABLE
        if record.state is State.DISCONNECTED or (recoverable and lost):
            self.members.set_incarnation(member, event.incarnation)
            left_s = self.settings.register_timeout_s - event.waited_s
            entry = ev.EnterBarrier(event.call, REGISTER_ID, 0, left_s, member)
            self.barriers.enter(entry, Waiter(event.call, "register", event.incarnation), now)
            self._changed()
            return
        if record.state is State.CONNECTED and (record.incarnation == event.incarnation or recoverable):
            # The answer to the first call was lost, or a recoverable member came back before its heartbeat timeout.
            if record.incarnation != event.incarnation:
                self.members.set_incarnation(member, event.incarnation)
            self._connect(member)
            if recoverable:
                self.barriers.leave(member, ("recoverable task silently connected again",))
            self._emit(Answer(event.call, None))
            self._changed()
            return
        words: tuple[Part, ...]
        if record.error is None:
            words = (
                member,
                " unexpectedly tried to connect with a different incarnation. It has likely restarted.",
            )
        else:
            words = (
                member,
                " unexpectedly tried to connect while it is already in error. ResetTask() should be called before a "
                "subsequent connect attempt. Existing error: ",
                record.error,
            )
        error = failure(Code.ABORTED, *words, source=member)
        self._fail_member(member, error)
        self._propagate(error, [member])
        self._emit(Answer(event.call, error))

    def _on_heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        member = event.member
        if member not in self.members:
            words: tuple[Part, ...] = (
                "Unexpected heartbeat request from task: ",
                member,
                ". This usually implies a configuration error.",
            )
            self._emit(Answer(event.call, failure(Code.INVALID_ARGUMENT, *words)))
            return
        record = self.members[member]
        if record.error is not None:
            words = ("Unexpected heartbeat request from an already-in-error task: ", member)
            problem = failure(Code.ABORTED, *words, " with existing error: ", record.error)
        elif self.members.is_gone(member, now):
            words = (
                "Task with task=",
                member,
                " must be registered before sending heartbeat messages. The service might have restarted, please "
                "restart / reset and register again.",
            )
            problem = failure(Code.INVALID_ARGUMENT, *words)
        elif record.incarnation == event.incarnation:
            self.members.heard(member, now)
            self._emit(Answer(event.call, None))
            return
        elif self.members.is_recoverable(member):
            self._emit(
                Answer(event.call, None)
            )  # an earlier incarnation: harmless, but it does not count as a heartbeat
            return
        else:
            words = (
                member,
                f" Heartbeat: Incarnation ID mismatch: expecting {record.incarnation} but got {event.incarnation}. The "
                "task has restarted and likely crashed earlier - check for any earlier errors or any scheduler "
                "events (e.g. preemption, eviction) to debug further.",
            )
            problem = failure(Code.ABORTED, *words)
            self._fail_member(member, problem)
            self._propagate(problem, [member])
        self._emit(Answer(event.call, problem))

    def _on_shutdown(self, event: ev.Shutdown, now: float) -> None:
        member = event.member
        if self.settings.shutdown_timeout_s > 0 and not self.members.is_recoverable(member):
            left_s = self.settings.shutdown_timeout_s - event.waited_s
            entry = ev.EnterBarrier(event.call, self.shutdown_id, 0, left_s, member, self._steady_members())
            if event.leaves:
                self._leaving.add(member)
            self.barriers.enter(entry, Waiter(event.call, "shutdown"), now)
        else:
            self._emit(Answer(event.call, self._disconnect(member, now)))

    def _on_reset(self, event: ev.Reset, now: float) -> None:
        self._emit(Answer(event.call, self._disconnect(event.member, now)))

    def _on_report_error(self, event: ev.ReportError, now: float) -> None:
        member = event.member
        problem = None
        if member not in self.members:
            problem = failure(Code.INVALID_ARGUMENT, "Unexpected request from task ", member)
        elif self.members[member].state is not State.CONNECTED:
            problem = failure(Code.FAILED_PRECONDITION, "The task is not connected or already has an error.")
        elif event.code == 0:
            problem = failure(Code.INVALID_ARGUMENT, "An error was reported with status code 0, which means success.")
        else:
            code = Code(event.code) if event.code in Code.__members__.values() else Code.UNKNOWN
            error = failure(code, event.message, source=member, reported=True)
            self._fail_member(member, error)
            self._propagate(error, [member])
        self._emit(Answer(event.call, problem))

    def _on_query_members(self, event: ev.QueryMembers, now: float) -> None:
        if event.members is None:
            named = [m for m in self.members.ids() if event.role is None or m.role == event.role]
        else:
            named = event.members
        stranger = next((member for member in named if member not in self.members), None)
        if stranger is not None:
            problem = failure(Code.INVALID_ARGUMENT, "Unexpected task (", stranger, ") that is not in the cluster.")
            self._emit(Answer(event.call, problem))
        else:
            self._emit(Answer(event.call, self.members.views(named)))

    def _on_watch_members(self, event: ev.WatchMembers, now: float) -> None:
        if event.version is not None and event.version == self.version:
            self._watchers[event.call] = event.role
        else:
            self._emit(Answer(event.call, self._watched(event.role)))

    def _on_exchange_devices(self, event: ev.ExchangeDevices, now: float) -> None:
        member = event.member
        if member in self.members and member not in self._devices:
            self._devices[member] = event.devices
            self._emit(Persist("devices", f"{member.role}/{member.rank}", event.devices))
        entry = ev.EnterBarrier(event.call, self._devices_id, 0, _DEVICES_TIMEOUT_S, member)
        self.barriers.enter(entry, Waiter(event.call, "devices"), now)

    def _on_get_key(self, event: ev.GetKey, now: float) -> None:
        self.keys.get(event.call, normalized(event.key))

    def _on_alive_members(self, event: ev.AliveMembers, now: float) -> None:
        members = frozenset(event.members)
        if event.member not in members:
            words = ("Requesting task ", event.member, " is not one of the tasks specified in a GetAliveTasks request.")
            self._emit(Answer(event.call, failure(Code.INVALID_ARGUMENT, *words, marked=False)))
            return
        alive = next((pending for pending in self._alive if pending.members == members), None)
        if alive is None:
            alive = _AliveRound(members)
            self._alive.append(alive)
        alive.asked.add(event.member)
        alive.calls[event.call] = event.member
        self._refresh_alive()

    # Errors

    def _on_poll_error(self, event: ev.PollError, now: float) -> None:
        self.polls.begun = True
        member = event.member
        problem = None
        if member not in self.members:
            words: tuple[Part, ...] = ("Unexpected task (", member, ") that is not in the cluster polling for errors.")
            problem = failure(Code.INVALID_ARGUMENT, *words)
        elif self.members.is_gone(member, now):
            words = ("Task (", member, ") that has not been registered or has disconnected polling for errors.")
            problem = failure(Code.FAILED_PRECONDITION, *words)
        elif self.members[member].error is not None:
            error = self.members[member].error
            assert error is not None
            words = ("Task (", member, ") that is already in error state polling for errors. Current error: ", error)
            problem = failure(Code.FAILED_PRECONDITION, *words)
        elif self.polls.error is not None:
            problem = self.polls.error
        if problem is not None:
            self._emit(Answer(event.call, problem))
        else:
            self.polls.add(member, event.call)

    def _propagate(self, error: Failure, sources: Iterable[Member], spared: Collection[Member] = ()) -> None:
        """Report an error of `sources` to all members but the spared ones, unless the sources are recoverable."""
        if all(self.members.is_recoverable(member) for member in sources):
            return
        if self.polls.begun:
            self.polls.report(error)
            return
        # No member polls, so none can be notified: all are set to error, and see it at their next heartbeat.
        unheard = failure(
            Code.INTERNAL,
            "All tasks were set to error because coordination service encountered an error, but was unable to inform "
            "clients. Error: ",
            error,
        )
        self._fail_all(unheard, spared)

    def _fail_member(self, member: Member, error: Failure) -> None:
        if self.members.fail(member, error):
            self.barriers.leave(member, ("task is set to ERROR: ", error))
            self._refresh_alive()
            self._changed()

    def _fail_all(self, error: Failure, spared: Collection[Member] = ()) -> None:
        for member in list(self.members.ids()):
            if member not in spared:
                self._fail_member(member, error)

    def _disconnect(self, member: Member, now: float) -> Failure | None:
        """Disconnect a member at its own request; returns the failure if it cannot."""
        if member not in self.members:
            return failure(Code.INVALID_ARGUMENT, "Unexpected disconnect request with task=", member)
        if self.members[member].state is State.DISCONNECTED:
            return failure(Code.FAILED_PRECONDITION, "The task is already disconnected: ", member)
        self.members.disconnect(member, now + self.settings.heartbeat_timeout_s)
        self.barriers.leave(member, ("task disconnected",))
        self._refresh_alive()
        self.polls.drop(member, "task has disconnected.")
        self._changed()
        return None

    # Barriers

    def _on_enter_barrier(self, event: ev.EnterBarrier, now: float) -> None:
        event.timeout_s = min(event.timeout_s, _TIMEOUT_S_MAX)
        self.barriers.enter(event, Waiter(event.call), now)

    def _finish_waiter(self, barrier: Barrier, member: Member, waiter: Waiter) -> None:
        """Answer one caller of a barrier that ended, by its purpose."""
        result = barrier.result
        if waiter.purpose == "register":
            self._finish_register(result, member, waiter)
        elif waiter.purpose == "shutdown":
            self._emit(Answer(waiter.call, None if result is None else _shutdown_failure(result)))
        elif waiter.purpose == "shutdown-late":
            problem = self._disconnect(member, self._now)
            late = None if result is None else _shutdown_failure(result)
            self._emit(Answer(waiter.call, _shutdown_failure(problem) if problem is not None else late))
        elif waiter.purpose == "devices":
            devices = [self._devices.get(other, b"") for other in self.members.ids()]
            self._emit(Answer(waiter.call, devices if result is None else result))
        else:
            self._emit(Answer(waiter.call, barrier.counter if result is None else result))

    def _finish_register(self, result: Failure | None, member: Member, waiter: Waiter) -> None:
        current = member in self.members and self.members[member].incarnation == waiter.incarnation
        if result is None and current:
            self._connect(member)
            self._emit(Answer(waiter.call, None))
            self._changed()
        elif result is None or result.code is Code.CANCELLED:
            words = "Aborted connect attempt as there is a request from a newer incarnation."
            self._emit(Answer(waiter.call, failure(Code.ALREADY_EXISTS, words)))
        else:
            self._emit(Answer(waiter.call, result))

    def _barrier_ended(self, barrier: Barrier) -> None:
        """Move the members after the registration or shutdown barrier, once its callers are answered."""
        result = barrier.result
        if barrier.barrier_id == REGISTER_ID and result is not None:
            self._fail_all(failure(Code.INTERNAL, "Cluster registration failed with error: ", result))
        elif barrier.barrier_id == self.shutdown_id and result is None:
            for member in list(self.members.ids()):
                if not self.members.is_recoverable(member):
                    self._disconnect(member, self._now)
        elif barrier.barrier_id == self.shutdown_id and result is not None:
            error = _shutdown_failure(result)
            gone = self._leaving & barrier.arrived if result.code is Code.DEADLINE_EXCEEDED else set()
            for member in sorted(gone):
                self._disconnect(member, self._now)
            self._propagate(error, [member for member in self.members.ids() if member not in gone], gone)
            self._fail_all(error, gone)

    def _steady_members(self) -> tuple[Member, ...]:
        """The members of the shutdown barrier, fixed at its first call; () means all members."""
        if self._steady is None:
            steady = [member for member in self.members.ids() if not self.members.is_recoverable(member)]
            self._steady = () if len(steady) == len(self.members) else tuple(steady)
        return self._steady

    # Everything else

    def _connect(self, member: Member) -> None:
        self.members.connect(member, self._now)
        limit = self._now + self.settings.heartbeat_timeout_s
        self._check_at = limit if self._check_at is None else min(limit, self._check_at)

    def _refresh_alive(self) -> None:
        """Answer the rounds of `AliveMembers` in which all connected members have asked."""
        for alive in list(self._alive):
            living = [member for member in self.members.connected() if member in alive.members]
            if all(member in alive.asked for member in living):
                self._alive.remove(alive)
                answer = [(member, self.members[member].incarnation) for member in sorted(living)]
                for call in alive.calls:
                    self._emit(Answer(call, answer))

    def _changed(self) -> None:
        """Raise the version after a change of a member, and answer all watching calls."""
        self.version += 1
        self._emit(Persist("state", "version", to_json(self.version)))
        watchers, self._watchers = self._watchers, {}
        for call, role in watchers.items():
            self._emit(Answer(call, self._watched(role)))

    def _watched(self, role: str | None) -> Any:
        named = [member for member in self.members.ids() if role is None or member.role == role]
        return self.version, self.members.views(named)

    def _maybe_reset(self) -> None:
        """Reset the service after a run, successful or not, if the settings say so."""
        if not self.settings.clear_after_shutdown or self.members.connected():
            return
        registration = self.barriers.find(REGISTER_ID)
        if registration is None or registration.open:
            return
        if any(self.members.is_recoverable(member) for member in self.members.erroneous()):
            return  # it may come back and continue the run
        self.barriers.clear()  # first, because ending an open barrier may set members to error
        self.keys.clear()
        for member in list(self.members.erroneous()):
            self.members.disconnect(member, self._now)
        for member in self._devices:
            self._emit(Persist("devices", f"{member.role}/{member.rank}", None))
        self._devices.clear()
        self._steady = None
        self._leaving.clear()
        self.polls.clear()
        self._changed()

    def _on_forget(self, event: ev.Forget, now: float) -> None:
        call = event.call
        waited = self.nodes.forget(call) or self.keys.forget(call) or self.barriers.forget(call)
        if waited or self.polls.forget(call) or self._watchers.pop(call, self) is not self:
            return
        for alive in self._alive:
            alive.calls.pop(call, None)

    def _on_tick(self, event: ev.Tick, now: float) -> None:
        self._now = now
        if self._check_at is not None and now >= self._check_at:
            self._check_heartbeats(now)
        self.barriers.expire(now)
        self.nodes.expire(now)

    def _check_heartbeats(self, now: float) -> None:
        stale = self.members.stale(now, self.settings.heartbeat_timeout_s)
        for member in stale:
            words: tuple[Part, ...] = (
                "Task ",
                member,
                " heartbeat timeout. This indicates that the remote task has failed, got preempted, or crashed "
                "unexpectedly. Check the task logs for an earlier error or scheduler events (e.g. preemption, "
                "eviction) to debug further.",
            )
            self._fail_member(member, failure(Code.UNAVAILABLE, *words))
        if stale:
            named: list[Part] = []
            for member in stale[:_STALE_NAMED_MAX]:
                named += [member, "\n"]
            error = failure(
                Code.UNAVAILABLE,
                "The following tasks are unhealthy (stopped sending heartbeats):\n",
                *named,
                "The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. "
                "preemption, eviction) to debug further.",
            )
            self._propagate(error, stale)
        oldest = self.members.oldest()
        self._check_at = None if oldest is None else oldest + self.settings.heartbeat_timeout_s

    def _on_stop(self, event: ev.Stop, now: float) -> None:
        self.stopped = True
        for call in self.keys.waiting_calls():
            key = self.keys.waiting_key(call)
            self.keys.forget(call)
            words = f"Coordination service is shutting down. Cancelling GetKeyValue() for key: {key}"
            self._emit(Answer(call, failure(Code.CANCELLED, words, marked=False)))
        self.barriers.stop()
        self.nodes.stop()
        for call in [*self._watchers, *(call for alive in self._alive for call in alive.calls)]:
            self._emit(Answer(call, failure(Code.CANCELLED, "Coordination service is shutting down.")))
        self._watchers.clear()
        self._alive.clear()
        self.polls.stop()

    def _restore_state(self, key: str, value: bytes) -> None:
        if key == "version":
            self.version = read_json(value, "the record of the version", own=True, bytes_max=STATE_BYTES_MAX)
        elif key == "error":
            self.polls.restore(value)

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)


def _shutdown_failure(result: Failure) -> Failure:
    return failure(Code.INTERNAL, "Shutdown barrier has failed.\nBarrier result: '", result)
