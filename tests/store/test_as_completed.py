"""as_completed: everything once, in the order of completion, and nothing kept."""

import os

import pytest

import fastrt
from fastrt._core.repair import fsck
from fastrt.store import client as store_client


@fastrt.remote
def echo(value):
    return value


@fastrt.remote
def until_there(path, value):
    while not os.path.exists(path):
        os.sched_yield()
    return value


def test_every_reference_comes_once_and_ready(rt):
    refs = [echo.remote(k) for k in range(2000)]
    seen = []
    for ref in fastrt.as_completed(refs):
        assert fastrt.wait([ref], timeout=0)[0] == [ref]
        seen.append(fastrt.get(ref))
    assert sorted(seen) == list(range(2000))


def test_what_is_ready_comes_before_what_is_not(rt, tmp_path):
    gate = tmp_path / "gate"
    late, early = until_there.remote(str(gate), "late"), echo.remote("early")
    order = fastrt.as_completed([late, early])
    assert fastrt.get(next(order)) == "early"
    gate.touch()
    assert fastrt.get(next(order)) == "late"
    with pytest.raises(StopIteration):
        next(order)


def test_a_reference_given_twice_comes_twice(rt):
    ref = fastrt.put(1)
    assert list(fastrt.as_completed([ref, ref])) == [ref, ref]


def test_an_error_is_ready_like_a_value(rt):
    @fastrt.remote
    def fail():
        raise KeyError("no")

    (ref,) = fastrt.as_completed([fail.remote()])
    with pytest.raises(KeyError):
        fastrt.get(ref)


def test_the_timeout_names_how_many_are_missing(rt, tmp_path):
    gate = tmp_path / "gate"
    ready, late = fastrt.put(1), until_there.remote(str(gate), 2)
    order = fastrt.as_completed([late, ready], timeout=0.05)
    assert next(order) == ready
    with pytest.raises(fastrt.GetTimeoutError, match=r"1 of 2 objects were not ready after 0\.05 s"):
        next(order)
    gate.touch()
    assert fastrt.get(late) == 2


def test_what_was_handed_out_is_not_kept(rt):
    before = fsck.usage(store_client.require().client)["objects"]
    order = fastrt.as_completed([fastrt.put(k) for k in range(100)])
    for _ in range(50):
        next(order)
    assert fsck.usage(store_client.require().client)["objects"] == before + 50


def test_what_is_no_reference_is_refused_at_once(rt):
    with pytest.raises(TypeError, match="this has a int"):
        fastrt.as_completed([fastrt.put(1), 2])


def test_nothing_gives_nothing():
    assert list(fastrt.as_completed([])) == []
