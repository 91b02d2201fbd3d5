"""Dense tables beside the same optimizers in one process, on any number of servers and workers; and what is refused."""

import asyncio
import socket
import threading
from typing import Any

import numpy as np
import psutil
import pytest

from fastrt.ps import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LazyAdam,
    Momentum,
    NotFiniteError,
    TableMismatchError,
    TableTimeoutError,
    Uniform,
)  # fmt: skip
from fastrt.ps.wire import is_clear

F = np.float32
OPTIMIZERS = [
    SGD(lr=0.1, weight_decay=0.01), Momentum(lr=0.1), Momentum(lr=0.1, nesterov=True), Adagrad(lr=0.1, initial=0.1),
    Adam(lr=0.1), AdamW(lr=0.1, weight_decay=0.05), LazyAdam(lr=0.1), FTRL(lr=0.1, l1=0.5, l2=0.2),
]  # fmt: skip


def close(mine: Any, theirs: Any) -> None:
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_tables_of_four_workers_are_the_local_optimizers_on_one_to_four_servers(site, together, local) -> None:
    """Every optimizer, in steps during which the number of servers changes."""
    workers = 4
    place = site(1, workers)
    sessions = [place.worker(rank) for rank in range(workers)]
    dice = np.random.default_rng(1)
    shape = (70, 61)  # two parts, the last one not full
    first = dice.standard_normal(shape).astype(F)
    tables = [
        [place.table(s, f"t{k}", shape, optimizer, first, parts=4) for k, optimizer in enumerate(OPTIMIZERS)]
        for s in sessions
    ]
    locals_ = [local(optimizer, first) for optimizer in OPTIMIZERS]
    for servers in (1, 2, 3, 4, 2):
        place.scale(servers)
        grads = dice.standard_normal((workers, len(OPTIMIZERS), *shape)).astype(F)

        def work(rank: int, grads: Any = grads) -> None:
            for k, table in enumerate(tables[rank]):
                table.push(grads[rank, k])
            for table in tables[rank]:
                table.pull()

        together(*[lambda rank=rank: work(rank) for rank in range(workers)])
        for k, alone in enumerate(locals_):
            alone.update(grads[:, k].mean(axis=0))
            for rank in range(workers):
                close(tables[rank][k].pull(), alone.param)


def test_pull_is_a_version_that_stays_while_others_are_pushed(site) -> None:
    place = site(2)
    session = place.worker()
    table = place.table(session, "w", (300, 1000), SGD(lr=1.0), parts=7)
    ones = np.ones((300, 1000), F)
    held = [table.pull()]
    for _ in range(30):  # more than there are slots
        table.push(ones)
        held.append(table.pull())
    for count, array in enumerate(held):
        assert (array == -count).all()
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert len({array.__array_interface__["data"][0] for array in held[:2]}) == 2
    base = held[0]
    del held
    session.close()
    assert (base == 0).all()  # also after the connection


def test_many_readers_that_hold_versions_never_stop_the_server(site) -> None:
    place = site(1, 1, mode="async")
    writer = place.table(place.worker(), "w", (1024,), SGD(lr=1.0))
    readers = [place.table(place.worker(), "w", (1024,), SGD(lr=1.0)) for _ in range(30)]
    held = []
    for count, reader in enumerate(readers):
        held.append(reader.pull())
        assert (writer.push_pull(np.ones(1024, F)) == -count - 1).all()
    assert [array[0] for array in held] == [-count for count in range(30)]
    assert not any(array.flags.writeable for array in held)


def test_pull_into_an_array_push_pull_rates_and_handles(site) -> None:
    place = site(2)
    session = place.worker()
    table = place.table(session, "w", (5,), SGD(lr=1.0), np.arange(5, dtype=F))
    out = np.empty(5, F)
    assert table.pull(out=out) is out
    assert out.tolist() == [0, 1, 2, 3, 4]
    table.push(np.ones(5, F), lr=0.5)
    assert table.push_pull(np.ones(5, F), out=out) is out
    assert out.tolist() == [-1.5, -0.5, 0.5, 1.5, 2.5]
    handles = [table.push(np.ones(5, F), async_op=True) for _ in range(3)]
    assert [one.wait(10) for one in handles] == [None] * 3
    assert all(one.done() for one in handles)

    async def wait() -> Any:
        return await table.push_pull(np.ones(5, F), async_op=True)

    assert asyncio.run(wait()).tolist() == [-5.5, -4.5, -3.5, -2.5, -1.5]
    table._background.close()
    empty = place.table(session, "empty", (0, 3), Adam())
    empty.push(np.empty((0, 3), F))
    assert empty.pull().shape == (0, 3)
    scalar = place.table(session, "scalar", (), SGD(lr=1.0), 2.0)
    assert scalar.push_pull(np.array(1.0, F)) == 1.0


def test_calls_come_after_those_that_go_on_in_the_background(site) -> None:
    place = site(1, mode="async")
    session = place.worker()
    table = place.table(session, "w", (1 << 20,), SGD(lr=1.0))
    rows = place.embedding(session, "e", 2, SGD(lr=1.0))
    rows._background.close()
    rows._background = table._background  # as it is for all tables of a cluster
    handles = [table.push(np.ones(1 << 20, F), async_op=True) for _ in range(20)]
    handles.append(rows.push([5], np.ones((1, 2), F), async_op=True))
    assert not handles[-1].done()
    assert rows.pull([5]).tolist() == [[-1, -1]]
    assert table.pull()[0] == -20
    for handle in handles:
        assert handle.wait(10) is None
    table._background.close()


def own_address() -> str:
    """An address of this machine that is not loopback's, so that connections to it are encrypted."""
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no address but loopback's")


@pytest.mark.parametrize("how", ["loopback", "tls", "insecure"])
def test_worker_elsewhere_gets_the_same_over_tcp(site, monkeypatch, how: str) -> None:
    place = site(2, host="127.0.0.1" if how == "loopback" else own_address(), insecure=how == "insecure")
    near, far = place.worker(), place.worker()
    first = np.random.default_rng(3).standard_normal((90, 1000)).astype(F)
    table = place.table(near, "w", first.shape, SGD(lr=1.0), first)
    for one in place.places.values():
        monkeypatch.setattr(one, "unix", None)
    far.refresh(0, 0.0)
    assert is_clear(far._head._sock, far._trust) is (how != "tls")
    other = place.table(far, "w", first.shape, SGD(lr=1.0), first)
    assert np.array_equal(other.pull(), first)
    other.push(first)
    assert not table.pull().any()
    rows = place.embedding(far, "e", 3, SGD(lr=1.0), init=Uniform(1, 2, 7))
    keys = np.array([[1, -1], [1 << 62, 1]])
    before = rows.pull(keys)
    rows.push(keys, np.ones((2, 2, 3), F))
    np.testing.assert_allclose(
        before - rows.pull(keys), np.array([2, 1, 1, 2]).reshape(2, 2, 1) * np.ones(3), rtol=1e-6
    )


def test_synchronous_pull_waits_for_all_and_says_for_whom(site, together) -> None:
    place = site(2, 2)
    tables = [place.table(place.worker(rank), "w", (4,), SGD(lr=1.0)) for rank in range(2)]
    tables[0].push(np.full(4, 2, F))
    assert (tables[1].pull() == 0).all()  # that one has not pushed
    with pytest.raises(TableTimeoutError, match=r"waits for worker \[1\]"):
        tables[0].pull(timeout=0.05)
    with pytest.raises(TableTimeoutError, match=r"waits for worker \[1\]"):
        tables[0].push(np.ones(4, F), timeout=0.05)
    found: list[Any] = []
    together(lambda: found.append(tables[0].pull()), lambda: tables[1].push(np.zeros(4, F)))
    assert (found[0] == -1).all()


def test_asynchronous_pushes_are_applied_as_they_come(site, together) -> None:
    place = site(2, 3, mode="async")
    tables = [place.table(place.worker(rank), "w", (4,), SGD(lr=1.0)) for rank in range(3)]
    together(*[lambda t=t: [t.push(np.ones(4, F)) for _ in range(20)] for t in tables])
    assert all((t.pull() == -60).all() for t in tables)


def test_bounded_staleness_lets_nobody_run_away(site, together) -> None:
    place = site(2, 2, mode="ssp", staleness=2)
    fast, slow = (place.table(place.worker(rank), "w", (4,), SGD(lr=1.0)) for rank in range(2))
    for count in range(1, 3):
        assert (fast.push_pull(np.ones(4, F)) == -count).all()
    fast.push(np.ones(4, F))
    with pytest.raises(TableTimeoutError, match=r"waits for worker \[1\]"):
        fast.pull(timeout=0.05)
    assert (slow.pull() == -3).all()
    begun = threading.Event()
    together(lambda: (begun.set(), fast.pull()), lambda: (begun.wait(), slow.push(np.ones(4, F))))
    assert (fast.pull() == -4).all()


def test_gradients_that_are_not_finite_are_treated_as_told(site) -> None:
    place = site(1)
    session = place.worker()
    bad = np.array([1, np.nan, np.inf, 1], F)
    tables = {nan: place.table(session, nan, (4,), SGD(lr=1.0), nan=nan) for nan in ("raise", "drop", "pass")}
    with pytest.raises(NotFiniteError, match="2 of 4 values"):
        tables["raise"].push(bad)
    for nan in ("drop", "pass"):
        tables[nan].push(bad)
    huge = np.full(4, 3e38, F)  # its sum is infinite, and it is not
    tables["raise"].push(huge, lr=0.0)
    assert not tables["raise"].pull().any()
    assert not tables["drop"].pull().any()
    assert np.isnan(tables["pass"].pull()).tolist() == [False, True, False, False]
    rows = {nan: place.embedding(session, f"e{nan}", 2, SGD(lr=1.0), nan=nan) for nan in ("raise", "drop", "pass")}
    grads = np.array([[1, 1], [np.nan, 1]], F)
    with pytest.raises(NotFiniteError, match="1 of 4 values"):
        rows["raise"].push([1, 2], grads)
    for nan in ("drop", "pass"):
        rows[nan].push([1, 2], grads)
        assert (rows[nan].pull([1]) == -1).all()
    assert not rows["drop"].pull([2]).any()
    assert np.isnan(rows["pass"].pull([2])).any()


def test_what_does_not_fit_is_refused_in_words_and_nothing_changed(site) -> None:
    place = site(1)
    session = place.worker()
    table = place.table(session, "w", (2, 3), SGD(lr=1.0))
    for grad, kind, words in (
        (np.ones((2, 3)), TypeError, "must be float32, not float64"), ([1, 2], TypeError, "not list"),
        (np.ones((3, 2), F), ValueError, r"shape \(3, 2\), the table \(2, 3\)"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            table.push(grad)
        with pytest.raises(kind, match=words):
            table.pull(out=grad)
    for rate in (float("nan"), -1.0, "1"):
        with pytest.raises(ValueError, match="learning rate"):
            table.push(np.ones((2, 3), F), lr=rate)
    with pytest.raises(ValueError, match="C-contiguous"):
        table.pull(out=np.ones((3, 2), F).T)
    with pytest.raises(TableMismatchError, match=r"shape .* instead of"):
        place.table(session, "w", (3, 3), SGD(lr=1.0))
    rows = place.embedding(session, "e", 2, SGD(lr=1.0), rows=10)
    for ids in ([10], [-1], [3, 11]):
        with pytest.raises(IndexError, match="keys from 0 to 9"):
            rows.pull(ids)
        with pytest.raises(IndexError, match="keys from 0 to 9"):
            rows.push(ids, np.ones((len(ids), 2), F))
    with pytest.raises(TypeError, match="integers, not float64"):
        rows.pull([1.5])
    with pytest.raises(ValueError, match=r"must have \(1, 2\)"):
        rows.push([1], np.ones((1, 3), F))
    with pytest.raises(ValueError, match="use LazyAdam"):
        place.embedding(session, "f", 2, Adam())
    assert not table.pull().any()
    assert not rows.pull([3]).any()
