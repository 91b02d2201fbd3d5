"""Generators in local mode, item by item: the program and the generator take turns."""

import asyncio

import pytest

import fastrt
from fastrt.errors import TaskError
from fastrt.store import engine as engines

SEEN = []


def count(n, fail_at=None):
    for k in range(n):
        if k == fail_at:
            raise ValueError(f"no {k}")
        SEEN.append(k)
        yield k


class Counting:
    """What an engine sees of a remote function."""

    function = staticmethod(count)


def call(num_returns, *args):
    settings = {"num_returns": num_returns, "name": "count", "max_retries": 3, "retry_exceptions": False}
    return engines.current().submit(Counting(), settings, {"num_returns": num_returns}, args, {})


@pytest.fixture(autouse=True)
def local():
    SEEN.clear()
    with fastrt.init(local_mode=True) as session:
        yield session


def test_item_is_made_when_it_is_asked_for():
    stream = call("streaming", 3)
    assert SEEN == []
    assert fastrt.get(next(stream)) == 0
    assert SEEN == [0]
    assert [fastrt.get(ref) for ref in stream] == [1, 2]
    assert stream.is_finished()
    with pytest.raises(StopIteration):
        next(stream)


def test_error_is_the_last_item():
    first, last = call("streaming", 3, 1)
    assert fastrt.get(first) == 0
    with pytest.raises(ValueError, match="no 1") as info:
        fastrt.get(last)
    assert isinstance(info.value, TaskError)
    with pytest.raises(ValueError, match="no 0"):
        fastrt.get(call("streaming", 1, 0).completed())


def test_end_can_be_waited_for_before_the_items_are_read():
    stream = call("streaming", 3)
    assert fastrt.get(stream.completed()) is None
    assert SEEN == [0, 1, 2]
    assert not stream.is_finished()
    assert fastrt.get(list(stream)) == [0, 1, 2]


def test_dynamic_ones_give_a_list_of_references():
    assert fastrt.get(fastrt.get(call("dynamic", 3))) == [0, 1, 2]
    with pytest.raises(ValueError, match="no 2"):
        fastrt.get(call("dynamic", 3, 2))
    assert fastrt.get(call(2, 2)) == [0, 1]


def test_items_are_awaited():
    async def read():
        return [await ref async for ref in call("streaming", 3)]

    assert asyncio.run(read()) == [0, 1, 2]
