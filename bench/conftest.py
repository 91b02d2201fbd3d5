"""Fixtures of the suites: a core without a daemon, a running session, and `measure`, which warms up before it times."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fastrt
from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
from fastrt._core.memory.segment import Segment

STORE_BYTES = 1 << 30
WORKERS = 2
WARM_S = 0.05
# A round lasts at least this long: the clock's own 50 ns then do not matter. A quick operation is called several
# times in a round, and the round's time is their mean.
ROUND_S = 20e-6
ROW_S = 0.5

Measure = Callable[..., Any]


def pytest_configure(config: pytest.Config) -> None:
    """Set how long each row is measured, unless the command line says so."""
    if float(config.option.benchmark_max_time) == 1.0:  # pytest-benchmark's default
        config.option.benchmark_max_time = ROW_S
    if float(config.option.benchmark_min_time) == 0.000005:
        config.option.benchmark_min_time = ROUND_S


@pytest.fixture
def measure(benchmark: Any) -> Measure:
    """Time `function(*args)`, warm; `per` operations and `nbytes` bytes a call. Returns what the last call returned.

    Without the warm-up the first calls, on fresh memory, would decide how many calls make a round.
    """

    def run(function: Callable[..., Any], *args: Any, per: int = 1, nbytes: int = 0) -> Any:
        until = time.perf_counter() + WARM_S
        function(*args)
        while time.perf_counter() < until:
            function(*args)
        benchmark.extra_info.update({"per": per, "bytes": nbytes})
        return benchmark(function, *args)

    return run


@pytest.fixture(scope="module")
def core() -> Iterator[Client]:
    """A client of a segment of its own, without a daemon: the core alone."""
    segment = Segment.create(STORE_BYTES)
    try:
        index, gen = admit(segment, os.getpid(), KIND_DRIVER, "bench")
        client = Client(segment, index, gen)
        client.adopt_job(client.job)
        yield client
        client.close()
    finally:
        segment.unlink()


@pytest.fixture(scope="module")
def rt() -> Iterator[fastrt.Runtime]:
    """A running session with two workers."""
    with fastrt.init(num_workers=WORKERS, object_store_memory=STORE_BYTES) as runtime:
        yield runtime


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Add p50 and p99 of the rounds, in seconds, and leave the raw times out: they are a hundred times the rest."""
    times = {bench.fullname: bench.stats.sorted_data for bench in benchmarks if bench}
    for entry in output_json["benchmarks"]:
        ranked = times[entry["fullname"]]
        entry["stats"]["p50"] = ranked[len(ranked) // 2]
        entry["stats"]["p99"] = ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
        entry["stats"].pop("data", None)
