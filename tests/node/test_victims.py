"""The choice of the values to spill: against a search of all windows, and on a real store under random loads."""

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt.node import victims
from fastrt.node.victims import PAGE, Candidate, Piece

STORE = 64 * PAGE
FREE, VALUE, GAP = "free", "value", "gap"


def layout(*parts: tuple[str, int, int]) -> tuple[list[Candidate], list[tuple[int, int]]]:
    """Candidates and free runs of a memory that is made of (what, pages, last use)."""
    candidates, free, at = [], [], 1 << 20
    for index, (what, pages, used) in enumerate(parts):
        if what == VALUE:
            candidates.append(Candidate(used, pages * PAGE, at, index, 100 + index))
        elif what == FREE:
            free.append((at, pages * PAGE))
        at += pages * PAGE
    return sorted(candidates), free


def chosen(wanted: int, *parts: tuple[str, int, int]) -> list[int] | None:
    """The places of the chosen values among the parts; a small store, so that no more than wanted is freed."""
    found = victims.choose(*layout(*parts), wanted, STORE)
    return None if found is None else [row.entry for row in found]


def test_neighbours_of_a_hole_go_before_older_values():
    parts = (VALUE, 4, 0), (GAP, 1, 0), (FREE, 3, 0), (VALUE, 1, 5), (GAP, 1, 0), (VALUE, 4, 1)
    assert chosen(4 * PAGE, *parts) == [3]


def test_of_windows_that_free_as_much_the_oldest_goes():
    parts = (VALUE, 2, 7), (GAP, 1, 0), (VALUE, 2, 3), (GAP, 1, 0), (VALUE, 2, 5)
    assert chosen(2 * PAGE, *parts) == [2]


def test_copies_go_before_values_that_must_be_written():
    assert chosen(4 * PAGE, (VALUE, 4, 0), (GAP, 1, 0), (VALUE, 4, -1), (GAP, 1, 0), (VALUE, 4, 0)) == [2]


def test_values_between_which_something_stays_are_not_spilled_in_vain():
    assert chosen(4 * PAGE, (VALUE, 3, 0), (GAP, 1, 0), (VALUE, 3, 0), (FREE, 0, 0)) is None
    assert chosen(4 * PAGE) is None


def test_room_that_is_there_needs_no_victim():
    assert chosen(4 * PAGE, (VALUE, 3, 0), (FREE, 4, 0)) == []
    assert chosen(0, (VALUE, 3, 0), (FREE, 1, 0)) == []


def test_part_of_a_page_counts_as_a_page():
    assert chosen(PAGE + 1, (FREE, 1, 0), (VALUE, 1, 0)) == [1]


def test_round_for_a_small_value_frees_more_if_that_is_possible():
    parts = [(VALUE, 2, k) for k in range(40)]
    candidates, free = layout(*parts)
    store_bytes = 32 * 20 * PAGE
    found = victims.choose(candidates, free, 100, store_bytes)
    assert found is not None
    assert [row.entry for row in found] == list(range(10))
    candidates, free = layout((VALUE, 2, 0), (GAP, 1, 0), (VALUE, 2, 1))
    assert victims.choose(candidates, free, 100, store_bytes) == [candidates[0]]


PARTS = st.lists(st.tuples(st.sampled_from([FREE, VALUE, GAP]), st.integers(1, 5), st.integers(-1, 3)), max_size=12)


@settings(deadline=None)
@given(PARTS, st.integers(1, 12))
def test_choice_is_the_cheapest_of_all_windows(parts, pages):
    candidates, free = layout(*parts)
    pieces = victims.priced(candidates, free)
    found = victims.cheapest(pieces, pages * PAGE)
    prices = [
        sum(piece.price for piece in pieces[i : j + 1])
        for i in range(len(pieces))
        for j in range(i, len(pieces))
        if _is_one(pieces[i : j + 1]) and sum(piece.nbytes for piece in pieces[i : j + 1]) >= pages * PAGE
    ]
    if found is None:
        assert not prices
    else:
        assert _is_one(found)
        assert sum(piece.nbytes for piece in found) >= pages * PAGE
        assert sum(piece.price for piece in found) == pytest.approx(min(prices))


def _is_one(pieces: list[Piece]) -> bool:
    return all(one.offset + one.nbytes == two.offset for one, two in pairwise(pieces))


@settings(deadline=None)
@given(PARTS, st.integers(0, 12), st.randoms())
def test_memory_read_while_it_changes_is_only_a_worse_choice(parts, pages, rng: random.Random):
    """The lists are read without a lock: pieces may overlap, be missing, or come twice."""
    candidates, free = layout(*parts)
    candidates = [row._replace(offset=rng.choice([row.offset, row.offset + PAGE])) for row in candidates for _ in "12"]
    free = [run for run in free if rng.random() < 0.7]
    found = victims.choose(candidates, free, pages * PAGE, STORE)
    assert found is None or {row.objref for row in found} <= {row.objref for row in candidates}


# ---- on a store ----


@pytest.fixture
def fragmentation(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "bench")
    import fragmentation

    yield fragmentation
    sys.modules.pop("fragmentation", None)


def test_large_values_leave_one_piece_behind(fragmentation):
    """Small values lie together: 1.00 of the free memory; 0.67 and 0.52 when each took the next best place."""
    rows = [fragmentation.steady(seed)[1] for seed in range(3)]
    assert min(rows) > 0.95, rows
    assert fragmentation.between(0) > 0.99


def test_room_in_one_piece_costs_less_than_the_value(fragmentation):
    """3.4 MiB for a value of 12 MiB, and 11 MiB when the oldest values go first."""
    found = [fragmentation.spilling(seed, fragmentation.cheapest) for seed in range(3)]
    other = [fragmentation.spilling(seed, fragmentation.oldest) for seed in range(3)]
    assert [refused for _, refused in found] == [0, 0, 0]
    assert sum(mib for mib, _ in found) < 0.6 * sum(mib for mib, _ in other), (found, other)
