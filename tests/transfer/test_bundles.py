"""Small objects that go together: all arrive, none is mistaken for another, and what one cannot have costs no other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastrt._core.transfer import stream
from fastrt.errors import NotFoundError, ObjectStoreFullError
from fastrt.transfer import wire
from fastrt.transfer.table import TransferError
from fastrt.transfer.wire import Entry, Frame
from support.sites import PATIENCE_S, Pair, Site

from .test_native import Liar, frame

EACH = 50_000


def put_many(site: Site, count: int) -> None:
    for k in range(count):
        site.put(k, np.full(EACH, k % 251, np.uint8))


def check_many(site: Site, count: int) -> None:
    for k in range(count):
        assert (site.get(k) == k % 251).all()


@pytest.mark.parametrize("checksum", [False, True])
def test_small_objects_arrive_whatever_is_between_them(pair: Pair, checksum: bool) -> None:
    put_many(pair.here, 100)
    pair.here.put(100, np.arange(1 << 20))
    pair.here.put(101, "")
    pair.here.put(102, [pair.here.store.put(1)])  # refused by its source: what it contains has no name
    proxy = pair.proxy()
    puller = pair.puller(checksum=checksum)
    order = [102, 100, *range(0, 100, 2), 999, 101, *range(1, 100, 2)]
    futures = dict(zip(order, puller.pull_many(order, proxy.address), strict=True))
    for k in (*range(100), 100, 101):
        futures[k].result(PATIENCE_S)
    check_many(pair.there, 100)
    assert pair.there.get(100)[-1] == (1 << 20) - 1
    with pytest.raises(TransferError, match="no name"):
        futures[102].result(PATIENCE_S)
    with pytest.raises(NotFoundError):
        futures[999].result(PATIENCE_S)
    assert pair.there.table.coming() == 0


def test_one_future_for_all_has_them_in_order(pair: Pair) -> None:
    put_many(pair.here, 300)
    pair.there.put(7, "here already")
    puller = pair.puller()
    single = puller.pull(3, pair.source.address)
    refs = puller.bring(range(300), pair.source.address).result(PATIENCE_S)
    assert [pair.there.table.find(k) for k in range(300)] == refs
    assert pair.there.get(7) == "here already"
    assert single.result(0) == refs[3]
    assert puller.bring([], pair.source.address).result(0) == []
    assert puller.bring([3, 3], pair.source.address).result(0) == [refs[3]] * 2


def test_one_future_for_all_fails_with_the_first_and_the_others_arrive(pair: Pair) -> None:
    put_many(pair.here, 10)
    puller = pair.puller()
    whole = puller.bring([*range(5), 999, 998, *range(5, 10)], pair.source.address)
    with pytest.raises(NotFoundError, match="0x3e"):
        whole.result(PATIENCE_S)
    puller.bring(range(10), pair.source.address).result(PATIENCE_S)
    check_many(pair.there, 10)


@pytest.mark.parametrize("how", ["cut", "reset"])
@pytest.mark.parametrize("at", [150, 1000, 3000, 100_000, 2_000_000])
def test_connection_broken_within_a_bundle_goes_on_over_a_new_one(pair: Pair, how: str, at: int) -> None:
    put_many(pair.here, 120)
    proxy = pair.proxy(plans=[(how, at), (how, at)])
    pair.puller().bring(range(120), proxy.address).result(PATIENCE_S)
    check_many(pair.there, 120)
    assert proxy.connections == 3


@pytest.mark.parametrize("at", [200, 300, 60_000, 1_000_000])
def test_damaged_bundle_is_noticed_and_sent_again(pair: Pair, at: int) -> None:
    put_many(pair.here, 60)
    proxy = pair.proxy(plans=[("flip", at)])
    pair.puller(checksum=True).bring(range(60), proxy.address).result(PATIENCE_S)
    check_many(pair.there, 60)
    assert proxy.connections == 2


@pytest.mark.parametrize("at", [300_000, 1_000_000])
def test_reordered_bytes_are_noticed_and_sent_again(pair: Pair, at: int) -> None:
    put_many(pair.here, 60)
    proxy = pair.proxy(plans=[("swap", at)])
    pair.puller(checksum=True).bring(range(60), proxy.address).result(PATIENCE_S)
    check_many(pair.there, 60)
    assert proxy.connections == 2


def test_store_with_room_for_some_takes_these_and_nothing_is_left_of_the_others(
    make_site: Callable[..., Site], closing: Callable[[Any], Any]
) -> None:
    pair = Pair(make_site(), make_site(4 << 20), closing)
    put_many(pair.here, 200)
    futures = pair.puller().pull_many(range(200), pair.source.address)
    errors = [future.exception(PATIENCE_S) for future in futures]
    arrived = [k for k, error in enumerate(errors) if error is None]
    assert 20 <= len(arrived) <= 80
    assert all(isinstance(error, ObjectStoreFullError) for error in errors if error is not None)
    assert pair.there.table.listed() == arrived
    for k in arrived:
        assert (pair.there.get(k) == k % 251).all()


def entry(**fields: int) -> Entry:
    return Entry(**{"ticket": 0, "kind": 16, "flags": 0, "objref": 1, "total": 100, "crc": 0, **fields})


def bundle(*entries: Entry, data: int | None = None) -> bytes:
    return wire.pack_bundle(list(entries)) + bytes(sum(e.total for e in entries) if data is None else data)


def headed(**fields: int) -> bytes:
    """A bundle whose header says something else than its list."""
    table = wire.ENTRY.pack(*entry())
    said = {"nrefs": 1, "length": len(table) + 100, "crc": stream.crc32c(table), **fields}
    head = Frame(wire.BUNDLE, 0, 0, ticket=0, objref=0, total=0, offset=0, **said)
    return wire.pack_frame(head) + table + bytes(100)


LIES = {
    "another object": bundle(entry(objref=2)),
    "an answer to nothing": bundle(entry(ticket=1)),
    "one object twice": bundle(entry(), entry()),
    "an object too large": bundle(entry(total=wire.SMALL_BYTES + 1)),
    "a kind that is none": bundle(entry(kind=7)),
    "an int of 100 bytes": bundle(entry(kind=3)),
    "no object": headed(nrefs=0, length=0),
    "too many objects": headed(nrefs=wire.BUNDLE_MAX + 1),
    "less than its objects have": headed(length=50),
    "more than its objects have": headed(length=1000),
    "a wrong checksum of its list": headed(crc=1),
    "half of it": bundle(entry(), data=50),
    "the list only": bundle(entry(), data=0),
    "an object that has begun": frame() + bundle(entry()),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_lying_bundle_is_refused_and_nothing_is_left(
    make_site: Callable[..., Site], closing: Callable[[Any], Any], lie: bytes
) -> None:
    there = make_site()
    liar = closing(Liar(lie))
    error = closing(there.puller()).pull(1, liar.address).exception(PATIENCE_S)
    assert isinstance(error, TransferError), error
    assert there.table.coming() == 0
    assert there.table.listed() == []
    there.wait_until_empty()


def test_bundle_without_promised_checksums_is_refused(
    make_site: Callable[..., Site], closing: Callable[[Any], Any]
) -> None:
    there = make_site()
    liar = closing(Liar(bundle(entry())))
    error = closing(there.puller(checksum=True)).pull(1, liar.address).exception(PATIENCE_S)
    assert "without the checksums it promised" in str(error)
