"""The membership's decisions in any order, beside a model that is one table."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastrt.membership import events as ev
from fastrt.membership.events import Phase, Refused, Role
from support.cluster_play import SERVER, WORKER, Play


class AnyOrder(RuleBasedStateMachine):
    """Members come, go, scale and finish in any order, beside a model that keeps one table: rank -> id."""

    TIMEOUT_S, SCALE_S = 10.0, 25.0

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(2, 2, heartbeat_timeout_s=self.TIMEOUT_S, scale_timeout_s=self.SCALE_S)
        self.table: dict[tuple[Role, int], str] = {}
        self.alive: set[str] = set()
        self.finished: set[str] = set()
        self.heard: dict[str, float] = {}
        self.fresh = 0
        self.said: set[str] = set()  # who goes on, in the round that was applied last
        self.fill()

    def owners(self) -> dict[tuple[Role, int], str]:
        return {(member.role, member.rank): member.member_id for member in self.play.state.members}

    def sync(self) -> None:
        """Ranks only ever change in a round that was applied or taken back, or by taking a lost one's place."""
        self.table = self.owners()
        known = set(self.table.values())
        self.alive &= known
        self.finished &= known

    def expected_rank(self, role: Role) -> tuple[int, str | None] | None:
        """What a newcomer must be given: the lowest lost one's rank, else the lowest free one."""
        mine = {rank: name for (its, rank), name in self.table.items() if its is role}
        lost = sorted(rank for rank, name in mine.items() if name not in self.alive and name not in self.finished)
        if lost:
            return lost[0], mine[lost[0]]
        free = sorted(set(range(self.play.state.members.counts[role])) - set(mine))
        return (free[0], None) if free else None

    @rule(role=st.sampled_from([SERVER, WORKER]))
    def newcomer(self, role: Role) -> None:
        self.add_newcomer(role)

    def add_newcomer(self, role: Role) -> bool:
        if self.play.phase is Phase.EXIT:
            return False
        expected = self.expected_rank(role)
        leaving = self.play.state.round.leaving if self.play.state.round else ()
        self.fresh += 1
        name = f"{'s' if role is SERVER else 'w'}{self.fresh}"
        answer = self.play.register(name)
        if expected is None or expected[1] in leaving:
            assert isinstance(answer, Refused)
            return False
        assert answer is None
        self.heard[name] = self.play.now
        self.alive.add(name)
        if self.play.state.round is None or self.play.state.round.gathering:
            assert self.owners()[role, expected[0]] == name
        self.sync()
        return True

    @rule()
    def fill(self) -> None:
        """Whoever is missing comes."""
        if self.play.phase is Phase.EXIT:
            return
        for name in sorted(set(self.table.values()) - self.alive - self.finished):
            if name in self.table.values():  # a leaver may have gone when the last stayer came
                assert self.play.register(name) is None
                self.alive.add(name)
                self.heard[name] = self.play.now
                self.sync()
        for role in (SERVER, WORKER):
            while self.expected_rank(role) is not None and self.add_newcomer(role):
                pass

    @precondition(lambda self: set(self.table.values()) - self.alive - self.finished)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.table.values()) - self.alive - self.finished)))
        rank = self.play.state.members.by_id[name].rank
        moves = self.play.state.round is not None and self.play.state.round.phase is Phase.SCALE_IN
        assert self.play.register(name) is None
        assert self.play.phase is Phase.EXIT or moves or self.play.state.members.by_id[name].rank == rank
        self.heard[name] = self.play.now
        self.alive.add(name)
        self.sync()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.play.lose(name)
        self.alive.discard(name)
        self.said.discard(name)
        self.sync()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def register_twice(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        before = self.owners()
        assert isinstance(self.play.register(name), Refused)
        assert self.owners() == before

    @rule(seconds=st.floats(0.5, 12.0))
    def time_passes(self, seconds: float) -> None:
        """Half of the living are heard of, the others not."""
        for name in sorted(self.alive)[::2]:
            self.play.beat(name)
            self.heard[name] = self.play.now
        current = self.play.state.round
        self.play.later(seconds)
        if current is not None and self.play.state.round is None:
            kept = current.phase is Phase.SCALE_IN and not current.gathering
            assert self.play.state.members.counts == (current.after if kept else current.before)
        self.alive = {name for name in self.alive if self.play.now - self.heard[name] < self.TIMEOUT_S}
        self.said &= self.alive
        self.sync()

    @rule(workers=st.integers(0, 1), servers=st.integers(0, 1))
    def scale_out(self, workers: int, servers: int) -> None:
        can = self.play.phase is Phase.READY and workers + servers > 0 and not self.finished
        assert isinstance(self.play.do(ev.ScaleOut, workers, servers), Refused) != can

    @precondition(lambda self: self.table)
    @rule(data=st.data())
    def scale_in(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sets(st.sampled_from(sorted(self.table.values())), min_size=1, max_size=2))
        leads = any(rank == 0 and name in leaving for (_, rank), name in self.table.items())
        can = self.play.phase is Phase.READY and not self.finished and not leads
        assert isinstance(self.play.do(ev.ScaleIn, sorted(leaving)), Refused) != can

    @rule()
    def take_back(self) -> None:
        current = self.play.state.round
        assert isinstance(self.play.do(ev.TakeBack), Refused) == (current is None)
        if current is not None:
            kept = current.phase is Phase.SCALE_IN and not current.gathering
            assert self.play.state.members.counts == (current.after if kept else current.before)
            assert self.play.state.round is None
        self.said &= self.alive
        self.sync()

    @precondition(lambda self: self.play.state.round is not None)
    @rule(data=st.data(), all_of_them=st.booleans())
    def go_on_scaling(self, data: st.DataObject, all_of_them: bool) -> None:
        """Some of those that the round waits for do what it asks for."""
        current = self.play.state.round
        assert current is not None
        gathering = current.gathering
        for name in sorted((current.missing if gathering else self.alive - self.finished - self.said) & self.alive):
            if not (all_of_them or data.draw(st.booleans())):
                break
            if gathering:
                self.play.again(name)
                self.heard[name] = self.play.now
            else:
                self.play.done(current.phase, name)
                self.said.add(name)
        self.sync()
        if gathering:
            self.said.clear()
        elif self.play.state.round is None:
            assert self.said >= self.alive - self.finished
            assert set(self.table.values()) <= self.alive | self.finished
            assert self.play.state.members.counts == current.after
        else:
            assert not set(self.table.values()) <= self.said | self.finished, "all go on, and the round does not end"

    @precondition(lambda self: self.alive - self.finished)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if not data.draw(st.integers(0, 3)):
            name = data.draw(st.sampled_from(sorted(self.alive - self.finished)))
            assert self.play.do(ev.Finish, self.play.link_of[name], name) is None
            self.finished.add(name)
            self.sync()

    @rule()
    def restart(self) -> None:
        """Another process goes on from the records; nobody's connection is left."""
        if self.play.phase is Phase.EXIT:
            return
        scaling = self.play.state.round
        old = set(self.table.values())
        if scaling is not None and scaling.phase is Phase.SCALE_OUT:
            old = {name for (role, rank), name in self.table.items() if rank < scaling.before[role]}
        alive = self.alive & old
        self.play = self.play.restarted()
        assert self.play.state.round is None
        assert set(self.owners().values()) == old
        self.alive = set()
        for name in sorted(alive):
            assert self.play.register(name) is None
            self.alive.add(name)
            self.heard[name] = self.play.now
            self.finished.discard(name)
        self.sync()

    @invariant()
    def ranks_are_dense_unique_and_owned_by_the_living(self) -> None:
        members = list(self.play.state.members)
        assert len({(member.role, member.rank) for member in members}) == len(members)
        if self.play.phase is not Phase.EXIT:  # after that, nobody is watched any more
            assert {member.member_id for member in members if member.alive} >= self.alive
        assert {member.member_id for member in members if member.finished} == self.finished
        for name in self.alive:
            if self.play.phase is Phase.READY:
                assert self.play.rank(name) == self.play.state.members.by_id[name].rank

    @invariant()
    def ready_means_that_all_are_there(self) -> None:
        total = sum(self.play.state.members.counts.values())
        there = len(self.table) == total and set(self.table.values()) <= self.alive | self.finished
        if self.play.state.round is None and self.play.phase is not Phase.EXIT:
            assert (self.play.phase is Phase.READY) == there

    @invariant()
    def cluster_ends_only_when_nobody_works(self) -> None:
        if self.play.phase is Phase.EXIT:
            assert not self.alive - self.finished


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestAnyOrder = AnyOrder.TestCase
