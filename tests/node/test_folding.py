"""Repeated lines of workers' output: the first passes, the others become one line with their number."""

import pytest

from fastrt.node.folding import WINDOW_S, Folding
from fastrt.node.logs import Printed
from fastrt.tasks.marks import Source


class Time:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def folding(clock):
    return Folding(clock)


def shown(folding, pid, *lines, is_error=False, is_update=False):
    printed = Printed(list(lines), is_error, Source(1, "work"), pid, is_update)
    return [line for one in folding.take(printed) for line in one.text().splitlines()]


def due(folding):
    return [line for one in folding.due() for line in one.text().splitlines()]


def test_line_that_many_processes_print_appears_once_and_then_with_its_number(folding, clock):
    assert shown(folding, 1, "careful") == ["(work pid=1) careful"]
    for pid in range(2, 39):
        assert shown(folding, pid, "careful") == []
    assert due(folding) == []
    clock.now += WINDOW_S
    assert due(folding) == ["(work pid=38) careful [repeated 37x by 38 processes]"]
    clock.now += WINDOW_S
    assert due(folding) == []
    assert shown(folding, 1, "careful") == ["(work pid=1) careful"]


def test_single_repetition_is_shown_as_itself(folding):
    shown(folding, 1, "done")
    shown(folding, 2, "done")
    assert [one.text() for one in folding.rest()] == ["(work pid=2) done\n"]
    assert list(folding.rest()) == []


def test_process_that_repeats_its_line_is_folded_and_one_that_alternates_is_not(folding, clock):
    assert shown(folding, 1, "----", "a", "----", "b", "----") == [
        f"(work pid=1) {line}" for line in ("----", "a", "----", "b", "----")
    ]
    assert shown(folding, 1, "tick", "tick", "tick") == ["(work pid=1) tick"]
    clock.now += WINDOW_S
    assert due(folding) == ["(work pid=1) tick [repeated 2x]"]


def test_line_that_goes_on_and_on_appears_once_in_a_window(folding, clock):
    seen = []
    for _ in range(100):
        seen += shown(folding, 1, "tick")
        clock.now += WINDOW_S / 10
    assert len(seen) in (10, 11)
    assert seen[1] == "(work pid=1) tick [repeated 9x]"


@pytest.mark.parametrize("line", ["", "   ", "x" * 2000])
def test_empty_and_very_long_lines_pass(folding, line):
    assert len(shown(folding, 1, line, line)) == 2


def test_stdout_and_stderr_and_updates_of_bars_are_apart(folding):
    assert shown(folding, 1, "x") == ["(work pid=1) x"]
    assert shown(folding, 2, "x", is_error=True) == ["(work pid=2) x"]
    assert shown(folding, 3, "x", is_update=True) == shown(folding, 3, "x", is_update=True) == ["(work pid=3) x"]


def test_different_lines_take_bounded_memory_and_no_count_is_lost(folding):
    shown(folding, 1, "first")
    shown(folding, 2, "first")
    told = [line for k in range(10_000) for line in shown(folding, 1, f"line {k}") if "first" in line]
    assert told == ["(work pid=2) first"]
    assert len(folding._seen) <= 4096
