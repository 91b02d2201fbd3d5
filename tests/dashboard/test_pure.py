"""The parts of the dashboard that compute: causes, sections, slices, rates."""

from collections import deque

import pytest

from fastrt.dashboard import log_readers, recorder, sections
from fastrt.dashboard.causes import Load, advice, limit
from fastrt.dashboard.recorder import Slice
from fastrt.dashboard.watched import Rates, Sample
from fastrt.node.log_files import LogLine
from fastrt.observe.ended import Failure, Outcome, grouped
from fastrt.tasks.marks import Source


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load(2, busy=2, ready=5), "All 2 workers are busy, and 5 tasks are ready"),
        (Load(2, busy=1, blocked=1, ready=1), "1 worker is waiting in fastrt.get inside of tasks"),
        (Load(2, for_resources=3), "3 tasks are waiting for resources"),
        (Load(4, busy=1, for_values=3), "3 tasks are waiting for values of 1 running task:"),
        (Load(2, busy=1, rate=9000.0), "The driver: 1 worker is idle"),
        (Load(2, busy=1), "1 task is running and none waits"),
        (Load(2, calls=2), "2 tasks are running and none waits"),
        (Load(2, blocked=1), "1 task is waiting in fastrt.get, and nothing else runs"),
        (Load(2), "Nothing runs"),
        (Load(0), "Nothing runs"),
        (Load(2, busy=2, ready=5, is_spilling=True), "The store is full"),
    ],
)
def test_limit_names_the_cause(load, words):
    assert words in limit(load)


def test_changes_hold_what_differs():
    one, two = sections.text("a", "x"), sections.text("b", "y")
    assert sections.changes({}, [one, two]) == {"order": ["a", "b"], "set": [one, two]}
    assert sections.changes({"a": one, "b": two}, [one, two]) == {"order": ["a", "b"], "set": []}
    new = sections.text("a", "z")
    assert sections.changes({"a": one, "b": two}, [new]) == {"order": ["a"], "set": [new]}


def test_long_texts_are_cut():
    cell = sections.table("t", "t", [("a", "text")], [["x" * 1000]], "")["rows"][0][0]
    assert len(cell) == 303
    shown = sections.lines("l", "l", "first\n" + "x" * 30_000 + "last")["text"]
    assert shown.endswith("last")
    assert len(shown) < 21_000


def test_slices_of_one_moment_are_drawn_as_one():
    slices = [Slice(k * 10, k * 10 + 9, "fast") for k in range(1000)]
    found = recorder.drawn(slices, 0, 10_000, 10)
    assert len(found) == 10
    assert [row[0] for row in found] == [k / 10 for k in range(10)]
    assert found[0][3].startswith("100 x fast: ")
    assert all(0 <= start <= 1 and start + length <= 1 for start, length, _, _ in found)


def test_slices_outside_are_left_out_and_long_ones_are_cut():
    slices = [Slice(0, 5, "before"), Slice(0, 150, "long"), Slice(120, 300, "open"), Slice(250, 260, "after")]
    found = recorder.drawn(slices, 100, 200, 100)
    assert [(start, length) for start, length, _, _ in found] == [(0.0, 0.5), (0.2, 0.8)]


def test_rates_are_never_negative():
    before, after = Sample(10.0, done=100, cpu_s=5.0), Sample(12.0, done=300, cpu_s=4.0, spilled=10)
    assert Rates.between(before, after) == Rates(100.0, 0.0, 5.0)
    assert Rates.between(after, after) == Rates(0.0, 0.0, 0.0)


def failed(number, name, lines, kind="ValueError", signal=0):
    text = "".join(f'  File "/a/{file}", line {line}, in f\n    x = \'File "no", line 1\'\n' for file, line in lines)
    return Failure(number, 0.0, "0", "", name, None, kind, "no", text, 1, 0, False, False, signal, 1, "")


def test_failures_are_grouped_by_the_line_that_raised():
    some = [
        failed(1, "f", [("main.py", 3), ("lib.py", 7)]),
        failed(2, "f", [("other.py", 4), ("lib.py", 7)]),
        failed(3, "f", [("lib.py", 8)]),
        failed(4, "f", [("lib.py", 7)], "KeyError"),
        failed(5, "g", [], "WorkerCrashedError", 9),
        failed(6, "f", [("lib.py", 8)]),
    ]
    assert [one.place for one in some[:3]] == ["/a/lib.py:7", "/a/lib.py:7", "/a/lib.py:8"]
    assert [[one.number for one in group] for group in grouped(some)] == [[3, 6], [5], [4], [1, 2]]
    assert some[4].place == ""


def test_log_lines_fit_on_a_page():
    lines = [LogLine(0.0, False, 1, Source(), f"{k}\x1b[1;31m\x07" + "x" * 5000) for k in range(400)]
    found = log_readers.fitting(deque(lines))
    assert 40 < len(found) < 60
    assert found[-1].text == f"399{'x' * 1997}... (5,003 characters)"


@pytest.mark.parametrize(
    ("load", "outcomes", "words"),
    [
        (Load(2, impossible=1), [], "1 task or actor can never start"),
        (Load(2, impossible=2), [], "2 tasks and actors can never start"),
        (Load(2), [Outcome("f", crashed=3), Outcome("g", crashed=1)], "tasks of f (3), g (1)"),
        (Load(2), [Outcome("f", succeeded=80, retried=10)], "More than a tenth of the attempts of f"),
        (Load(2, used=95, room=100), [], "The store is 95 % full"),
    ],
)
def test_advice_names_the_cause(load, outcomes, words):
    (found,) = advice(load, outcomes)
    assert words in found


def test_advice_is_not_given_without_a_cause():
    assert advice(Load(2, used=80, room=100), [Outcome("f", succeeded=95, retried=5)]) == []
    assert advice(Load(2, used=95, room=100, is_spilling=True), []) == []
