"""The membership of a parameter-server cluster as a pure state machine.

`handle(event, now)` takes one event and returns the effects that follow from it. The module has no socket, clock,
thread or log, so one test can play a thousand members in any order.

A member registers and gets a rank of its role: its previous rank if its id is known, else the rank of a lost member,
else a free rank; if there is none, it is refused. When all members are present, each gets the list of all (`Metadata`),
and the cluster is READY. It is NODE_TIMEOUT while a member is lost, and READY again when that member has returned or
another one has taken its rank. In a round of scaling the members register again, the round is applied, and it ends when
all members have acknowledged it; a round that does not end in time is undone. When all members have finished, each is
notified (`Ended`), and the cluster is at EXIT.

Invariants: those of `members`. Outside a round of scaling, READY means that every rank has an owner that is alive or
has finished. All decisions are in the records, so that a restarted shell continues from them. A request is answered
once.

Source: MindSpore's `ps/core/scheduler_node.cc` and `node_manager.cc` of release 1.5. There a lost member counted as
finished forever, and a second scaling ended at once.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastrt.foreign_text import read_json, read_object
from fastrt.membership import events as ev
from fastrt.membership.events import Answer, Effect, Event, Metadata, Overview, Persist, Phase, Refused, Role, Send
from fastrt.membership.members import Member, Members
from fastrt.membership.scaling import Round, moves

_ID_CHARS_MAX = 256
# How many members that left by scaling in are remembered: they still report that they have finished.
_LEFT_MAX = 10_000


@dataclass(frozen=True)
class Settings:
    """Constants of one cluster.

    Attributes:
        workers: number of workers at the start.
        servers: number of servers at the start.
        heartbeat_timeout_s: a member without a message for longer is lost.
        available_timeout_s: how long to wait for missing members: at the start, before the cluster is NODE_TIMEOUT; and
            for a lost member when all others have finished, before the cluster ends without it.
        scale_timeout_s: a scaling that takes longer is undone.
        members_max: most members that the cluster can have.
    """

    workers: int = 1
    servers: int = 1
    heartbeat_timeout_s: float = 30.0
    available_timeout_s: float = 300.0
    scale_timeout_s: float = 300.0
    members_max: int = 10_000


class ClusterState:
    """The state machine. Not thread-safe: one shell owns it.

    Args:
        settings: the cluster's constants.
        now: the time at the start, by the same clock as in `handle`.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self.settings = settings
        self.state = Phase.STARTING
        self.moves = 0
        self.members = Members({Role.SERVER: settings.servers, Role.WORKER: settings.workers})
        self.round: Round | None = None
        self._instruction = -1  # the call whose answer ends the phase of an instruction
        self._formed = False  # whether all members have been present once
        self._effects: list[Effect] = []
        self._overview: Overview | None = None
        # Addresses of members that left by scaling in.
        self._left: dict[str, tuple[str, int]] = {}
        self._now = now
        self._start_by = now + settings.available_timeout_s
        self._check_at: float | None = None
        self._handlers: dict[type, Callable[[Any], Any]] = {
            ev.Register: self._on_register,
            ev.Heartbeat: self._on_heartbeat,
            ev.Fetch: self._on_fetch,
            ev.Finish: self._on_finish,
            ev.ScaleDone: self._on_scale_done,
            ev.Publish: self._on_publish,
            ev.ScaleOut: self._on_scale_out,
            ev.ScaleIn: self._on_scale_in,
            ev.TakeBack: self._on_take_back,
            ev.Instruct: self._on_instruct,
            ev.Instructed: self._on_instructed,
            ev.View: lambda e: self.overview(),
            ev.LinkLost: self._on_link_lost,
            ev.Tick: self._on_tick,
        }

    @property
    def phase(self) -> Phase:
        """The cluster's state."""
        return self.state

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Process an event and return its effects, in order; the answer to its caller is the last.

        Args:
            event: the fact to process.
            now: seconds of a monotonic clock.
        """
        self._now = now
        call = getattr(event, "call", None)
        try:
            value = self._handlers[type(event)](event)
        except Refused as refused:
            value = refused
        if call is not None and not (isinstance(event, ev.Instruct) and value is None):
            self._effects.append(Answer(call, value))
        effects, self._effects = self._effects, []
        return effects

    def overview(self) -> Overview:
        """The cluster's state; the same object until something changes."""
        if self._overview is None:
            counts, lost = self.members.counts, self.members.lost()
            impaired = any(member.role is Role.WORKER or member.rank == 0 for member in lost)
            self._overview = Overview(
                self.phase, counts[Role.WORKER], counts[Role.SERVER], self.members.views(), impaired
            )
        return self._overview

    def next_deadline(self) -> float | None:
        """Latest time for the next `Tick`."""
        times = [self._check_at, self.round.deadline if self.round is not None else None]
        if self.phase is Phase.STARTING:
            times.append(self._start_by)
        return min((time for time in times if time is not None), default=None)

    def restore(self, records: Iterable[tuple[str, str, bytes]], now: float) -> None:
        """Continue from the records of an earlier process. A scaling that was in progress is undone.

        Members that were alive have one heartbeat timeout to come back.
        """
        self._now = now
        members = []
        for kind, key, value in records:
            if kind == "cluster":
                kept = read_object(value, "the record of the cluster", own=True)
                self._formed = kept["formed"]
                self.members.resize({Role.SERVER: kept["servers"], Role.WORKER: kept["workers"]})
            elif kind == "member":
                members.append((key, read_json(value, "the record of a member", own=True)))
        for member_id, (role, rank, host, port, alive, finished) in members:
            if rank >= self.members.counts[Role(role)]:  # it joined for a scaling that did not end
                self._emit(Persist("member", member_id, None))
                continue
            state = Member.recorded_state(alive, finished)
            self.members.add(Member(member_id, Role(role), rank, host, port, None, now, state))
        if members:
            self._check_at = now + self.settings.heartbeat_timeout_s
        if self._formed:
            self.state = Phase.READY if self.members.complete else Phase.NODE_TIMEOUT

    # Members join and are lost

    def _on_register(self, event: ev.Register) -> None:
        known = self.members.by_id.get(event.member_id)
        if self.phase is Phase.EXIT and known is not None and known.finished:
            self._emit(Send([event.link], ev.Ended()))  # it was not connected when the others were notified
            return
        self._refuse_at_end()
        self._check_register(event)
        other = self.members.by_link.get(event.link)
        if other is not None and other.member_id != event.member_id:
            raise Refused(f"this connection is {other.member_id!r}'s; use one connection for each member.")
        member = self.members.by_id.get(event.member_id)
        lost_count = len(self.members) - self.members.present_count
        if member is None:
            member = self._newcomer(event)
        else:
            if member.role is not event.role:
                raise Refused(f"{event.member_id!r} is a {member.role.name.lower()}; use another id.")
            if member.link not in (None, event.link):
                raise Refused(
                    f"{event.member_id!r} is connected already, at {member.host}:{member.port}. Use another id, or end "
                    "that process first."
                )
            self.members.note(member, "registered")
            self.members.attach(member, event.link, self._now)
            member.host, member.port, member.view = event.host, event.port, None
        self._keep(member)
        self._watch(member)
        if len(self.members) - self.members.present_count < lost_count:
            self._emit(ev.Changed())
        self._came(member)

    def _check_register(self, event: ev.Register) -> None:
        if not 0 < len(event.member_id) <= _ID_CHARS_MAX:
            raise Refused(f"a node id must have 1 to {_ID_CHARS_MAX} characters, not {len(event.member_id)}.")
        if event.role is Role.SCHEDULER:
            raise Refused("a scheduler cannot register; the role must be worker or server.")
        if not 0 <= event.port < 1 << 16:
            raise Refused(f"{event.port} is not a port.")
        try:
            ipaddress.ip_address(event.host)
        except ValueError:
            raise Refused(f"{event.host!r} is not an IP address; give the one at which this node listens.") from None

    def _newcomer(self, event: ev.Register) -> Member:
        rank, lost = self.members.next_rank(event.role)
        if lost is not None:
            if self.round is not None and lost.member_id in self.round.leaving:
                raise Refused("the cluster scales in, and this member would take a leaver's rank. Try again later.")
            self._remove(lost)
        self._left.pop(event.member_id, None)
        member = Member(event.member_id, event.role, rank, event.host, event.port, event.link, self._now)
        self.members.add(member)
        if lost is not None and self.round is not None:
            self.round.forget(lost.member_id)
            if not self.round.gathering:
                self.round.undone.add(member.member_id)
        return member

    def _came(self, member: Member) -> None:
        """Send a registered member the orders it may have missed, and settle."""
        if self.round is not None:
            self.round.returned(member.member_id)
            if not self.round.gathering:
                self.round.undone.add(member.member_id)
                self._send_metadata([member])
        elif self.phase is not Phase.STARTING and self.phase is not Phase.NODE_TIMEOUT:
            self._send_metadata([member])  # the others have it already
        self._settle()

    def _on_heartbeat(self, event: ev.Heartbeat) -> Overview:
        member = self.members.by_id.get(event.member_id)
        if member is None and (self.phase is Phase.EXIT or event.member_id in self._left):
            return self.overview()
        if member is not None and member.link is None and event.link not in self.members.by_link:
            self._come_back(member, event.link)
        self._asker(event).heard = self._now
        return self.overview()

    def address_over(self, link: int, member_id: str) -> tuple[str, int] | None:
        """The listening address of a member that sends a request over a new connection without registering.

        Args:
            link: the connection.
            member_id: the member that the request names.
        Returns:
            Its host and port; None if the connection belongs to a member, or the id is unknown or connected.
        """
        if link in self.members.by_link:
            return None
        member = self.members.by_id.get(member_id)
        if member is None:
            return self._left.get(member_id)
        return (member.host, member.port) if member.link is None else None

    def _asker(self, event: ev.Heartbeat | ev.Finish | ev.ScaleDone | ev.Publish) -> Member:
        """The member that a request is about; it must come over that member's connection.

        Raises:
            Refused: there is no such member, or the connection belongs to another member or to none.
        """
        member = self.members.by_id.get(event.member_id)
        if member is None:
            raise Refused(f"{event.member_id!r} is not a member. Register first.")
        if member.link != event.link:
            raise Refused(f"this connection is not {event.member_id!r}'s. Register over it first.")
        return member

    def _come_back(self, member: Member, link: int) -> None:
        """Accept a member's heartbeat over a new connection: upstream's members do not register again."""
        self.members.attach(member, link, self._now)
        self.members.note(member, "reconnected")
        self._keep(member)
        self._watch(member)
        if self.phase is Phase.EXIT:
            self._emit(Send([link], ev.Ended()))  # it was not connected when the others were notified
            return
        if self.round is None:
            is_due = self.phase is not Phase.STARTING and self.phase is not Phase.NODE_TIMEOUT
        else:
            is_due = not self.round.gathering and member.member_id in self.round.undone
        if is_due:
            self._send_metadata([member])  # in the other cases all get it once all are present
        self._emit(ev.Changed())
        self._settle()

    def _on_fetch(self, event: ev.Fetch) -> Overview:
        return self.overview()

    def _on_link_lost(self, event: ev.LinkLost) -> None:
        member = self.members.by_link.get(event.link)
        if member is not None:
            self.members.attach(member, None, self._now)
            self._lose(member)

    def _lose(self, member: Member) -> None:
        """Mark a member as lost; one that had not finished is missed."""
        if self.round is not None and not member.finished:
            if self.round.gathering and self.round.is_newcomer(member):
                self._remove(member)
                return
            self.round.lost(member)
        self.members.note(member, "lost")
        self._keep(member)
        self._watch(member)
        if not member.finished:
            self._emit(ev.Changed())
        self._settle()

    # The end

    def _on_finish(self, event: ev.Finish) -> None:
        known = self.members.by_id.get(event.member_id)
        # A member that was away at the end reports it over a connection that it does not own. A refusal would close
        # that connection, perhaps before the end is sent over it.
        is_over = self.phase is Phase.EXIT and (known is None or known.finished)
        if is_over or (known is None and event.member_id in self._left):
            self._emit(Send([event.link], ev.Ended()))
            return
        member = self._asker(event)
        if not member.finished:
            self.members.note(member, "finished")
            self._keep(member)
            if self.round is not None:
                self.round.forget(member.member_id)
            self._settle()

    def _maybe_end(self) -> bool:
        """End when every rank's owner has finished, or is lost for longer than `available_timeout_s`."""
        members = self.members
        if not members.finished_count or members.present_count > members.finished_count:
            return False
        limit = self._now - self.settings.available_timeout_s
        if len(members) < sum(members.counts.values()) or any(member.heard > limit for member in members.lost()):
            return False
        self._move("all_finished")
        self.round = None
        self._send_all(ev.Ended())
        self._keep_cluster()
        return True

    # Scaling

    def _on_scale_out(self, event: ev.ScaleOut) -> None:
        counts = self.members.counts
        if event.workers < 0 or event.servers < 0 or event.workers + event.servers == 0:
            raise Refused(f"cannot scale out by {event.workers} workers and {event.servers} servers.")
        total = sum(counts.values()) + event.workers + event.servers
        if total > self.settings.members_max:
            raise Refused(f"the cluster would have {total} members; the limit is {self.settings.members_max}.")
        self._refuse_unless_ready()
        after = {
            Role.SERVER: counts[Role.SERVER] + event.servers,
            Role.WORKER: counts[Role.WORKER] + event.workers,
        }
        self._begin_round(Phase.SCALE_OUT, after, frozenset())
        self.members.resize(after)

    def _on_scale_in(self, event: ev.ScaleIn) -> None:
        self._refuse_unless_ready()
        after = dict(self.members.counts)
        leaving = frozenset(event.member_ids)
        if not leaving:
            raise Refused("The node ids are empty; name the members that are to leave.")
        for member_id in sorted(leaving):
            member = self.members.by_id.get(member_id)
            if member is None:
                raise Refused(f"The node id:{member_id} is illegal. No member has it.")
            if member.rank == 0:
                raise Refused(f"The node id:{member_id} is illegal. {member.role.name} 0 leads, and cannot leave.")
            after[member.role] -= 1
        self._begin_round(Phase.SCALE_IN, after, leaving)

    def _on_take_back(self, event: ev.TakeBack) -> None:
        if self.round is None:
            raise Refused("No scaling is in progress.")
        self._give_up(self.round)

    def _begin_round(self, phase: Phase, after: dict[Role, int], leaving: frozenset[str]) -> None:
        deadline = self._now + self.settings.scale_timeout_s
        stayers = {member.member_id for member in self.members} - leaving
        self.round = Round(phase, dict(self.members.counts), after, deadline, leaving, stayers)
        self._move(phase.name.lower())
        workers, servers = after[Role.WORKER], after[Role.SERVER]
        going: list[int] = []
        staying: list[int] = []
        for member in self.members:
            if member.link is not None:
                (going if member.member_id in leaving else staying).append(member.link)
        self._emit(Send(staying, ev.PrepareScale(phase, workers, servers)))
        if going:
            self._emit(Send(going, ev.PrepareScale(phase, workers, servers, leaving=True)))

    def _settle_round(self, current: Round) -> None:
        """Apply a round that all members have registered for; end one that all have acknowledged."""
        if current.gathering:
            if current.missing or (current.phase is Phase.SCALE_OUT and not self.members.complete):
                return
            self._apply(current)
        elif not current.undone:
            self._end_round(completed=True)

    def _apply(self, current: Round) -> None:
        leavers = [self.members.by_id[member_id] for member_id in sorted(current.leaving)]
        self._dismiss(leavers)
        for member, rank in moves(self.members, current.leaving, current.after):
            self.members.move(member, rank)
            self._keep(member)
        self.members.resize(current.after)
        current.gathering = False
        current.undone = {member.member_id for member in self.members if not member.finished}
        if current.phase is Phase.SCALE_IN:
            self._keep_cluster()
        self._overview = None
        self._send_metadata(self.members)
        self._settle()

    def _dismiss(self, members: Sequence[Member]) -> None:
        """Remove members after sending them `Metadata` without a rank."""
        linked = [member.link for member in members if member.link is not None]
        for member in members:
            self._left[member.member_id] = (member.host, member.port)
            self._remove(member)
        while len(self._left) > _LEFT_MAX:
            del self._left[next(iter(self._left))]
        if linked:
            self._emit(Send(linked, Metadata(self.overview(), [None] * len(linked))))

    def _give_up(self, current: Round) -> None:
        """Undo a round that has taken too long; complete it if its leavers have gone already."""
        if current.phase is Phase.SCALE_OUT:
            self._dismiss([member for member in self.members if current.is_newcomer(member)])
            self.members.resize(current.before)
        self._end_round(completed=not current.gathering and current.phase is Phase.SCALE_IN)

    def _end_round(self, completed: bool) -> None:
        """Leave the phase of a round, and send all members its end, or the old counts if it was undone."""
        phase, self.round = self.phase, None
        self._move("round_over" if self.members.complete else "round_over_incomplete")
        if completed:
            self._send_all(ev.ScaleEnded(phase))
        else:
            self._send_metadata(self.members)
        self._keep_cluster()
        self._settle()

    def _on_scale_done(self, event: ev.ScaleDone) -> None:
        if event.member_id in self.members.by_id or event.member_id not in self._left:
            self._asker(event)
        current = self.round
        if current is not None and not current.gathering and current.phase is event.phase:
            current.undone.discard(event.member_id)
            self._settle()

    # Requests that are passed on to members

    def _on_publish(self, event: ev.Publish) -> None:
        self._asker(event)
        self._send_all(ev.Published(event.number))

    def _on_instruct(self, event: ev.Instruct) -> None:
        self._refuse_unless_ready()
        servers = [(m.link, m.rank) for m in self.members if m.role is Role.SERVER and m.link is not None]
        if event.instruction is not ev.Instruction.QUERY_INSTANCE:
            self._move(event.instruction.name.lower())
            self._instruction = event.call
        self._emit(ev.Ask(event.call, servers, event.instruction, event.body))

    def _on_instructed(self, event: ev.Instructed) -> Any:
        if event.call == self._instruction and "instructed" in ev.CLUSTER.table[self.phase]:
            self._move("instructed")
            self._settle()
        return event.result

    # Time

    def _on_tick(self, event: ev.Tick) -> None:
        now = self._now
        if self._check_at is not None and now >= self._check_at:
            self._check_silence()
        if self.round is not None and now >= self.round.deadline:
            self._give_up(self.round)
        if self.phase is Phase.STARTING and now >= self._start_by:
            self._move("start_timeout")

    def _check_silence(self) -> None:
        timeout = self.settings.heartbeat_timeout_s
        for member in [m for m in self.members if m.alive and self._now - m.heard >= timeout]:
            if self.members.by_id.get(member.member_id) is not member:
                continue
            link = member.link
            if link is not None:
                self.members.attach(member, None, self._now)
                self._emit(ev.Drop(link, f"{member.member_id!r} was silent for {timeout:g} s"))
            self._lose(member)
        if self.phase is not Phase.EXIT:
            self._maybe_end()
        self._check_at = min(filter(None, map(self._due, self.members)), default=None)

    def _due(self, member: Member) -> float | None:
        """When to check a member again: it may be silent for too long then, or no longer worth waiting for."""
        if member.alive:
            return member.heard + self.settings.heartbeat_timeout_s
        due = member.heard + self.settings.available_timeout_s
        return due if not member.finished and due > self._now else None

    def _watch(self, member: Member) -> None:
        due = self._due(member)
        if due is not None:
            self._check_at = due if self._check_at is None else min(due, self._check_at)

    # Shared

    def _settle(self) -> None:
        """Move the cluster to the phase that follows from its members; call after every change of a member."""
        self._overview = None
        if self.phase is Phase.EXIT or self._maybe_end():
            return
        if self.round is not None:
            self._settle_round(self.round)
        elif not self.members.complete:
            if self.phase not in (Phase.STARTING, Phase.NODE_TIMEOUT):
                self._move("incomplete")
        elif self.phase in (Phase.STARTING, Phase.NODE_TIMEOUT):
            self._move("complete")
            if not self._formed:
                self._formed = True
                self._keep_cluster()
            self._send_metadata(self.members)

    def _move(self, event: str) -> None:
        """Move the cluster to its next phase; raises IllegalMoveError if `CLUSTER` does not list the event."""
        ev.CLUSTER.move(self, event, f"of {self.settings.workers} workers and {self.settings.servers} servers")
        self._overview = None
        if self.phase is Phase.NODE_TIMEOUT:
            self._emit(ev.Changed())

    def _refuse_at_end(self) -> None:
        if self.phase is Phase.EXIT:
            raise Refused("the cluster has finished. Start its scheduler again.")

    def _refuse_unless_ready(self) -> None:
        if self.phase is not Phase.READY:
            raise ev.NotReady(f"The cluster is not ready. It is {self.phase.name}; wait until it is READY.")
        if self.members.finished_count:
            raise Refused(f"The cluster is not ready. {self.members.finished_count} of its members have finished.")

    def _send_metadata(self, members: Iterable[Member]) -> None:
        links, ranks = [], []
        for member in members:
            if member.link is not None:
                links.append(member.link)
                ranks.append(member.rank)
        if links:
            self._emit(Send(links, Metadata(self.overview(), ranks)))

    def _send_all(self, order: ev.Order) -> None:
        links = [member.link for member in self.members if member.link is not None]
        if links:
            self._emit(Send(links, order))

    def _remove(self, member: Member) -> None:
        self.members.remove(member)
        self._overview = None
        self._emit(Persist("member", member.member_id, None))

    def _keep(self, member: Member) -> None:
        self._overview = None
        self._emit(Persist("member", member.member_id, member.record()))

    def _keep_cluster(self) -> None:
        counts = self.members.counts
        kept = {
            "workers": counts[Role.WORKER],
            "servers": counts[Role.SERVER],
            "formed": self._formed,
            "ended": self.phase is Phase.EXIT,
        }
        self._emit(Persist("cluster", "cluster", json.dumps(kept).encode()))

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant of this module is broken."""
        self.members.check_invariants()
        if self.phase is Phase.READY:
            assert self.members.complete, f"READY, but {self.members.lost()} are lost"
        assert (self.phase in (Phase.SCALE_OUT, Phase.SCALE_IN)) == (self.round is not None)
        if self.round is not None:
            assert (self.round.missing | self.round.undone) <= set(self.members.by_id)
