"""Embeddings beside the same in NumPy: duplicates, order, first values, eviction, moves; and lookups during updates."""

import threading
from typing import Any

import numpy as np
import pytest

from fastrt.errors import ObjectStoreFullError
from fastrt.ps import FTRL, SGD, Adagrad, LazyAdam, Momentum, Normal

F = np.float32


def test_embedding_of_three_workers_is_the_local_optimizer_wherever_its_rows_are(site, together, local) -> None:
    workers, dim, count = 3, 5, 400
    place = site(2, workers)
    sessions = [place.worker(rank) for rank in range(workers)]
    dice = np.random.default_rng(2)
    keys = dice.integers(-(1 << 63), (1 << 63) - 1, count)
    optimizers = [SGD(lr=0.1), Momentum(lr=0.1), Adagrad(lr=0.1, initial=0.1), LazyAdam(lr=0.1), FTRL(lr=0.1, l1=0.1)]
    first = Normal(1.0, seed=5)
    tables = [
        [place.embedding(s, f"e{k}", dim, optimizer, init=first) for k, optimizer in enumerate(optimizers)]
        for s in sessions
    ]
    begin = first.rows(keys.astype(np.uint64), dim)
    assert 0.9 < begin.std() < 1.1
    assert abs(begin.mean()) < 0.1
    locals_ = [local(optimizer, begin) for optimizer in optimizers]
    for servers in (2, 4, 1, 3):
        place.scale(servers)
        # With duplicates, and of different sizes: the last worker has none.
        chosen = [dice.integers(0, count, size) for size in (300, 50, 0)]
        grads = [dice.standard_normal((len(one), dim)).astype(F) for one in chosen]

        def work(rank: int, chosen: Any = chosen, grads: Any = grads) -> None:
            for table in tables[rank]:
                table.push(keys[chosen[rank]], grads[rank])
            for table in tables[rank]:
                table.pull(keys[:1])

        together(*[lambda rank=rank: work(rank) for rank in range(workers)])
        total = np.zeros((count, dim))
        for rows, values in zip(chosen, grads, strict=True):
            np.add.at(total, rows, values)
        touched = np.unique(np.concatenate(chosen))
        for k, alone in enumerate(locals_):
            alone.update(total[touched] / workers, touched)
            np.testing.assert_allclose(tables[0][k].pull(keys), alone.param, rtol=2e-5, atol=2e-6)
    assert sum(one.server.shards["e0"].memory.count for one in place.places.values() if one.server.shards) == count


def test_first_values_depend_on_the_key_alone(site) -> None:
    keys = np.array([[3, 1 << 40], [-7, 3]])
    found = []
    for servers in (1, 3):
        place = site(servers)
        table = place.embedding(place.worker(), "e", 7, SGD(), init=Normal(0.1, seed=9))
        out = np.empty((2, 2, 7), F)
        assert table.pull(keys[::-1], out=out) is out
        found.append(table.pull(keys))
        assert np.array_equal(found[-1][::-1], out)
        assert np.array_equal(found[-1][0, 0], found[-1][1, 1])
    assert np.array_equal(found[0], found[1])


def test_least_recently_used_rows_are_evicted(site) -> None:
    place = site(1, mode="async")
    table = place.embedding(place.worker(), "e", 2, SGD(lr=1.0), capacity=8)
    table.push(np.arange(8), np.ones((8, 2), F))
    table.pull([0, 1, 2, 3])  # a look is a use
    table.push([100, 101, 102], np.ones((3, 2), F))
    assert (table.pull([0, 1, 2, 3, 100, 101, 102]) == -1).all()
    assert place.places[0].server.shards["e"].memory.count == 8
    table.push([200], np.ones((1, 2), F))  # the last of 4 to 7 goes
    assert not table.pull([4]).any()  # and comes back anew, for somebody else
    with pytest.raises(ObjectStoreFullError, match="9 keys"):
        table.pull(1000 + np.arange(9))
    with pytest.raises(ObjectStoreFullError, match="larger capacity"):
        table.push(np.arange(9), np.ones((9, 2), F))


def test_lookups_during_updates_see_whole_rows(site, together) -> None:
    """All values of a row are equal in every version; rows come and go meanwhile."""
    place = site(2, mode="async")
    writer, reader = place.worker(), place.worker()
    mine = place.embedding(writer, "e", 32, SGD(lr=1.0), capacity=2000)
    theirs = place.embedding(reader, "e", 32, SGD(lr=1.0), capacity=2000)
    keys = np.arange(1000)
    mine.push(keys, np.ones((1000, 32), F))
    ended = threading.Event()

    def write() -> None:
        dice = np.random.default_rng(1)
        for k in range(60):
            some = dice.permutation(1000)[:500]
            mine.push(some, np.ones((500, 32), F))
            mine.push(5000 + 700 * k + np.arange(700), np.ones((700, 32), F))
        ended.set()

    def read() -> None:
        while not ended.is_set():
            found = theirs.pull(keys[:900])
            assert (found == found[:, :1]).all()

    together(write, read, read)
