"""The pure state under random orders of everything that can happen, with clients that count as they should.

What the clients own is written down beside the state: nothing that anybody owns may be deallocated. At the end all
calls run, all deliveries arrive, everybody drops what he owns; then nothing may be left.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastrt.scheduler import events as ev
from fastrt.scheduler.snapshot import dump, load
from fastrt.scheduler.state import SchedulerState, Settings

PICK = st.integers(0, 1 << 20)
FUNCTIONS = {"none": 0, "one": 1, "two": 2}


class Run:
    """A call that a worker was given."""

    def __init__(self, effect: ev.InvokeCall, refs: list[int]) -> None:
        self.worker, self.task, self.results = effect.worker, effect.task, list(effect.results)
        self.message = refs  # what its message counts, until it is unpacked
        self.unpacked = False


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = SchedulerState(Settings(max_retries=1))
        self.owned: Counter[int] = Counter()  # by the clients
        self.messages: Counter[int] = Counter()  # by messages
        self.inside: dict[int, list[int]] = {}
        self.bodies: dict[bytes, list[int]] = {}
        self.on_the_way: list[ev.DeliverObj] = []
        self.runs: list[Run] = []
        self.pushed: list[tuple[int, int]] = []
        self.stores: list[int] = []
        self.workers: dict[int, int] = {}
        self.made = 0
        self.busy = 0

    # ---- the world around the state ----

    def tell(self, event: ev.Event) -> object:
        """Hand over an event and take up its effects; returns the answer."""
        value = None
        effects = list(self.state.handle(event))
        for k, effect in enumerate(effects):
            match effect:
                case ev.Answer():
                    value = effect.value
                case ev.InvokeCall():
                    refs = self.bodies[effect.body] + list(effect.results)
                    assert effect.worker in self.workers
                    assert effect.worker not in [run.worker for run in self.runs], "a second call for a busy worker"
                    self.runs.append(Run(effect, refs))
                case ev.DeliverObj():
                    self.on_the_way.append(effect)
                case ev.DeallocateObject():
                    assert not self.state.objects.refs.is_alive(effect.canonical)
                case ev.NotifyAlias() if ev.DeallocateObject(effect.store, effect.canonical) in effects[k + 1 :]:
                    pass  # the same event orders the store to drop the object: the table has no aliases of it any more
                case ev.NotifyAlias():
                    assert self.state.objects.refs.canonical(effect.alias) == effect.canonical
                    entry = self.state.objects.entry(effect.canonical)
                    assert effect.store in self.state.objects.stores(entry)
        return value

    def done(self, event: ev.Event) -> object:
        value = self.tell(event)
        assert not isinstance(value, ev.Failure), value
        return value

    def alive(self) -> list[int]:
        return [ref for ref in self.owned if self.owned[ref] > 0]

    def drop(self, refs: list[int], owners: Counter[int]) -> None:
        owners.subtract(refs)
        self.done(ev.DecrementRefs(0, refs))

    # ---- what happens ----

    @precondition(lambda self: len(self.stores) < 3)
    @rule()
    def store(self) -> None:
        self.made += 1
        self.stores.append(self.done(ev.RegisterObjStore(0, f"store {self.made}")))

    @precondition(lambda self: self.stores and len(self.workers) < 4)
    @rule(pick=PICK, names=st.sets(st.sampled_from(sorted(FUNCTIONS)), min_size=1))
    def worker(self, pick: int, names: set[str]) -> None:
        self.made += 1
        store = self.stores[pick % len(self.stores)]
        worker = self.done(ev.RegisterWorker(0, f"worker {self.made}", self.state.stores[store]))
        self.workers[worker] = store
        for name in sorted(names):
            self.done(ev.RegisterFunction(0, worker, name, FUNCTIONS[name]))

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def push(self, pick: int) -> None:
        worker = sorted(self.workers)[pick % len(self.workers)]
        ref = self.done(ev.PushObj(0, worker))
        self.owned[ref] += 1
        self.pushed.append((ref, self.workers[worker]))

    @precondition(lambda self: self.pushed)
    @rule(pick=PICK)
    def pushed_object_is_ready(self, pick: int) -> None:
        ref, store = self.pushed.pop(pick % len(self.pushed))
        value = self.tell(ev.ObjReady(0, ref, store, pick % 1000))
        assert not isinstance(value, ev.Failure) or store not in self.stores or not self.owned[ref], value

    @rule(name=st.sampled_from(sorted(FUNCTIONS)), picks=st.lists(PICK, max_size=3), split=st.integers(0, 3))
    def call(self, name: str, picks: list[int], split: int) -> None:
        known = name in self.state.functions
        refs = [self.alive()[p % len(self.alive())] for p in picks] if self.alive() else []
        args, nested = refs[:split], refs[split:]
        body = f"{name} {self.busy}".encode()
        self.busy += 1
        self.bodies[body] = refs
        self.done(ev.IncrementRefs(0, refs))
        self.messages.update(refs)
        results = self.tell(ev.RemoteCall(0, name, body, args, nested, max_retries=picks[0] % 3 if picks else None))
        if isinstance(results, ev.Failure):
            assert not known or results.code == ev.Code.DATA_LOSS
            self.drop(refs, self.messages)
            return
        assert len(results) == FUNCTIONS[name]
        self.owned.update(results)
        self.messages.update(results)
        self.notice_failed_calls()

    def unpack(self, run: Run) -> None:
        if not run.unpacked:
            run.unpacked = True
            self.drop(run.message, self.messages)

    @precondition(lambda self: self.runs)
    @rule(pick=PICK)
    def worker_unpacks(self, pick: int) -> None:
        run = self.runs[pick % len(self.runs)]
        if self.owned.keys() >= set(run.results):
            self.unpack(run)

    @precondition(lambda self: self.runs)
    @rule(pick=PICK, alias=st.booleans())
    def worker_ends(self, pick: int, alias: bool) -> None:
        run = self.runs.pop(pick % len(self.runs))
        args = [ref for ref in run.message if ref not in run.results]
        store = self.workers[run.worker]
        for ref in run.results:
            if alias and args and self.state.objects.refs.is_pending(ref) and not run.unpacked:
                self.done(ev.AliasObjRefs(0, ref, args[pick % len(args)]))
            elif self.state.objects.refs.is_alive(ref):
                self.tell(ev.ObjReady(0, ref, store, 100))
        self.unpack(run)
        self.done(ev.WorkerReady(0, run.worker))

    @precondition(lambda self: self.runs)
    @rule(pick=PICK)
    def worker_refuses(self, pick: int) -> None:
        run = self.runs[pick % len(self.runs)]
        if not run.unpacked:
            self.runs.remove(run)
            self.tell(ev.InvokeRefused(run.worker, run.task, "no"))
            self.done(ev.WorkerReady(0, run.worker))

    def lose(self, event: ev.Event, workers: set[int]) -> None:
        """Processes die. Those that had unpacked a call have dropped its counts; the next message has new ones."""
        for run in [run for run in self.runs if run.worker in workers]:
            self.unpack(run)  # what is lost before it is unpacked stays counted, see `SchedulerState`
            self.runs.remove(run)
        for worker in workers:
            del self.workers[worker]
        self.tell(event)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def worker_dies(self, pick: int) -> None:
        worker = sorted(self.workers)[pick % len(self.workers)]
        self.lose(ev.WorkerLost(worker), {worker})

    @precondition(lambda self: self.stores)
    @rule(pick=PICK)
    def store_dies(self, pick: int) -> None:
        store = self.stores.pop(pick % len(self.stores))
        self.lose(ev.ObjStoreLost(store), {w for w, s in self.workers.items() if s == store})
        self.on_the_way = [d for d in self.on_the_way if store not in (d.source, d.target)]

    @precondition(lambda self: self.on_the_way)
    @rule(pick=PICK, fails=st.booleans())
    def delivery_ends(self, pick: int, fails: bool) -> None:
        delivery = self.on_the_way.pop(pick % len(self.on_the_way))
        if fails:
            self.tell(ev.DeliveryFailed(delivery.ref, delivery.source, delivery.target, "broken"))
        else:
            self.done(ev.ObjReady(0, delivery.ref, delivery.target, 0))

    @precondition(lambda self: self.workers and self.alive())
    @rule(pick=PICK, other=PICK)
    def request(self, pick: int, other: int) -> None:
        worker = sorted(self.workers)[pick % len(self.workers)]
        value = self.tell(ev.RequestObj(0, worker, self.alive()[other % len(self.alive())]))
        assert not isinstance(value, ev.Failure) or value.code == ev.Code.DATA_LOSS

    @precondition(lambda self: self.alive())
    @rule(picks=st.lists(PICK, max_size=4), keep=st.booleans())
    def count(self, picks: list[int], keep: bool) -> None:
        refs = [self.alive()[p % len(self.alive())] for p in picks]
        if keep:
            self.owned.update(refs)
            self.done(ev.IncrementRefs(0, refs))
        else:
            refs = list((Counter(refs) & self.owned).elements())
            self.drop(refs, self.owned)

    @precondition(lambda self: self.alive())
    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=3))
    def contain(self, pick: int, picks: list[int]) -> None:
        outer = self.alive()[pick % len(self.alive())]
        refs = [r for r in (self.alive()[p % len(self.alive())] for p in picks) if r < outer]  # no rings of containers
        same = set(self.state.objects.refs.members(outer))
        refs = [] if same & set(refs) or any(self.state.objects.refs.end(r) >= min(same) for r in refs) else refs
        if refs and outer not in self.inside and not self.state.objects.refs.is_pending(outer) and len(same) == 1:
            self.done(ev.IncrementRefs(0, refs))
            self.done(ev.AddContained(0, outer, refs))
            self.inside[outer] = refs

    @rule(ref=st.integers(0, 60))
    def nonsense_changes_nothing(self, ref: int) -> None:
        for event in (
            ev.IncrementRefs(0, [ref, 1 << 40]),
            ev.DecrementRefs(0, [1 << 40]),
            ev.AliasObjRefs(0, ref, ref),
            ev.RequestObj(0, 1 << 20, ref),
            ev.ObjReady(0, ref, 1 << 20),
            ev.WorkerReady(0, 1 << 20),
            ev.RemoteCall(0, "nobody's", b""),
        ):
            before = self.tell(ev.SchedulerInfo(0))
            assert isinstance(self.tell(event), ev.Failure)
            assert self.tell(ev.SchedulerInfo(0)) == before

    @rule()
    def save_and_load(self) -> None:
        saved = dump(self.state)
        self.state = load(self.state.settings, saved)
        assert dump(self.state) == saved

    # ---- what must hold ----

    def notice_failed_calls(self) -> None:
        """A call that was given up unsent has dropped its message's counts; one in flight elsewhere has new ones."""
        self.messages = Counter()
        for task in self.state.tasks.values():
            if task.worker is None and not task.sent:
                self.messages.update([*task.args, *task.nested, *task.results()])
        for run in self.runs:
            if not run.unpacked:
                self.messages.update(run.message)

    @invariant()
    def nothing_owned_is_deallocated(self) -> None:
        self.state.check_invariants()
        refs = self.state.objects.refs
        self.notice_failed_calls()
        for outer in [outer for outer in self.inside if not refs.is_alive(outer)]:
            del self.inside[outer]
        expected = self.owned + self.messages
        for inner in self.inside.values():
            expected.update(inner)
        for ref in range(len(refs)):
            if refs.is_alive(ref):
                assert refs.count(ref) == expected[ref], f"{ref}"
            else:
                assert not expected[ref], f"{ref} is deallocated and counted {expected[ref]}"
        assert refs.dangling == 0

    def teardown(self) -> None:
        """Everything ends; then nothing is left."""
        self.nothing_owned_is_deallocated()
        if not self.stores:
            self.store()
        self.made += 1
        address = self.state.stores[self.stores[0]]
        last = self.done(ev.RegisterWorker(0, "the last", address))
        self.workers[last] = self.stores[0]
        for name, count in FUNCTIONS.items():
            self.done(ev.RegisterFunction(0, last, name, count))
        while self.on_the_way or self.runs or self.pushed:
            if self.on_the_way:
                self.delivery_ends(0, False)
            elif self.pushed:
                ref, _ = self.pushed.pop()
                self.tell(ev.ObjReady(0, ref, self.stores[0]))
            else:
                self.worker_ends(0, False)
        assert self.state.task_count() == 0
        for ref in self.alive():
            if self.state.objects.refs.is_pending(ref):
                self.tell(ev.ObjReady(0, ref, self.stores[0]))  # its maker ended without; it may still come
        self.drop(list(self.owned.elements()), self.owned)
        self.nothing_owned_is_deallocated()
        objects = self.state.objects
        assert objects.refs.alive == 0
        left = (list(objects.live()), objects.further, objects.incoming, objects.lost, objects.pushes, objects.sending)
        assert not any(map(len, left)), left
        assert not any(map(len, (objects.requests, objects._tasks, objects.notified, self.state.backlog)))


TestScheduler = pytest.mark.timeout(300)(SchedulerMachine.TestCase)  # a failure takes its time to be made small
TestScheduler.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
