"""How much is spilled and when a round ends: the state machine alone, with a clock of its own."""

import random

import pytest

from fastrt.node.spill_plan import SpillPlan

MIB = 1 << 20
STORE = 64 * MIB  # of which 16 MiB are freed ahead


def test_round_ends_when_the_first_request_is_met():
    plan = SpillPlan(STORE, 2)
    plan.ask(2 * MIB, 0.0)
    assert plan.wants(0, 0.0)
    plan.begun(MIB)
    plan.ended(MIB, MIB, "", 0.1)
    assert plan.end_round(False) is None
    plan.begun(MIB)
    plan.ended(MIB, MIB, "", 0.2)
    assert plan.end_round(False) == (2 * MIB, "")
    assert plan.end_round(True) is None


def test_part_of_the_piece_that_was_free_is_not_spilled_and_not_reported():
    plan = SpillPlan(STORE, 2)
    plan.ask(12 * MIB, 0.0)
    plan.ask(MIB, 0.0)
    assert plan.piece == 12 * MIB
    plan.was_free(10 * MIB)
    assert plan.end_round(False) is None  # the piece is not complete
    plan.begun(2 * MIB)
    plan.ended(2 * MIB, 2 * MIB, "", 0.0)
    assert plan.end_round(False) == (2 * MIB, "")
    plan.ask(12 * MIB, 0.0)
    plan.was_free(10 * MIB)
    plan.begun(2 * MIB)
    plan.ended(2 * MIB, 0, "the disk is full", 0.0)
    assert plan.end_round(False) == (0, "the disk is full")


def test_all_that_wait_are_served_by_one_round_and_ask_again():
    plan = SpillPlan(STORE, 8)
    for nbytes in (MIB, 3 * MIB):
        plan.ask(nbytes, 0.0)
    for _ in range(4):
        assert plan.wants(STORE, 0.0)  # for the sum
        plan.begun(MIB)
    assert not plan.wants(STORE, 0.0)
    plan.ended(MIB, MIB, "", 0.0)
    assert plan.end_round(False) == (MIB, "")
    plan.ask(3 * MIB, 0.0)
    assert not plan.wants(STORE, 0.0)  # as much is under way


def test_no_more_values_are_under_way_than_allowed():
    plan = SpillPlan(STORE, 2)
    plan.ask(STORE, 0.0)
    for _ in range(2):
        assert plan.wants(0, 0.0)
        plan.begun(1)
    assert not plan.wants(0, 0.0)


def test_values_are_spilled_ahead_for_a_moment_only_and_for_a_share_of_the_store_only():
    plan = SpillPlan(STORE, 100)
    assert not plan.wants(0, 0.0)
    plan.ask(4 * MIB, 0.0)
    plan.dropped(4 * MIB)
    assert plan.end_round(False) == (4 * MIB, "")
    assert plan.wants(16 * MIB - 1, 0.05)
    assert not plan.wants(16 * MIB, 0.05)
    plan.begun(16 * MIB)
    assert not plan.wants(0, 0.05)
    assert plan.is_pressed(0.05)
    assert not plan.is_pressed(0.11)
    plan.ended(16 * MIB, 16 * MIB, "", 0.12)
    assert not plan.wants(0, 0.12)


def test_small_requests_free_little_ahead():
    plan = SpillPlan(STORE, 4)
    plan.ask(0, 0.0)
    plan.dropped(1000)
    assert plan.end_round(False) == (1000, "")
    assert not plan.wants(4, 0.0)


def test_round_without_a_value_to_spill_ends_at_once_and_nothing_is_spilled_ahead():
    plan = SpillPlan(STORE, 2)
    plan.ask(MIB, 0.0)
    assert plan.end_round(True) == (0, "")
    assert not plan.is_pressed(0.0)


def test_round_without_another_value_waits_for_those_under_way():
    plan = SpillPlan(STORE, 2)
    plan.ask(MIB, 0.0)
    plan.begun(1000)
    assert plan.end_round(True) is None
    plan.ended(1000, 0, "", 0.0)  # pinned meanwhile
    assert plan.end_round(True) == (0, "")


def test_trouble_ends_the_round_when_nothing_is_under_way():
    plan = SpillPlan(STORE, 2)
    plan.ask(2 * MIB, 0.0)
    plan.begun(MIB)
    plan.begun(MIB)
    plan.ended(MIB, 0, "the disk is full", 0.0)
    assert not plan.wants(0, 0.0)
    assert plan.end_round(False) is None
    plan.ended(MIB, MIB, "", 0.0)
    assert plan.end_round(False) == (MIB, "the disk is full")
    assert not plan.is_pressed(0.0)
    plan.ask(MIB, 0.0)
    assert plan.wants(0, 0.0)  # another round tries again


@pytest.mark.parametrize("seed", range(50))
def test_under_random_events_each_request_is_answered_and_little_is_spilled_beyond_them(seed):
    rng = random.Random(seed)
    plan = SpillPlan(STORE, rng.randrange(1, 5))
    under_way: list[int] = []
    now, asked, spilled, left, waiting = 0.0, 0, 0, rng.randrange(60), False
    for _ in range(400):
        now += rng.random() * 0.05
        if rng.random() < 0.2:
            nbytes = rng.randrange(4 * MIB)
            plan.ask(nbytes, now)
            asked, waiting = asked + nbytes, True
        elif under_way:
            nbytes = under_way.pop(rng.randrange(len(under_way)))
            freed = nbytes if rng.random() < 0.9 else 0
            plan.ended(nbytes, freed, "" if freed or rng.random() < 0.5 else "trouble", now)
        exhausted = False
        while not exhausted and plan.wants(0, now):
            exhausted = not left
            if left:
                left -= 1
                under_way.append(rng.randrange(1, 2 * MIB))
                spilled += under_way[-1]
                plan.begun(under_way[-1])
        if plan.end_round(exhausted) is not None:
            waiting = False
        assert under_way or not waiting, "a client waits, and nothing is under way"
    assert spilled <= asked + 400 * (STORE // 4)


def test_nothing_is_spilled_twice_for_one_request():
    plan = SpillPlan(STORE, 8)
    spilled = 0
    plan.ask(MIB, 0.0)
    while plan.wants(STORE - spilled, 0.0):
        plan.begun(MIB // 4)
        spilled += MIB // 4
    assert spilled == MIB
