"""Actors through the public API: round trips, throughput, coroutines, threads, and the time until a new one runs."""

from collections.abc import Iterator
from typing import Any

import pytest

import fastrt

BATCH = 1000


@fastrt.remote
class Adder:
    def add(self, x: int) -> int:
        return x + 1


@fastrt.remote
class AsyncAdder:
    async def add(self, x: int) -> int:
        return x + 1


KINDS = {"in order": Adder, "coroutines": AsyncAdder, "4 threads": Adder.options(max_concurrency=4)}


@pytest.fixture(params=list(KINDS))
def actor(request: pytest.FixtureRequest, rt: fastrt.Runtime) -> Iterator[Any]:
    """One actor of each kind, running."""
    made = KINDS[request.param].remote()
    fastrt.get(made.add.remote(1))
    yield made
    fastrt.kill(made)


@pytest.mark.benchmark(group="actor round trip")
def test_one(measure, actor: Any) -> None:
    assert measure(lambda: fastrt.get(actor.add.remote(1))) == 2


@pytest.mark.benchmark(group="actor calls in flight")
def test_many(measure, actor: Any) -> None:
    values = measure(lambda: fastrt.get([actor.add.remote(k) for k in range(BATCH)]), per=BATCH)
    assert values == list(range(1, BATCH + 1))


@pytest.mark.benchmark(group="actor start")
def test_start_and_first_call(measure, rt: fastrt.Runtime) -> None:
    assert measure(lambda: fastrt.get(Adder.remote().add.remote(1))) == 2
