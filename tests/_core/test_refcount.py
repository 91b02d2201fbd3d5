"""The scheduler's reference counts: early Ray's rules one by one, and errors that change nothing."""

import threading
from array import array

import numpy as np
import pytest

from fastrt._core.refcounts.audit import check_invariants, dump, load
from fastrt._core.refcounts.refcount import FREED, UNKNOWN, RefTable
from fastrt.errors import ReferenceCountError

MILLION = 1_000_000


def refused(kind: str, function, *args) -> ReferenceCountError:
    with pytest.raises(ReferenceCountError) as caught:
        function(*args)
    assert caught.value.kind == kind
    return caught.value


def image(table: RefTable) -> object:
    """All that is in a table, to compare."""
    return dump(table), table.alive, len(table)


@pytest.fixture
def table():
    """A table with 4 references that are ready, each counted once."""
    made = RefTable()
    made.add(4)
    for ref in range(4):
        assert made.ready(ref) == []
    yield made
    check_invariants(made)


def test_references_are_dense_from_zero():
    table = RefTable()
    assert [table.add(), table.add(3), table.add()] == [0, 1, 4]
    assert len(table) == table.alive == 5
    assert list(table.counts()) == [1] * 5
    assert list(table.targets()) == [UNKNOWN] * 5


def test_each_duplicate_counts(table):
    table.increment([1, 2, 1, 1])
    assert list(table.counts()) == [1, 4, 2, 1]
    assert table.decrement([1, 2, 1]) == []
    assert list(table.counts()) == [1, 2, 1, 1]


@pytest.mark.parametrize(
    "batch",
    [[1, 3], iter([1, 3]), array("Q", [1, 3]), array("q", [1, 3]), np.array([1, 3]), np.array([1, 3], np.uint64)],
)
def test_batches_of_any_kind(table, batch):
    table.increment(batch)
    assert list(table.counts()) == [1, 2, 1, 2]


@pytest.mark.parametrize("batch", [b"12345678", np.array([1.0]), np.array([1, 2], np.int32), np.array([1], ">u8")])
def test_buffers_of_other_items_are_refused(table, batch):
    with pytest.raises(TypeError, match="64-bit"):
        table.increment(batch)
    assert list(table.counts()) == [1] * 4


@pytest.mark.parametrize(
    ("kind", "method", "batch"),
    [
        ("unknown", "increment", [0, 1, 99]),
        ("freed", "increment", [0, 1, 3]),
        ("unknown", "decrement", [0, 1, 99]),
        ("freed", "decrement", [0, 1, 3]),
        ("negative", "decrement", [0, 1, 1]),
        ("negative", "decrement", [2]),
    ],
)
def test_a_bad_batch_changes_nothing(kind, method, batch):
    table = RefTable()
    table.add(2)
    table.add(1, 0)
    table.add(1, 1, False)
    assert table.decrement([3]) == [3]
    before = image(table)
    error = refused(kind, getattr(table, method), batch)
    assert error.objref == batch[-1]
    assert str(batch[-1]) in str(error)
    assert image(table) == before
    check_invariants(table)


def test_a_large_bad_batch_changes_nothing():
    table = RefTable()
    table.add(10_000, 0)
    before = image(table)
    refused("unknown", table.increment, np.append(np.arange(10_000), 10_000))
    assert image(table) == before
    table.increment(np.arange(10_000))
    before = image(table)
    refused("negative", table.decrement, np.append(np.arange(10_000), 5))
    assert image(table) == before
    check_invariants(table)


def test_last_count_of_a_ready_object_frees_it(table):
    assert table.decrement([2]) == [2]
    assert table.count(2) == FREED
    assert not table.is_alive(2)
    assert table.alive == 3
    refused("freed", table.canonical, 2)


def test_producer_to_come_keeps_what_nobody_counts():
    table = RefTable()
    table.add(2)
    assert table.decrement([0, 1]) == []
    assert table.is_pending(0)
    table.increment([0])  # from zero, as long as it lives
    assert table.decrement([0]) == []
    assert table.ready(0) == [0]
    assert table.abandon(1) == [1]
    check_invariants(table)


def test_abandoned_object_may_become_ready_after_all():
    table = RefTable()
    table.add()
    assert table.abandon(0) == []
    assert table.abandon(0) == []
    assert table.ready(0) == []
    assert table.canonical(0) == 0
    assert table.decrement([0]) == [0]


def test_ready_twice_is_a_further_copy(table):
    assert table.ready(1) == []
    assert table.count(1) == 1


def test_delivery_in_flight_keeps_what_nobody_counts(table):
    table.hold(1)
    table.hold(1)
    assert table.decrement([1]) == []
    assert table.release(1) == []
    assert table.release(1) == [1]
    refused("negative", table.release, 0)


def test_alias_and_target_die_together(table):
    alias = table.add()
    assert table.canonical(alias) is None
    table.alias(alias, 1)
    assert table.canonical(alias) == 1
    assert not table.is_pending(alias)
    assert table.targets()[alias] == 1
    assert table.decrement([1]) == []
    assert table.decrement([alias]) == [1, alias]


def test_chain_is_canonical_once_its_end_is_ready():
    table = RefTable()
    table.add(4)
    table.alias(0, 1)
    table.alias(2, 3)
    table.alias(1, 2)
    assert [table.canonical(r) for r in range(4)] == [None] * 4
    assert table.ready(3) == []
    assert [table.canonical(r) for r in range(4)] == [3] * 4
    assert sorted(table.members(1)) == [0, 1, 2, 3]
    assert table.decrement([3, 0, 2]) == []
    assert sorted(table.decrement([1])) == [0, 1, 2, 3]
    check_invariants(table)


def test_aliases_may_form_a_tree(table):
    table.add(3)
    for alias in (4, 5, 6):
        table.alias(alias, 0)
    assert table.decrement([0, 4, 6]) == []
    assert sorted(table.decrement([5])) == [0, 4, 5, 6]


def test_impossible_aliases_change_nothing():
    table = RefTable()
    table.add(6)
    table.ready(0)
    table.alias(1, 2)
    table.alias(2, 3)
    table.ready(4)
    assert table.decrement([4]) == [4]
    before = image(table)
    refused("circular", table.alias, 5, 5)
    refused("circular", table.alias, 3, 1)
    refused("aliased", table.alias, 1, 5)
    refused("ready", table.alias, 0, 5)
    refused("unknown", table.alias, 5, 6)
    refused("unknown", table.alias, 6, 5)
    refused("freed", table.alias, 5, 4)
    refused("freed", table.alias, 4, 5)
    refused("aliased", table.ready, 1)
    assert image(table) == before


def test_contents_die_with_their_container_to_any_depth(table):
    table.increment([0, 0, 1, 2])
    table.contain(3, [0, 0, 1])
    table.contain(1, [2])
    assert table.contained(3) == [0, 0, 1]
    assert table.decrement([0, 1, 2]) == []
    assert list(table.counts()) == [2, 1, 1, 1]
    assert sorted(table.decrement([3])) == [0, 1, 2, 3]
    assert table.dangling == 0


def test_contents_of_an_alias_die_with_the_class(table):
    alias = table.add()
    table.increment([2])
    table.alias(alias, 0)
    table.contain(alias, [2])
    table.decrement([2])
    assert sorted(table.decrement([0, alias])) == [0, 2, alias]


def test_impossible_contents_change_nothing(table):
    table.add(1, 0)
    table.contain(0, [1])
    before = image(table)
    refused("contained", table.contain, 0, [2])
    refused("unknown", table.contain, 1, [2, 7])
    refused("uncounted", table.contain, 1, [2, 4])
    refused("unknown", table.contain, 9, [2])
    table.contain(1, [])
    assert image(table) == before


def test_contents_dropped_by_somebody_else_are_only_noted(table):
    table.contain(3, [0, 1])  # and never counted for it
    assert table.decrement([0]) == [0]
    assert sorted(table.decrement([3])) == [1, 3]
    assert table.dangling == 1


def test_a_million_containers_in_a_chain_do_not_recurse():
    table = RefTable()
    table.add(MILLION, 1, False)
    for ref in range(MILLION - 1):
        table.contain(ref, array("Q", [ref + 1]))
    assert len(table.decrement([0])) == MILLION
    assert table.alive == 0
    check_invariants(table)


@pytest.mark.parametrize("order", [1, -1])
def test_a_million_aliases_in_a_chain(order):
    table = RefTable()
    table.add(MILLION)
    for ref in list(range(MILLION - 1))[::order]:
        table.alias(ref, ref + 1)
    assert table.canonical(0) is None
    table.ready(MILLION - 1)
    assert table.canonical(0) == MILLION - 1
    assert table.decrement(np.arange(1, MILLION)) == []
    assert len(table.decrement([0])) == MILLION
    check_invariants(table)


def test_saved_table_is_the_same_again(table):
    table.add(4)
    table.increment([0, 5])
    table.alias(4, 0)
    table.alias(5, 6)
    table.contain(2, [0, 1])
    table.hold(3)
    table.decrement([1])
    again = load(dump(table))
    check_invariants(again)
    assert image(again) == image(table)
    for one in (table, again):
        assert sorted(one.decrement([0, 0, 4, 2])) == [0, 2, 4]
        assert one.dangling == 2  # neither was counted for being contained
        assert one.decrement([3]) == []
        assert one.release(3) == [3]
    assert image(again) == image(table)


def test_saved_data_that_does_not_fit_is_refused(table):
    saved = dump(table)
    with pytest.raises(ValueError, match="different lengths"):
        load({**saved, "holds": b""})
    with pytest.raises(ValueError, match="cannot be"):
        load({**saved, "targets": array("Q", [1, 0, 2, 3]).tobytes()})


def test_neither_counted_nor_awaited_is_refused():
    with pytest.raises(ValueError, match="0 each"):
        RefTable().add(1, 0, False)


def test_threads_count_together():
    """Batches large enough to run without the GIL, from two threads, while a third makes references."""
    table = RefTable()
    table.add(10_000, 1, False)
    refs = np.arange(10_000, dtype=np.uint64)
    failed = []

    def count() -> None:
        try:
            for _ in range(300):
                table.increment(refs)
                table.decrement(refs)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        table.add(1000)
    for thread in threads:
        thread.join()
    assert not failed
    assert set(table.counts()) == {1}
    check_invariants(table)


BLOCK = 4096


def test_block_of_dead_references_is_forgotten():
    table = RefTable()
    table.add(3 * BLOCK + 10, 1, False)
    last = 3 * BLOCK + 9
    table.contain(last, [5, 7])
    table.decrement([ref for ref in range(2 * BLOCK) if ref != BLOCK + 3])  # one of the second block lives
    assert (table.kept, table.alive, len(table)) == (3 * BLOCK, BLOCK + 11, 3 * BLOCK + 10)
    for ref in (0, 5, BLOCK - 1):
        assert not table.is_alive(ref)
        assert (table.count(ref), table.contained(ref)) == (FREED, [])
        for change in (table.increment, table.decrement):
            refused("freed", change, [ref])
    before = image(table)
    refused("freed", table.alias, 2 * BLOCK, 5)
    assert image(table) == before
    check_invariants(table)
    assert table.alive_before(2 * BLOCK) == [(BLOCK + 3, 1, UNKNOWN)]
    table.decrement([last])  # what it contained is forgotten already
    assert table.dangling == 2
    table.decrement([BLOCK + 3])
    assert table.kept == 2 * BLOCK
    assert list(table.counts(2 * BLOCK)) == [1] * (BLOCK + 9) + [FREED]
    assert table.add(BLOCK) == 3 * BLOCK + 10
    check_invariants(table)


@pytest.mark.parametrize("left", [[], [1], [BLOCK], [2 * BLOCK, 3 * BLOCK - 1]])
def test_saved_table_has_no_forgotten_references(left):
    table = RefTable()
    table.add(3 * BLOCK, 1, False)
    table.decrement([ref for ref in range(3 * BLOCK) if ref not in left])
    saved = dump(table)
    assert sum(map(len, saved.values())) < 2 * BLOCK * 20
    again = load(saved)
    assert image(again) == image(table)
    assert again.kept == table.kept == len({ref // BLOCK for ref in left}) * BLOCK
    assert again.add() == 3 * BLOCK
    check_invariants(again)


def test_table_that_was_saved_with_its_dead_references_forgets_them():
    table = RefTable()
    table.add(BLOCK + 1, 1, False)
    saved = dump(table)
    saved["counts"] = array("Q", [FREED] * BLOCK + [1]).tobytes()  # as earlier versions wrote it
    again = load(saved)
    assert (again.kept, again.alive, len(again)) == (BLOCK, 1, BLOCK + 1)
    check_invariants(again)
