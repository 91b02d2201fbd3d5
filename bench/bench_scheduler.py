"""The scheduler without any wire: the ranking of nodes alone, the whole state machine, and a node's own placement.

`python bench/bench_scheduler.py [TASKS [NODES...]]` plays a million tasks on 10 to 1,000 nodes and prints their
cost in processor time: the simulation is one thread, and other load on the machine does not count. As a
pytest-benchmark suite the same runs are shorter, in wall time.

A decision is where a task runs: one for each task. Three counts are printed, each stricter than the one before:

- events: calls of `handle` a second, for events of any effect;
- ranking: decisions alone, a task placed by its demands and its bytes, and another one ended;
- lives: decisions with all that belongs to them. A life is one task with all of its events: its arguments counted, the
  call (which places it), the worker's acknowledgement, its message unpacked, the deliveries of arguments that were
  elsewhere, its result, the worker's end, and one older result dropped and deallocated. Timed is all of `handle`;
  making the events, which is the shell's part, is not.

`cluster` is what a node's daemon does for a task that asks for resources when other nodes have them: the task waits, an
order names its node, and the daemon learns that the task is there and that it has ended.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fastrt.config import RESOURCE_PARTS
from fastrt.node.keys import TaskKey
from fastrt.node.placing import ELSEWHERE, GONE, Placing
from fastrt.scheduler import events as ev
from fastrt.scheduler.policy import Demand, Placement, shape_of
from fastrt.scheduler.state import SchedulerState
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import CPU
from fastrt.tasks.resources import Demand as ClusterDemand

NODES = (10, 30, 100, 300, 1000)
CPUS = 8
TASKS = 1_000_000
SHAPES = [shape_of({"num_cpus": 1}), shape_of({"num_cpus": 2})]
# This share of the cluster's room is in use: some nodes are full, and tasks cannot run beside their arguments.
BUSY = 0.9
# With a backlog: calls beyond the cluster's room, as a factor.
OVERBOOKED = 1.5
SLICE = 2_000
# Events handed over at a time: as many as wait for a busy shell.
BATCH = 32
# Results that the client keeps, for each node: tasks take them as arguments.
KEPT = 20
WORKER_SLOTS = range(CPUS)


class Cost(NamedTuple):
    """The figures of one simulation.

    Attributes:
        us: microseconds of processor time for each task.
        local: share of tasks that went to a node that has the most bytes.
        events: for each task.
    """

    us: float
    local: float
    events: float = 0.0


def demands(count: int, nodes: int, rng: random.Random) -> list[Demand]:
    """Tasks with up to three arguments, each with its bytes at one or two nodes."""
    made = []
    for _ in range(count):
        sites = {rng.randrange(nodes): rng.randrange(1, 1 << 20) for _ in range(rng.randrange(4))}
        made.append(Demand(rng.choice(SHAPES), tuple(sites.items())))
    return made


def simulate_ranking(nodes: int, tasks: int, seed: int = 1) -> Cost:
    """Place tasks, and end others at random so that the cluster stays as busy; all of that is timed."""
    rng = random.Random(seed)
    placement = Placement()
    for node in range(nodes):
        placement.add(node, {"num_cpus": CPUS})
    running: list[tuple[object, Demand]] = []
    room, used, local, spent = int(nodes * CPUS * BUSY), 0.0, 0, 0.0
    for done in range(0, tasks, SLICE):
        wanted = demands(min(SLICE, tasks - done), nodes, rng)
        picks = [rng.random() for _ in range(4 * SLICE)]
        chosen_nodes = []
        begun = time.thread_time()
        for demand in wanted:
            chosen = placement.place(demand) if used < room else None
            while chosen is None:
                at = int(picks.pop() * len(running))
                node, ended = running[at]
                running[at] = running[-1]
                running.pop()
                placement.release(node, ended.shape)
                used -= ended.shape[0][1]
                if used < room:
                    chosen = placement.place(demand)
            used += demand.shape[0][1]
            running.append((chosen, demand))
            chosen_nodes.append(chosen)
        spent += time.thread_time() - begun
        for chosen, demand in zip(chosen_nodes, wanted, strict=True):
            local += bool(demand.locality) and chosen == max(demand.locality, key=lambda place: place[1])[0]
    placement.check_invariants()
    return Cost(spent / tasks * 1e6, local / tasks)


def simulate_placing(nodes: int, tasks: int) -> Cost:
    """Place tasks by one node's daemon, all of which wait from the beginning; a tenth of those placed end at a time."""
    total = {CPU: CPUS * RESOURCE_PARTS, "gpu": 2 * RESOURCE_PARTS}
    placing = Placing("me", {}, can_grow=True)
    placing.has_uplink = True
    placing.see([NodeRow(f"node-{k}", f"name-{k}", total, total, {}) for k in range(nodes)])
    demand = ClusterDemand(((CPU, RESOURCE_PARTS), ("gpu", RESOURCE_PARTS)), "", "", False)
    running: deque[TaskKey] = deque()
    ended, now, begun = 0, 0.0, time.thread_time()
    for k in range(tasks):
        placing.wait(TaskKey(k, k), demand, now)
    while ended < tasks:
        running.extend(order.key for order in placing.decide(now))
        for _ in range(max(1, len(running) // 10)):
            task = running.popleft()
            placing.moved(task, ELSEWHERE, now)
            placing.moved(task, GONE, now)
            ended += 1
        now += 0.001
    return Cost((time.thread_time() - begun) / tasks * 1e6, 0.0)


class Cluster:
    """A state machine with nodes of `CPUS` workers each, and a client, workers and stores without faults.

    Args:
        nodes: how many.
        rng: makes every random choice.
        load: calls under way as a share of the workers; beyond 1 calls wait.
    """

    def __init__(self, nodes: int, rng: random.Random, load: float = BUSY) -> None:
        self.state, self.rng, self.nodes = SchedulerState(), rng, nodes
        self.room = int(nodes * CPUS * load)
        self.under_way = 0
        self.running: list[ev.InvokeCall] = []
        self.args: dict[int, list[int]] = {}  # of the calls under way, by result
        self.spent = 0.0
        self.events = 0
        self.local = 0
        for node in range(nodes):
            self.state.handle(ev.RegisterObjStore(0, f"store{node}"))
            for slot in WORKER_SLOTS:
                self.state.handle(ev.RegisterWorker(0, f"worker{node}.{slot}", f"store{node}"))
                self.state.handle(ev.RegisterFunction(0, node * CPUS + slot, "f", 1))
        self.kept = []
        for k in range(KEPT * nodes):
            ref = self.state.handle(ev.PushObj(0, k % nodes * CPUS))[0].value
            self.state.handle(ev.ObjReady(0, ref, k % nodes, rng.randrange(1, 1 << 20)))
            self.kept.append(ref)

    def tell(self, events: list[ev.Event]) -> list[list[ev.Effect]]:
        """Hand events to the state, which is timed, and return the effects of each."""
        handle = self.state.handle
        begun = time.thread_time()
        answers = [handle(event) for event in events]
        self.spent += time.thread_time() - begun
        self.events += len(events)
        return answers

    def play(self, count: int) -> None:
        """Submit calls with up to three arguments, and end as many others once all are busy."""
        rng = self.rng
        while count:
            turn = min(count, max(1, self.room // 4), BATCH)
            while self.under_way + turn > self.room:
                self.end(min(turn, len(self.running)))
            calls = [rng.sample(self.kept, rng.randrange(4)) for _ in range(turn)]
            events: list[ev.Event] = []
            for args in calls:
                events += (ev.IncrementRefs(0, args), ev.RemoteCall(0, "f", b"", args))
            answers = self.tell(events)
            for args, effects in zip(calls, answers[1::2], strict=True):
                self.args[effects[0].value[0]] = args
            self.under_way += turn
            self.take_up(answers)
            count -= turn

    def take_up(self, answers: list[list[ev.Effect]]) -> None:
        """Workers accept and unpack the calls assigned to them; stores make the ordered deliveries."""
        events: list[ev.Event] = []
        for effects in answers:
            for effect in effects:
                if isinstance(effect, ev.InvokeCall):
                    self.running.append(effect)
                    (result,) = effect.results
                    args = self.args.pop(result)
                    events += (ev.InvokeTaken(effect.worker, effect.task), ev.DecrementRefs(0, (*args, result)))
                elif isinstance(effect, ev.DeliverObj):
                    events.append(ev.ObjReady(0, effect.ref, effect.target, 0))
                else:
                    assert not isinstance(effect, ev.Answer) or not isinstance(effect.value, ev.Failure), effect
        self.tell(events)

    def end(self, count: int) -> None:
        """Calls end: each result takes the place of another one, which is dropped."""
        rng = self.rng
        events: list[ev.Event] = []
        for _ in range(count):
            at = rng.randrange(len(self.running))
            run = self.running[at]
            self.running[at] = self.running[-1]
            self.running.pop()
            (result,) = run.results
            events.append(ev.ObjReady(0, result, run.worker // CPUS, rng.randrange(1, 1 << 20)))
            events.append(ev.WorkerReady(0, run.worker))
            at = rng.randrange(len(self.kept))
            events.append(ev.DecrementRefs(0, (self.kept[at],)))
            self.kept[at] = result
        self.under_way -= count
        self.take_up(self.tell(events))


def simulate_state(nodes: int, tasks: int, load: float, seed: int = 1) -> Cost:
    """Play tasks; returns the cost of one with all of its events."""
    cluster = Cluster(nodes, random.Random(seed), load)
    cluster.play(cluster.room)
    cluster.spent, cluster.events = 0.0, 0
    cluster.play(tasks)
    cost = Cost(cluster.spent / tasks * 1e6, math.nan, cluster.events / tasks)
    while cluster.running:
        cluster.end(len(cluster.running))
    cluster.state.check_invariants()
    return cost


@pytest.fixture(params=[10, 100, 1000])
def nodes(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many nodes the cluster has."""
    return request.param


@pytest.mark.benchmark(group="scheduler, ranking alone")
def test_rank_and_release(measure, nodes: int) -> None:
    """A task with bytes on up to three nodes is placed, another one ends."""
    rng = random.Random(1)
    placement = Placement()
    for node in range(nodes):
        placement.add(node, {"num_cpus": CPUS})
    wanted = demands(1000, nodes, rng)
    running: list[tuple[object, Demand]] = []

    def thousand() -> None:
        for demand in wanted:
            if len(running) >= nodes * CPUS * BUSY / 2:
                node, ended = running.pop(rng.randrange(len(running)))
                placement.release(node, ended.shape)
            chosen = placement.place(demand)
            if chosen is not None:
                running.append((chosen, demand))

    measure(thousand, per=len(wanted))


@pytest.mark.benchmark(group="scheduler, cluster")
def test_placing(measure, nodes: int) -> None:
    """A thousand tasks with demands are placed on other nodes by a daemon, and end."""
    measure(lambda: simulate_placing(nodes, 1000), per=1000)


@pytest.mark.benchmark(group="scheduler, state machine")
def test_life_of_a_task(measure, nodes: int) -> None:
    """A call is submitted, placed, run, its result made and dropped, and the events for all that are made."""
    cluster = Cluster(nodes, random.Random(1))
    cluster.play(cluster.room)

    def thousand() -> None:
        cluster.play(1000)

    measure(thousand, per=1000)


def main() -> None:
    """Print the cost of a decision, a life and an event by number of nodes."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else TASKS
    print(f"{tasks:,} tasks each, a second of processor time; costs grow no faster than log n: no growth exceeds 1")
    print(f"        ranking alone             |{' lives':38}| lives, of which a third waits   | cluster")
    print(
        "nodes   decisions  local   growth |   lives    events  a life   growth  |   lives    events   growth  | "
        "decisions  growth"
    )
    first: list[float] = []
    counts = [int(word) for word in sys.argv[2:]] or NODES
    for nodes in counts:
        ranking = simulate_ranking(nodes, tasks)
        state = simulate_state(nodes, tasks, BUSY)
        queued = simulate_state(nodes, tasks, OVERBOOKED)
        cluster = simulate_placing(nodes, tasks)
        costs = ranking, state, queued, cluster
        first = first or [cost.us for cost in costs]
        log = math.log2(nodes) / math.log2(counts[0])
        growth = [cost.us / begun / log for cost, begun in zip(costs, first, strict=True)]
        print(
            f"{nodes:5} {1e6 / ranking.us:11,.0f} {ranking.local:6.0%} {growth[0]:8.2f} | "
            f"{1e6 / state.us:7,.0f} {1e6 / state.us * state.events:9,.0f} {state.events:7.1f} {growth[1]:8.2f}  | "
            f"{1e6 / queued.us:7,.0f} {1e6 / queued.us * queued.events:9,.0f} {growth[2]:8.2f}  | "
            f"{1e6 / cluster.us:9,.0f} {growth[3]:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
