"""The table of the cluster's names: one transfer an object, waits, aliases, and what is dropped."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastrt._core.objects import handles
from fastrt.errors import FastrtError, NotFoundError, ObjectLostError
from fastrt.transfer.table import DuplicateError, Table, TransferError
from support.sites import PATIENCE_S, Site


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


def arrive(table: Table, objref: int, data: bytes = b"data") -> None:
    receipt, _ = table.begin(objref)
    assert receipt is not None
    receipt.allocate(len(data), 6, False)[:] = data
    receipt.received = len(data)
    receipt.seal()


def test_name_is_taken_once(site: Site) -> None:
    site.put(1, "one")
    site.table.alias(11, 1)
    receipt, _ = site.table.begin(2)
    assert receipt is not None
    for taken in (1, 2, 11):
        with pytest.raises(DuplicateError, match=f"{taken:#x} is in this store already"):
            site.put(taken, "other")
    receipt.fail(TransferError("gone"))
    site.put(2, "two")
    assert site.table.listed() == [1, 2, 11]


def test_whoever_waits_is_told_by_whatever_way_it_comes(site: Site) -> None:
    put, arrived, alias = (site.table.expect(k) for k in (1, 2, 3))
    site.put(1, "one")
    arrive(site.table, 2)
    site.table.alias(3, 2)
    assert [site.store.get(one.result(0)) for one in (put, arrived, alias)] == ["one", b"data", b"data"]
    assert site.table.expect(3).result(0) == site.table.find(2)
    assert not site.table.expect(4).done()
    del put, arrived, alias


def test_threads_that_claim_one_object_get_one_receipt(site: Site) -> None:
    barrier = threading.Barrier(8)
    claims: list[Any] = []

    def claim() -> None:
        barrier.wait(PATIENCE_S)
        claims.append(site.table.begin(5))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [receipt] = [receipt for receipt, _ in claims if receipt is not None]
    assert {future for _, future in claims} == {receipt.future}
    receipt.fail(TransferError("gone"))
    with pytest.raises(TransferError, match="gone"):
        claims[0][1].result(0)
    assert site.table.begin(5)[0] is not None


def test_object_that_is_not_whole_cannot_be_sealed(site: Site) -> None:
    receipt, _ = site.table.begin(5)
    assert receipt is not None
    with pytest.raises(TransferError, match="has 0 of 0 bytes"):
        receipt.seal()
    receipt.allocate(10, 6, False)
    receipt.received = 9
    with pytest.raises(TransferError, match="has 9 of 10 bytes"):
        receipt.seal()
    assert site.table.find(5) is None
    receipt.fail(TransferError("gone"))
    assert site.used()[0] == 0


@pytest.mark.parametrize(("kind", "total"), [(3, 7), (0, 1), (7, 0), (15, 1), (19, 10), (65535, 10)])
def test_value_that_no_store_can_read_is_refused(site: Site, kind: int, total: int) -> None:
    receipt, _ = site.table.begin(5)
    assert receipt is not None
    with pytest.raises(TransferError, match="which is not a value"):
        receipt.allocate(total, kind, False)
    receipt.fail(TransferError("gone"))


def test_dropped_object_is_gone_and_its_memory_free(site: Site) -> None:
    site.put(1, b"x" * 100_000)
    site.table.alias(11, 1)
    site.table.drop(1)
    assert site.table.listed() == []
    assert site.used() == (0, 0)
    with pytest.raises(NotFoundError, match="cannot be deallocated"):
        site.table.drop(11)


def test_object_dropped_on_its_way_does_not_arrive(site: Site) -> None:
    receipt, future = site.table.begin(5)
    assert receipt is not None
    receipt.allocate(4, 6, False)
    receipt.received = 4
    site.table.drop(5)
    with pytest.raises(ObjectLostError, match="was deallocated while it was being received"):
        receipt.seal()
    with pytest.raises(ObjectLostError, match="was deallocated"):
        future.result(0)
    receipt.fail(TransferError("too late to matter"))
    arrive(site.table, 5)
    assert site.get(5) == b"data"


def test_cleared_table_fails_all_who_wait(site: Site) -> None:
    waiting = site.table.expect(9)
    receipt, coming = site.table.begin(5)
    assert receipt is not None
    site.put(1, "one")
    site.table.clear()
    for future in (waiting, coming):
        with pytest.raises(TransferError, match="this store is closing"):
            future.result(0)
    assert site.table.listed() == []


def test_names_of_contained_references_go_both_ways(site: Site) -> None:
    inner, other = site.store.put("inner"), site.store.put("other")
    site.table.add(77, inner)
    site.put(1, [inner])
    assert site.table.read(1).refs == [77]
    assert site.table.resolve(77) == inner
    site.put(2, [other])
    with pytest.raises(FastrtError, match="has no name in the cluster"):
        site.table.read(2)
    helped = Table(site.store, resolve=lambda objref: other, name=lambda ref: ref.objref)
    assert helped.name_of(other) == other.objref
    assert helped.resolve(123) == other


def test_read_shows_the_bytes_as_they_lie(site: Site) -> None:
    site.put(1, b"x" * 5000)
    sealed = site.table.read(1)
    assert (sealed.kind, sealed.is_error, bytes(sealed.pin), sealed.refs) == (6, False, b"x" * 5000, [])
    assert isinstance(sealed.pin, handles.Pin)
    with pytest.raises(NotFoundError, match="0x2 is not in this store"):
        site.table.read(2)
