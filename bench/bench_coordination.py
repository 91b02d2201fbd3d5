"""The coordination service: its decisions alone, the cost of a commit, and calls over gRPC by fastrt's own agent.

With jaxlib's clients, and beside jaxlib's own service: `bench/compare_coordination.py`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from fastrt.coordination import Agent, Coordinator, CoordinatorOptions, Front, connect
from fastrt.coordination import events as ev
from fastrt.coordination.state import CoordinationState, Settings
from fastrt.coordination.status import Member
from fastrt.durable import Journal

NUMBERS = count()
TASKS = 32


@pytest.fixture(params=["ephemeral", "durable", "front"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    """An agent of a service that keeps nothing, keeps its state in process, or keeps it behind a front."""
    options = CoordinatorOptions(state_dir=None if request.param == "ephemeral" else tmp_path)
    service = Front(options) if request.param == "front" else Coordinator(options)
    with service, connect(service.address) as agent:
        yield agent


@pytest.mark.benchmark(group="coordination, state machine alone")
def test_insert_key(measure) -> None:
    state = CoordinationState(Settings(roles={"job": 1}))
    measure(lambda: state.handle(ev.InsertKey(1, f"dir/{next(NUMBERS)}", b"v", False), 0.0))


@pytest.mark.benchmark(group="coordination, state machine alone")
def test_list_directory_of_100_among_100_000(measure) -> None:
    state = CoordinationState(Settings(roles={"job": 1}))
    for n in range(100_000):
        state.handle(ev.InsertKey(n, f"dir{n % 1000}/{n}", b"v", False), 0.0)
    assert len(measure(lambda: state.handle(ev.ListKeys(1, "dir7"), 0.0))[0].value) == 100


@pytest.mark.benchmark(group="coordination, state machine alone")
def test_barrier_of_32(measure) -> None:
    state = CoordinationState(Settings(roles={"job": TASKS}))
    members = [Member("job", rank) for rank in range(TASKS)]
    for member in members:
        state.handle(ev.Register(member.rank, member, 1), 0.0)

    def meet() -> None:
        name = f"b{next(NUMBERS)}"
        for member in members:
            state.handle(ev.EnterBarrier(member.rank, name, 0, 60.0, member), 0.0)

    measure(meet, per=TASKS)


@pytest.mark.benchmark(group="coordination, commit")
@pytest.mark.parametrize("records", [1, 100])
def test_commit(measure, tmp_path: Path, records: int) -> None:
    journal = Journal(tmp_path)

    def commit() -> None:
        journal.write({("key", f"dir/{next(NUMBERS)}"): b"v" * 100 for _ in range(records)})

    measure(commit, per=records)
    journal.close()


@pytest.mark.benchmark(group="coordination, one agent")
def test_set(measure, agent: Agent) -> None:
    measure(lambda: agent.set(f"dir/{next(NUMBERS)}", b"v"))


@pytest.mark.benchmark(group="coordination, one agent")
def test_get(measure, agent: Agent) -> None:
    agent.set("k", b"v")
    assert measure(lambda: agent.get("k")) == b"v"


@pytest.mark.benchmark(group="coordination, one agent")
def test_get_directory_of_1000(measure, agent: Agent) -> None:
    for n in range(1000):
        agent.set(f"d/{n}", b"v" * 100)
    assert len(measure(lambda: agent.get_dir("d"), per=1000)) == 1000


@pytest.mark.benchmark(group="coordination, 32 agents")
def test_barrier_of_agents(measure) -> None:
    with Coordinator(CoordinatorOptions(num_tasks=TASKS)) as service, ThreadPoolExecutor(TASKS) as pool:
        agents = list(pool.map(lambda rank: connect(service.address, rank), range(TASKS)))
        measure(lambda: list(pool.map(lambda agent: agent.barrier("b"), agents)))
        list(pool.map(Agent.close, agents))
