"""Generators through the public API: items of scalars and of arrays, with and without a limit, of tasks and actors."""

from typing import Any

import numpy as np
import pytest

import fastrt

ITEMS = 1000
ARRAY_BYTES = 1 << 20


@fastrt.remote
def count(n: int) -> Any:
    yield from range(n)


@fastrt.remote
def arrays(n: int) -> Any:
    array = np.zeros(ARRAY_BYTES // 8)
    for _ in range(n):
        yield array


@fastrt.remote
class Counter:
    def count(self, n: int) -> Any:
        yield from range(n)


@fastrt.remote
class AsyncCounter:
    async def count(self, n: int) -> Any:
        for k in range(n):
            yield k


def read(generator: Any) -> int:
    return sum(fastrt.get(ref) for ref in generator)


@pytest.mark.benchmark(group="generator, an item")
@pytest.mark.parametrize("limit", [None, 100, 1])
def test_items(measure, rt: fastrt.Runtime, limit: int | None) -> None:
    counted = count.options(generator_backpressure=limit)
    assert measure(lambda: read(counted.remote(ITEMS)), per=ITEMS) == sum(range(ITEMS))


@pytest.mark.benchmark(group="generator, an item")
@pytest.mark.parametrize("kind", [Counter, AsyncCounter], ids=["actor", "coroutines"])
def test_items_of_an_actor(measure, rt: fastrt.Runtime, kind: Any) -> None:
    actor = kind.remote()
    assert measure(lambda: read(actor.count.remote(ITEMS)), per=ITEMS) == sum(range(ITEMS))
    fastrt.kill(actor)


@pytest.mark.benchmark(group="generator, begin and end")
def test_empty_stream(measure, rt: fastrt.Runtime) -> None:
    assert measure(lambda: read(count.remote(0))) == 0


@pytest.mark.benchmark(group="generator, an array of 1 MiB")
def test_arrays(measure, rt: fastrt.Runtime) -> None:
    limited = arrays.options(generator_backpressure=8)
    found = measure(lambda: sum(len(fastrt.get(ref)) for ref in limited.remote(20)), per=20, nbytes=20 * ARRAY_BYTES)
    assert found == 20 * ARRAY_BYTES // 8
