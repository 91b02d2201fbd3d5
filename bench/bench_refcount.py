"""References: taken, dropped, and contained in values; and the scheduler's table of counts."""

from typing import Any

import numpy as np
import psutil
import pytest

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt._core.refcounts.refcount import RefTable

KIND = 16
LIVE = 10_000_000
ORDERS = ["dense", "random"]


@pytest.mark.benchmark(group="reference counts")
def test_acquire_release_held(measure, core: Client) -> None:
    """A further reference of a process that holds the object already: only its private count changes."""
    ref = handles.put_scalar(core, 1)
    measure(handles.acquire, core, ref.objref, ref.index)


@pytest.mark.benchmark(group="reference counts")
def test_first_hold_and_delete(measure, core: Client) -> None:
    """An object's first reference and its last: the holder bit is set, cleared, and the object deleted."""
    measure(handles.put_scalar, core, 1)


@pytest.mark.benchmark(group="reference counts")
@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_contain_release(measure, core: Client, count: int) -> None:
    """A value that contains `count` references: each is counted at the seal and uncounted at the end."""
    refs = [handles.put_scalar(core, k) for k in range(count)]

    def contain() -> None:
        handles.create(core, 8, KIND, count).seal(refs)

    measure(contain, per=count)


@pytest.mark.benchmark(group="reference counts")
@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_read_contained(measure, core: Client, count: int) -> None:
    """References to all that a value contains, taken and dropped."""
    refs = [handles.put_scalar(core, k) for k in range(count)]
    outer = handles.create(core, 8, KIND, count).seal(refs)
    measure(handles.contained, core, outer, per=count)


@pytest.fixture(scope="module")
def table() -> tuple[RefTable, float]:
    """A table of 10^7 live references, and the memory of each in bytes."""
    process = psutil.Process()
    before = process.memory_info().rss
    made = RefTable()
    for _ in range(100):  # in order of creation: the table grows meanwhile
        made.add(LIVE // 100)
    return made, (process.memory_info().rss - before) / LIVE


def batch(order: str, count: int) -> np.ndarray[Any, Any]:
    refs = np.arange(LIVE, dtype=np.uint64)
    return (np.random.default_rng(1).permutation(refs) if order == "random" else refs)[:count].copy()


@pytest.mark.benchmark(group="scheduler's counts, 10^7 live references")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 1000, LIVE])
def test_increment(measure, benchmark, table: tuple[RefTable, float], order: str, count: int) -> None:
    """A batch from a NumPy array."""
    benchmark.extra_info["bytes per reference"] = round(table[1], 1)
    measure(table[0].increment, batch(order, count), per=count)


@pytest.mark.benchmark(group="scheduler's counts, 10^7 live references")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 1000, LIVE])
def test_increment_and_decrement(measure, table: tuple[RefTable, float], order: str, count: int) -> None:
    """A batch from a NumPy array, up and down again."""
    refs = batch(order, count)

    def both() -> None:
        table[0].increment(refs)
        table[0].decrement(refs)

    measure(both, per=count)


@pytest.mark.benchmark(group="scheduler's counts, deallocation")
@pytest.mark.parametrize("shape", ["apart", "one in the other"])
def test_drop_a_million(benchmark, shape: str) -> None:
    """Their last counts dropped: one batch of a million objects, or one container around all others in a chain."""
    million = 1_000_000
    refs = np.arange(million, dtype=np.uint64)

    def fresh() -> tuple[tuple[RefTable, Any], dict[str, Any]]:
        made = RefTable()
        made.add(million, 1, False)
        if shape != "apart":
            for ref in range(million - 1):
                made.contain(ref, refs[ref + 1 : ref + 2])
        return (made, refs if shape == "apart" else refs[:1]), {}

    def drop(made: RefTable, dropped: Any) -> None:
        assert len(made.decrement(dropped)) == million

    benchmark.extra_info.update({"per": million, "bytes": 0})
    benchmark.pedantic(drop, setup=fresh, rounds=5)
