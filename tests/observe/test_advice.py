"""Advice: each cause is told of once, where it is; and not at all where it is switched off or there is none."""

import os
import warnings

import numpy as np
import pytest

import fastrt
from fastrt.store import warnings as store_warnings


@fastrt.remote
def size_of(value, *more):
    return len(value)


@fastrt.remote
def nested(path):
    """A task that sleeps in a get, in the only worker there can be."""

    @fastrt.remote
    def inner():
        return 1

    with open(path) as pipe:  # of a fifo: until the test writes to it
        pipe.read(1)
    try:
        return fastrt.get(inner.remote(), timeout=60)
    except fastrt.GetTimeoutError:
        return "in vain"


@fastrt.remote
def nap():
    import select

    select.select([], [], [], 0.022)  # so long that who waits for it goes to sleep


@fastrt.remote
class Stepper:
    def step(self):
        return 1


@pytest.fixture(scope="module")
def rt():
    with fastrt.init(num_workers=2, object_store_memory=256 << 20, advice=True) as runtime:
        yield runtime


@pytest.fixture
def heard(rt):
    """The warnings that the test causes; what earlier tests were told is told again."""
    store_warnings.configure(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(one.message) for one in caught if issubclass(one.category, fastrt.PerformanceWarning)]


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    yield str(path), lambda: os.write(fd, b"x")
    os.close(fd)


@pytest.mark.long  # three seconds: what it tells of must last
def test_daemon_tells_of_tiny_values_and_of_workers_that_all_sleep(fifo, capfd, wait_until):
    path, release = fifo
    told = []

    def hears(words):
        told.append(capfd.readouterr().err)
        return words in "".join(told)

    # One worker, and room for no other: it sleeps while what it waits for is queued.
    with fastrt.init(num_workers=1, clients_max=3, object_store_memory=64 << 20, advice=True):
        many = [fastrt.put(k) for k in range(60_000)]
        wait_until(lambda: hears("small values that were put one by one are alive"), "word of many small values")
        del many
        waiting = nested.remote(path)
        release()
        wait_until(lambda: hears("1 of 1 workers sleep in fastrt.get inside their tasks"), "word of sleeping workers")
        assert fastrt.cancel(waiting) is None
    assert "".join(told).count("small values") == 1


def test_array_that_is_passed_by_value_again_and_again_is_told_of_once(heard):
    same = np.zeros(1 << 18)
    fastrt.get([size_of.remote(np.zeros(1 << 18)) for _ in range(15)])  # others each time
    assert heard() == []
    fastrt.get([size_of.remote(same) for _ in range(30)])
    (text,) = heard()
    assert text.startswith("the same array of 2.0 MiB was passed by value 10 times")
    assert "fastrt.put" in text


def test_large_value_that_is_no_array_is_known_by_its_content(heard):
    fastrt.get([size_of.remote([bytes(2 << 20)], k) for k in range(15)])
    assert heard() == []  # the other argument makes them different
    value = [bytes(2 << 20)]
    fastrt.get([size_of.remote(value) for _ in range(15)])
    (text,) = heard()
    assert text.startswith("the same value of 2.0 MiB")


def test_closure_that_is_huge_is_told_of_at_the_line_of_the_call(rt):
    store_warnings.configure(True)
    array = np.zeros(2 << 20)
    captures = fastrt.remote(lambda: array.nbytes)
    with pytest.warns(fastrt.PerformanceWarning, match="captures 16 MiB") as caught:
        assert fastrt.get(captures.remote()) == 16 << 20
    assert caught[0].filename == __file__


def test_gets_in_turn_are_told_of_when_workers_are_idle(heard):
    stepper = Stepper.remote()
    for _ in range(10):
        fastrt.get(stepper.step.remote())
    assert heard() == []
    turns = 0
    while not heard() and turns < 1000:
        fastrt.get(nap.remote())
        turns += 1
    assert turns >= store_warnings._LONE_GETS - 1
    (text,) = heard()
    assert "each waited for one task" in text
    assert "fastrt.get([f.remote(x) for x in many])" in text
    del stepper


def test_off_switch_keeps_all_of_it_away(heard):
    store_warnings.configure(False)
    same = np.zeros(1 << 18)
    fastrt.get([size_of.remote(same) for _ in range(15)])
    fastrt.get([size_of.remote([bytes(2 << 20)]) for _ in range(15)])
    assert heard() == []
