"""Priorities: which of the ready tasks is run next, on one worker, and what is refused."""

import os
import threading
from pathlib import Path

import pytest

import fastrt


@pytest.fixture(scope="module")
def rt(runtime_dir):
    folders = {"runtime_dir": runtime_dir, "spill_dir": runtime_dir.parent / "spill"}
    with fastrt.init(1, "64MiB", resources={"seat": 1}, **folders) as runtime:
        yield runtime


def note(path, word, until=None):
    """Append a word to a file, and end when another file is there."""
    with Path(path).open("a") as file:
        file.write(f"{word} ")
    while until is not None and not Path(until).exists():
        threading.Event().wait(0.002)


def notes(path, word):
    note(path, word)
    yield word


class Gate:
    """Keeps the only worker busy until it is opened, and says in which order tasks have run since."""

    def __init__(self, folder, wait_until, **options):
        self.path, self.end, self.refs = folder / "order", folder / "end", []
        self.note = fastrt.remote(**options)(note)
        self.first = self.note.options(priority=100).remote(self.path, "gate", self.end)
        wait_until(lambda: self.path.exists() and "gate" in self.path.read_text(), "the gate to run", 30)

    def submit(self, word, *more, **options):
        self.refs.append(self.note.options(**options).remote(self.path, word, *more))

    def order(self):
        """What ran, once all has."""
        self.end.touch()
        fastrt.get([self.first, *self.refs], timeout=30)
        return self.path.read_text().split()[1:]


def test_ready_tasks_are_run_by_priority_and_then_as_submitted(rt, tmp_path, wait_until):
    gate = Gate(tmp_path, wait_until)
    gate.submit("plain")
    gate.submit("low", priority=-1)
    gate.submit("high", priority=5)
    generator = fastrt.remote(priority=4, num_returns="dynamic")(notes)
    gate.refs.append(generator.remote(gate.path, "generator"))
    gate.submit("high2", priority=5, retry_exceptions=[ValueError])
    gate.submit("plain2", priority=0)
    gate.submit("higher", priority=6)
    rows = fastrt.list_tasks(state="ready")
    assert sorted(row["priority"] for row in rows) == [-1, 0, 0, 4, 5, 5, 6]
    assert gate.order() == ["higher", "high", "high2", "generator", "plain", "plain2", "low"]


def test_task_whose_argument_comes_late_takes_its_turn_when_it_is_ready(rt, tmp_path, wait_until):
    gate = Gate(tmp_path, wait_until)
    gate.submit("made", priority=-5)
    user = fastrt.remote(priority=9)(lambda path, _: note(path, "user"))
    gate.refs.append(user.remote(gate.path, gate.refs[0]))
    gate.submit("before", priority=8)
    gate.submit("after", priority=-6)
    assert gate.order() == ["before", "made", "user", "after"]


def test_task_that_runs_again_keeps_its_priority(rt, tmp_path, wait_until):
    gate = Gate(tmp_path, wait_until)

    @fastrt.remote(retry_exceptions=True, priority=3)
    def fail(path):
        note(path, "fail")
        if Path(path).read_text().count("fail") < 3:
            raise ValueError

    @fastrt.remote(priority=3)
    def die(path):
        note(path, "die")
        if Path(path).read_text().count("die") < 2:
            os.kill(os.getpid(), 9)

    gate.submit("other", priority=2)
    gate.refs += [fail.remote(gate.path), die.remote(gate.path)]
    gate.submit("last")
    assert gate.order() == ["fail", "fail", "fail", "die", "die", "other", "last"]


def test_held_tasks_are_admitted_by_priority(rt, tmp_path, wait_until):
    """They wait for one seat, and those of another demand for the same."""
    gate = Gate(tmp_path, wait_until, resources={"seat": 1})
    gate.submit("low", priority=-1)
    gate.submit("plain")
    gate.submit("high", priority=1)
    gate.submit("other", priority=2, resources={"seat": 0.9})
    gate.submit("high2", priority=1)
    wait_until(lambda: len(fastrt.list_tasks(waits_for="resources")) == 5, "all to be held", 30)
    assert gate.order() == ["other", "high", "high2", "plain", "low"]


def test_streams_and_cancelled_tasks_keep_the_order(rt, tmp_path, wait_until):
    gate = Gate(tmp_path, wait_until)

    @fastrt.remote(priority=2)
    def items(path):
        note(path, "items")
        yield 1

    stream = items.remote(gate.path)
    gate.submit("gone", priority=7)
    gate.submit("stays", priority=1)
    assert fastrt.cancel(gate.refs.pop(0)) is None
    assert gate.order() == ["items", "stays"]
    assert fastrt.get(list(stream)) == [1]


@fastrt.remote
class Counter:
    def count(self):
        return 1


def test_wrong_use_is_refused_at_the_call(rt):
    for value, error, words in (
        (101, ValueError, "priority is 101; it must be from -100 to 100"),
        (-101, ValueError, "must be from -100"),
        (1.5, TypeError, "priority is 1.5; it must be a whole number"),
        (True, TypeError, "must be a whole number"),
        ("high", TypeError, "must be a whole number"),
    ):
        with pytest.raises(error, match=words):
            fastrt.remote(priority=value)(note)
        with pytest.raises(error, match=words):
            fastrt.remote(note).options(priority=value)
    counter = Counter.remote()
    for wrong in (
        lambda: fastrt.method(priority=1),
        lambda: counter.count.options(priority=1),
        lambda: Counter.options(priority=1),
        lambda: fastrt.remote(priority=1)(Counter.cls),
    ):
        with pytest.raises(TypeError, match="an actor's calls have no priority"):
            wrong()
    assert fastrt.get(counter.count.remote()) == 1
    settings = fastrt.remote(priority=3)(note).options(num_cpus=2).options(max_retries=1)._settings.given
    assert (settings["priority"], settings["num_cpus"]) == (3, 2)
    assert fastrt.remote(priority=3)(note).options(priority=0)._settings.priority == 0
