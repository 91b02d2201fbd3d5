"""Plays events into the membership's state machine, for the tests beside it."""

from typing import Any

from fastrt.membership import events as ev
from fastrt.membership.events import Answer, Drop, Metadata, Persist, Phase, Refused, Role, Send
from fastrt.membership.state import ClusterState, Settings

SERVER, WORKER = Role.SERVER, Role.WORKER


class Play:
    """Plays events into a state machine, and keeps what each link was told and each caller answered."""

    def __init__(self, workers: int = 1, servers: int = 1, **changes: Any) -> None:
        self.settings = Settings(workers, servers, **changes)
        self.now = 100.0
        self.state = ClusterState(self.settings, self.now)
        self.calls = 0
        self.checking = True
        self.links = 0
        self.link_of: dict[str, int] = {}
        self.told: dict[int, list[Any]] = {}
        self.ranks: dict[int, int | None] = {}
        self.answers: dict[int, Any] = {}
        self.records: dict[tuple[str, str], bytes | None] = {}

    def feed(self, event: Any) -> Any:
        """The answer of the event's caller, if it is one."""
        for effect in self.state.handle(event, self.now):
            if isinstance(effect, Answer):
                assert effect.call not in self.answers, "answered twice"
                self.answers[effect.call] = effect.value
            elif isinstance(effect, Persist):
                self.records[effect.kind, effect.key] = effect.value
            elif isinstance(effect, Send):
                for i, link in enumerate(effect.links):
                    self.told.setdefault(link, []).append(effect.order)
                    if isinstance(effect.order, Metadata):
                        self.ranks[link] = effect.order.ranks[i]
            elif isinstance(effect, Drop):
                self.feed(ev.LinkLost(effect.link))
        if self.checking:
            self.state.check_invariants()
        return self.answers.get(getattr(event, "call", -1))

    def do(self, kind: type, *arguments: Any) -> Any:
        self.calls += 1
        return self.feed(kind(self.calls, *arguments))

    def register(self, *names: str, link: int | None = None) -> Any:
        """Register `s1` as a server and `w1` as a worker, by new links unless told otherwise."""
        answer = None
        for name in names:
            if link is None:
                self.links += 1
            used = self.links if link is None else link
            role = SERVER if name.startswith("s") else WORKER
            answer = self.do(ev.Register, used, name, role, "127.0.0.1", 7000 + used)
            if not isinstance(answer, Refused):
                self.link_of[name] = used
        return answer

    def again(self, *names: str) -> None:
        """Members register again, as in a scaling."""
        for name in names:
            assert self.register(name, link=self.link_of[name]) is None

    def lose(self, *names: str) -> None:
        for name in names:
            self.feed(ev.LinkLost(self.link_of[name]))

    def done(self, phase: Phase, *names: str) -> None:
        for name in names:
            assert self.do(ev.ScaleDone, self.link_of[name], name, phase) is None

    def beat(self, *names: str) -> Any:
        return [self.do(ev.Heartbeat, self.link_of[name], name) for name in names][-1]

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def rank(self, name: str) -> int | None:
        """As its link was told last."""
        return self.ranks.get(self.link_of[name], -1)

    def orders(self, name: str, kind: type) -> list[Any]:
        return [order for order in self.told.get(self.link_of[name], []) if isinstance(order, kind)]

    def restarted(self) -> "Play":
        after = Play()
        after.settings, after.now = self.settings, self.now
        after.state = ClusterState(self.settings, self.now)
        kept = [(kind, key, value) for (kind, key), value in self.records.items() if value is not None]
        after.state.restore(kept, self.now)
        after.state.check_invariants()
        after.records, after.links, after.calls = self.records, self.links, self.calls
        return after
