"""Tasks through the public API: round trips, throughput, chains, wait. Each runs in a worker process."""

import time

import numpy as np
import pytest

import fastrt

BATCH = 1000
CHAIN = 100
IDLE_S = 0.010


@fastrt.remote
def add_one(x: int) -> int:
    return x + 1


@fastrt.remote
def ends_of(array: np.ndarray) -> float:
    return float(array[0]) + float(array[-1])


@fastrt.remote(num_returns=4)
def four(x: int) -> tuple[int, ...]:
    return x, x, x, x


def fan_out(count: int) -> list[int]:
    return fastrt.get([add_one.remote(k) for k in range(count)])


@pytest.mark.benchmark(group="task round trip")
def test_one(measure, rt: fastrt.Runtime) -> None:
    assert measure(lambda: fastrt.get(add_one.remote(1))) == 2


@pytest.mark.benchmark(group="task round trip")
def test_one_with_keyword(measure, rt: fastrt.Runtime) -> None:
    assert measure(lambda: fastrt.get(add_one.remote(x=1))) == 2


@pytest.mark.benchmark(group="task round trip")
def test_one_of_four_results(measure, rt: fastrt.Runtime) -> None:
    assert measure(lambda: fastrt.get(four.remote(1))) == [1, 1, 1, 1]


@pytest.mark.benchmark(group="task round trip")
def test_one_after_10_ms_idle(benchmark, rt: fastrt.Runtime) -> None:
    """All processes sleep first: the time includes the driver's wake of a worker and the worker's of the driver."""
    run = lambda: fastrt.get(add_one.remote(1))  # noqa: E731  (pedantic takes a callable)
    assert benchmark.pedantic(run, setup=lambda: time.sleep(IDLE_S), rounds=200) == 2


@pytest.mark.benchmark(group="task round trip")
@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, 16 << 20], ids=["64 KiB", "1 MiB", "16 MiB"])
def test_array_argument(measure, rt: fastrt.Runtime, nbytes: int) -> None:
    array = np.ones(nbytes // 8)
    assert measure(lambda: fastrt.get(ends_of.remote(array)), nbytes=nbytes) == 2.0


@pytest.mark.benchmark(group="task throughput")
@pytest.mark.parametrize("count", [BATCH, 100 * BATCH])
def test_in_flight(measure, rt: fastrt.Runtime, count: int) -> None:
    assert measure(fan_out, count, per=count) == list(range(1, count + 1))


@pytest.mark.benchmark(group="dependency chain")
def test_chain_100(measure, rt: fastrt.Runtime) -> None:
    def chain() -> int:
        ref = add_one.remote(0)
        for _ in range(CHAIN - 1):
            ref = add_one.remote(ref)
        return fastrt.get(ref)

    assert measure(chain, per=CHAIN) == CHAIN


@pytest.mark.benchmark(group="wait")
@pytest.mark.parametrize("count", [1000, 8000])
def test_wait_one_by_one(measure, rt: fastrt.Runtime, count: int) -> None:
    def wait_each() -> int:
        refs = [add_one.remote(k) for k in range(count)]
        rounds = 0
        while refs:
            _, refs = fastrt.wait(refs)
            rounds += 1
        return rounds

    assert measure(wait_each, per=count) == count


@pytest.mark.benchmark(group="wait")
@pytest.mark.parametrize("count", [1000, 8000])
def test_as_completed(measure, rt: fastrt.Runtime, count: int) -> None:
    def take_each() -> int:
        return sum(1 for _ in fastrt.as_completed([add_one.remote(k) for k in range(count)]))

    assert measure(take_each, per=count) == count


@pytest.mark.benchmark(group="wait")
def test_wait_all_1000(measure, rt: fastrt.Runtime) -> None:
    def wait_all() -> int:
        refs = [add_one.remote(k) for k in range(BATCH)]
        return len(fastrt.wait(refs, num_returns=BATCH)[0])

    assert measure(wait_all, per=BATCH) == BATCH
