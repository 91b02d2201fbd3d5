"""`fastrt.dask.get` computes graphs of Dask: arrays, bags, delayed calls, and graphs written by hand."""

import gc
import os
import signal
import weakref
from operator import add

import numpy as np
import pytest

import fastrt

dask = pytest.importorskip("dask", reason="the extra `dask` is not installed")

import fastrt.dask  # noqa: E402  (it needs dask)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def config(rt):
    with dask.config.set(scheduler=fastrt.dask.get):
        yield


def inc(x):
    return x + 1


def fail(x):
    raise KeyError(x)


def die_once(mark):
    if not os.path.exists(mark):
        with open(mark, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return 1


def test_graphs_written_by_hand(rt, tmp_path):
    graph = {
        "a": 1, "b": (inc, "a"), "c": (add, "a", "b"), "d": [(inc, "c"), "b"], "e": (sum, ["a", "b", "c"]), "f": "b",
        "unused": (fail, "a"), ("t", 0): (add, "e", (inc, (inc, "a"))), "n": None, "mark": str(tmp_path / "mark"),
        "survivor": (die_once, "mark"), "pid": (os.getpid,),
    }  # fmt: skip
    get = fastrt.dask.get
    assert get(graph, "c") == 3
    assert get(graph, ["c", ["b", "e"], "f", "a", "n"]) == (3, (2, 6), 2, 1, None)
    assert get(graph, "d") == [4, 2]
    assert get(graph, ("t", 0)) == 9
    assert get(graph, [("t", 0), "survivor"], num_workers=4) == (9, 1)
    assert get(graph, "pid") != os.getpid()
    assert get(graph, []) == ()
    with pytest.raises(KeyError, match="'z' is not a key"):
        get(graph, "z")
    with pytest.raises(KeyError) as caught:
        get({**graph, "g": (inc, "unused")}, ["c", "g"])
    assert type(caught.value) is KeyError
    assert "fail" in str(caught.value.__cause__)


class Bad(Exception):
    pass


def raise_bad(x):
    raise Bad(x)


def test_error_of_a_task_is_freed_with_its_last_name(rt):
    gc.disable()
    try:
        try:
            fastrt.dask.get({"a": 1, "b": (raise_bad, "a")}, "b")
        except Bad as exc:
            of_graph = weakref.ref(exc)
        with fastrt.util.Executor() as executor:
            try:
                next(executor.map(raise_bad, [1]))
            except Bad as exc:
                of_map = weakref.ref(exc)
        assert (of_graph(), of_map()) == (None, None)
    finally:
        gc.enable()


def test_long_chains_and_wide_graphs(rt):
    chain = {"c0": 0, **{f"c{k}": (inc, f"c{k - 1}") for k in range(1, 500)}}
    wide = {("x", k): (inc, k) for k in range(500)}
    assert fastrt.dask.get(chain, "c499") == 499
    assert fastrt.dask.get({**wide, "s": (sum, list(wide))}, "s") == sum(range(1, 501))


def test_callbacks_see_every_task(config):
    from dask.callbacks import Callback
    from dask.delayed import delayed

    seen = []
    with Callback(
        start=lambda graph: seen.append("start"),
        pretask=lambda key, graph, state: seen.append("pre"),
        posttask=lambda key, value, graph, state, worker: seen.append(value),
        finish=lambda graph, state, failed: seen.append(failed),
    ):
        assert delayed(inc)(delayed(inc)(1)).compute(optimize_graph=False) == 3
        assert seen == ["start", "pre", "pre", 2, 3, False]
        with pytest.raises(KeyError):
            delayed(fail)(1).compute()
    assert seen[-1] is True


def test_delayed_shares_intermediate_results_in_the_store(config, tmp_path):
    from dask.delayed import delayed

    @delayed
    def once(mark):
        with open(mark, "x"):  # a second run would fail
            return np.ones(200_000)

    base = once(tmp_path / "mark")
    total = delayed(sum)([delayed(np.sum)(base * k) for k in range(5)])
    assert total.compute() == 200_000 * 10
    assert delayed(pow)(2, delayed(3)).compute() == 8


def test_arrays(config):
    array = pytest.importorskip("dask.array", reason="dask[array] is not installed")
    data = np.arange(160_000.0).reshape(400, 400)
    lazy = array.from_array(data, chunks=100)
    assert np.array_equal((lazy + lazy.T).compute(), data + data.T)
    assert lazy.sum().compute() == data.sum()
    assert np.allclose(lazy.dot(lazy.T).mean(axis=0).compute(), data.dot(data.T).mean(axis=0))
    assert np.array_equal(array.ones(1000, chunks=100).cumsum(axis=0).compute(), np.arange(1.0, 1001))


def test_bags(config):
    bag = pytest.importorskip("dask.bag", reason="dask[bag] is not installed")
    numbers = bag.from_sequence(range(100), npartitions=7)
    assert numbers.map(inc).filter(lambda x: x % 2).sum().compute() == sum(x for x in range(1, 101) if x % 2)
    assert sorted(numbers.map(lambda x: x % 3).frequencies().compute()) == [(0, 34), (1, 33), (2, 33)]
