"""The daemon restores arguments ahead of their tasks: the decision alone, and a session whose only worker is busy."""

import random
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt.node.restore_ahead import RestoreAhead, Step
from fastrt.store import client as store_client

MIB = 1 << 20
STORE = 32 * MIB  # of which 4 MiB stay free, and 8 MiB go to the page cache


def rows(*sizes: int) -> list[tuple[int, int, int]]:
    return [(k, 100 + k, nbytes) for k, nbytes in enumerate(sizes)]


def test_arguments_are_restored_in_order_while_a_share_stays_free():
    wanted = rows(2 * MIB, 2 * MIB, 2 * MIB)
    assert RestoreAhead(STORE).decide(wanted, 8 * MIB, False) == [
        Step(0, 100, True), Step(1, 101, True), Step(2, 102, False)
    ]  # fmt: skip


def test_later_argument_does_not_take_the_room_of_an_earlier_one():
    steps = RestoreAhead(STORE).decide(rows(6 * MIB, MIB), 8 * MIB, False)
    assert steps == [Step(0, 100, False), Step(1, 101, False)]


def test_nothing_is_begun_twice_and_what_is_under_way_counts():
    ahead = RestoreAhead(STORE)
    wanted = rows(4 * MIB, 4 * MIB)
    assert ahead.decide(wanted, 8 * MIB, False) == [Step(0, 100, True), Step(1, 101, False)]
    assert ahead.decide(wanted, 8 * MIB, False) == []
    assert ahead.decide([*wanted, (9, 109, MIB)], 8 * MIB, False) == [Step(9, 109, False)]
    assert ahead.decide([], 8 * MIB, False) == []
    assert ahead.decide(wanted, 8 * MIB, False) == [Step(0, 100, True), Step(1, 101, False)]


def test_under_pressure_the_page_cache_is_used_and_only_for_its_share():
    steps = RestoreAhead(STORE).decide(rows(*[3 * MIB] * 4), STORE, True)
    assert steps == [Step(0, 100, False), Step(1, 101, False)]


def test_values_of_other_nodes_wait_for_room_and_are_begun_once_there_is_some():
    ahead = RestoreAhead(STORE, has_files=False)
    wanted = rows(6 * MIB, MIB)
    assert ahead.decide(wanted, 8 * MIB, False) == []
    assert ahead.decide(wanted, 12 * MIB, False) == [Step(0, 100, True), Step(1, 101, True)]


def test_values_of_other_nodes_come_a_quarter_of_the_store_at_a_time_and_a_larger_one_alone():
    ahead = RestoreAhead(STORE, has_files=False, at_once=4)
    wanted = rows(10 * MIB, 5 * MIB, 3 * MIB, MIB)
    assert ahead.decide(wanted, STORE, False) == [Step(0, 100, True)]
    assert ahead.decide(wanted, STORE - 10 * MIB, False) == []
    assert ahead.decide(wanted[1:], STORE - 10 * MIB, False) == [Step(1, 101, True), Step(2, 102, True)]


def test_value_that_found_no_room_after_all_is_not_tried_again_and_takes_no_room_of_others():
    ahead = RestoreAhead(STORE, has_files=False, at_once=4)
    wanted = rows(6 * MIB, 6 * MIB)
    assert ahead.decide(wanted, 12 * MIB, False) == [Step(0, 100, True)]
    ahead.found_no_room(100)
    assert ahead.decide(wanted, 12 * MIB, False) == [Step(1, 101, True)]
    assert ahead.decide([], 12 * MIB, False) == []
    assert ahead.decide(wanted[:1], 12 * MIB, False) == [Step(0, 100, True)]


def test_value_that_found_no_room_at_first_is_restored_once_there_is_room():
    ahead = RestoreAhead(STORE)
    wanted = rows(MIB, MIB)
    assert ahead.decide(wanted, STORE, True) == [Step(0, 100, False), Step(1, 101, False)]
    assert ahead.decide(wanted, STORE // 8 + MIB, False) == [Step(0, 100, True)]
    assert ahead.decide(wanted, STORE, False) == [Step(1, 101, True)]
    assert ahead.decide(wanted, STORE, False) == []


@pytest.mark.parametrize("seed", range(20))
def test_free_share_is_kept_under_random_queues(seed):
    rng = random.Random(seed)
    ahead = RestoreAhead(STORE)
    for _ in range(50):
        wanted = [(k, rng.randrange(60), rng.randrange(6 * MIB)) for k in range(rng.randrange(12))]
        free = rng.randrange(STORE)
        sizes = {objref: nbytes for _, objref, nbytes in reversed(wanted)}
        restored = sum(sizes[step.objref] for step in ahead.decide(wanted, free, False) if step.restores)
        assert restored == 0 or restored <= free - STORE // 8


# ---- a session ----


def put_arrays(first: int, count: int) -> list[fastrt.ObjectRef]:
    return [fastrt.put(np.full(MIB, k, np.uint8)) for k in range(first, first + count)]


@fastrt.remote
def gate(started: Path, end: Path) -> None:
    started.touch()
    while not end.exists():
        threading.Event().wait(0.005)


@fastrt.remote
def first_of(value: np.ndarray) -> int:
    return int(value[0])


@pytest.fixture
def busy(tmp_path, wait_until):
    """A session whose only worker is busy until the file `end` is there."""
    with fastrt.init(1, STORE, spill_dir=tmp_path / "spill", advice=False):
        ref = gate.remote(tmp_path / "started", tmp_path / "end")
        wait_until((tmp_path / "started").exists, "the gate to run")
        yield
        (tmp_path / "end").touch()  # also after a failure
        fastrt.get(ref)


def is_spilled(ref: fastrt.ObjectRef) -> bool:
    return spill.is_spilled(store_client.require().client, ref)


def spilled_objects() -> int:
    return spill.totals(store_client.require().client)["spilled_objects"]


def test_arguments_of_queued_tasks_are_restored_before_a_worker_is_free(busy, tmp_path, wait_until):
    refs = put_arrays(0, 40)
    spilled = [(k, ref) for k, ref in enumerate(refs) if is_spilled(ref)][:6]
    idle = spilled.pop()[1]
    del refs
    results = [first_of.remote(ref) for _, ref in spilled]
    wait_until(lambda: not any(is_spilled(ref) for _, ref in spilled), "the arguments to be restored")
    assert is_spilled(idle)  # no task needs it
    (tmp_path / "end").touch()
    assert fastrt.get(results) == [k for k, _ in spilled]


def test_full_store_pushes_nothing_out_for_queued_tasks(busy, tmp_path, wait_until):
    refs = put_arrays(0, 40)
    views = [fastrt.get(ref) for ref in refs if not is_spilled(ref)]
    more = put_arrays(40, 3)
    counts: deque[int] = deque(maxlen=10)
    # The daemon may be about to spill more for the last of them.
    wait_until(lambda: counts.append(spilled_objects()) or counts.count(counts[-1]) == 10, "spilling to end")
    spilled = [ref for ref in refs if is_spilled(ref)]
    inside = [ref for ref in [*refs, *more] if not is_spilled(ref)]
    before = spilled_objects()
    results = [first_of.remote(ref) for ref in spilled]
    fastrt.wait(results[:1], timeout=1.5)  # time to do it wrong: the daemon looks at the queue twice a second
    assert all(not is_spilled(ref) for ref in inside)
    assert spilled_objects() == before
    (tmp_path / "end").touch()
    assert fastrt.get(results) == [refs.index(ref) for ref in spilled]
    del views
