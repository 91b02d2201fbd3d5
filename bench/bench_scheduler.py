"""The scheduler without any wire: the ranking of nodes alone, and the whole state machine, in simulation.

`python bench/bench_scheduler.py` plays a million tasks on 1,000 nodes, and prints what a decision costs from 10 to
1,000 nodes, in processor time: the simulation is one thread, and what else runs on the machine is not its cost. As a
pytest-benchmark suite the same runs are shorter, in wall time.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fastrt.scheduler import events as ev
from fastrt.scheduler.policy import Demand, Placement, shape_of
from fastrt.scheduler.state import SchedulerState

NODES = (10, 30, 100, 300, 1000)
CPUS = 8
TASKS = 1_000_000
SHAPES = [shape_of({"num_cpus": 1}), shape_of({"num_cpus": 2})]
# Of all room in the cluster this much is in use: some nodes are full, and tasks are turned away from their bytes.
BUSY = 0.9
SLICE = 2_000


class Cost(NamedTuple):
    """What was measured.

    Attributes:
        us: microseconds of processor time for each decision.
        local: share of decisions for a node that has the most bytes.
    """

    us: float
    local: float


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


class Cluster:
    """A state machine with nodes of `CPUS` workers each, objects on all of them, and calls under way."""

    def __init__(self, nodes: int, rng: random.Random) -> None:
        self.state, self.rng, self.nodes = SchedulerState(), rng, nodes
        self.room = int(nodes * CPUS * BUSY)
        self.running: list[tuple[int, int]] = []
        self.spent = 0.0
        self.events = 0
        for node in range(nodes):
            self.state.handle(ev.RegisterObjStore(0, f"store{node}"))
            for slot in range(CPUS):
                self.state.handle(ev.RegisterWorker(0, f"worker{node}.{slot}", f"store{node}"))
                self.state.handle(ev.RegisterFunction(0, node * CPUS + slot, "f", 1))
        self.objects = []
        for k in range(20 * nodes):
            ref = self.state.handle(ev.PushObj(0, k % nodes * CPUS))[0].value
            self.state.handle(ev.ObjReady(0, ref, k % nodes, rng.randrange(1, 1 << 20)))
            self.objects.append(ref)

    def call(self) -> None:
        """Submit a call with up to three arguments, deliver what it needs, and end another one if all are busy."""
        if len(self.running) >= self.room:
            self.end()
        args = self.rng.sample(self.objects, self.rng.randrange(4))
        begun = time.thread_time()
        effects = self.state.handle(ev.RemoteCall(0, "f", b"", args))
        self.spent += time.thread_time() - begun
        self.events += 1
        for effect in effects:
            if isinstance(effect, ev.InvokeCall):
                self.running.append((effect.worker, effect.results[0]))
            elif isinstance(effect, ev.DeliverObj):
                # Given up rather than delivered: else every object would soon be everywhere.
                for _ in range(4):
                    for again in self.state.handle(ev.DeliveryFailed(effect.ref, effect.source, effect.target, "")):
                        if isinstance(again, ev.DeliverObj):
                            effect = again

    def end(self) -> None:
        """A call ends: its result is there, is dropped by both who counted it, and the worker is free."""
        at = self.rng.randrange(len(self.running))
        worker, result = self.running[at]
        self.running[at] = self.running[-1]
        self.running.pop()
        for event in (
            ev.ObjReady(0, result, worker // CPUS, 100),
            ev.WorkerReady(0, worker),
            ev.DecrementRefs(0, (result, result)),
        ):
            self.state.handle(event)


def simulate_state(nodes: int, tasks: int, seed: int = 1) -> tuple[Cost, float]:
    """Play tasks; what the event RemoteCall costs, decision and bookkeeping, and a task's whole life."""
    cluster = Cluster(nodes, random.Random(seed))
    begun = time.thread_time()
    for _ in range(tasks):
        cluster.call()
    life_us = (time.thread_time() - begun) / tasks * 1e6
    while cluster.running:
        cluster.end()
    cluster.state.check_invariants()
    return Cost(cluster.spent / tasks * 1e6, math.nan), life_us


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


@pytest.mark.benchmark(group="scheduler, state machine")
def test_life_of_a_task(measure, nodes: int) -> None:
    """A call is submitted, placed, run, its result made and dropped: four events and more."""
    cluster = Cluster(nodes, random.Random(1))

    def thousand() -> None:
        for _ in range(1000):
            cluster.call()

    measure(thousand, per=1000)


def main() -> None:
    """Print what a decision costs by number of nodes."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else TASKS
    print(f"{tasks:,} tasks each; a decision grows no faster than log n while the last column does not exceed 1")
    print("nodes   ranking: us  a second  local   growth/log   state: us a call  a second  a life, us  growth/log")
    first: tuple[float, float] | None = None
    for nodes in NODES:
        ranking = simulate_ranking(nodes, tasks)
        state, life_us = simulate_state(nodes, tasks // 10)
        first = first or (ranking.us, state.us)
        log = math.log2(nodes) / math.log2(NODES[0])
        print(
            f"{nodes:5} {ranking.us:12.2f} {1e6 / ranking.us:9,.0f} {ranking.local:6.0%} "
            f"{ranking.us / first[0] / log:12.2f} {state.us:18.2f} {1e6 / state.us:9,.0f} {life_us:11.1f} "
            f"{state.us / first[1] / log:11.2f}"
        )


if __name__ == "__main__":
    main()
