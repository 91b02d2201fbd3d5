"""The codec of small plain values: every one comes back as it was, and everything else is left to the store."""

import enum
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt._core.objects import handles, scalar
from fastrt._core.tasks import submission, tasks

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
SCALARS = st.one_of(
    st.none(), st.booleans(), INT64, st.floats(allow_nan=False), st.text(max_size=300), st.binary(max_size=300)
)
QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)


class MyInt(int):
    pass


class MyStr(str):
    __slots__ = ()


class MyBytes(bytes):
    pass


class MyFloat(float):
    pass


class Color(enum.IntEnum):
    RED = 1


NOT_SCALARS = [
    1 << 63,
    -(1 << 63) - 1,
    1 << 200,
    MyInt(1),
    MyStr("a"),
    MyBytes(b"a"),
    MyFloat(1.0),
    Color.RED,
    "\ud800",
    "ok \udfff",
    (),
    [1],
    {},
    bytearray(b"a"),
    memoryview(b"a"),
    1j,
    object(),
    int,
    ...,
]


@pytest.fixture(scope="module")
def same(module_node):
    """Put a value and read it in three ways."""

    def check(value: object) -> bool:
        ref = handles.put_scalar(module_node.client, value)
        kind, error, read = handles.read(module_node.client, ref)
        fast = handles.read_scalar(module_node.client, ref, "missing")
        listed = handles.read_scalars(module_node.client, [ref, ref], "missing")
        assert not error
        assert kind < 7
        return all(type(got) is type(value) and got == value for got in (read, fast, *listed))

    return check


@QUICK
@given(value=SCALARS)
def test_scalar_comes_back_as_it_was(same, value):
    assert same(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.0, 5e-324, "\0", "ä€😀" * 30, "x" * 16_000, b"\0" * 16_000])
def test_unusual_scalar_comes_back_as_it_was(same, value):
    assert same(value)


def test_nan_and_negative_zero_keep_their_bits(client):
    assert math.isnan(handles.read_scalar(client, handles.put_scalar(client, math.nan), None))
    assert math.copysign(1, handles.read_scalar(client, handles.put_scalar(client, -0.0), None)) == -1


@pytest.mark.parametrize("value", NOT_SCALARS, ids=lambda value: re.sub(" at 0x.*>", ">", repr(value)))
def test_value_that_is_no_scalar_is_left_alone(client, value):
    assert handles.put_scalar(client, value) is None


@pytest.mark.parametrize("value", NOT_SCALARS, ids=lambda value: re.sub(" at 0x.*>", ">", repr(value)))
def test_argument_that_is_no_scalar_is_left_alone(client, function, value):
    assert submission.submit(client, submission.TaskOptions(function), (1, value, 2)) is None


@QUICK
@given(args=st.lists(SCALARS, max_size=10).map(tuple))
def test_arguments_come_back_as_they_were(module_node, args):
    client = module_node.client
    function = handles.put_scalar(client, b"function")
    ref = submission.submit(client, submission.TaskOptions(function), args)
    size = sum(
        8 + (len(a.encode() if isinstance(a, str) else a) + 7) // 8 * 8
        if isinstance(a, (str, bytes))
        else 8
        if a is None or isinstance(a, bool)
        else 16
        for a in args
    )
    if ref is None:
        assert size > 2048
        return
    task = tasks.next_task(client, 0.0, 0.0)
    kind, got, refs = tasks.arguments(client, task)
    assert (kind, refs) == (1, [])
    assert got == args
    assert [type(a) for a in got] == [type(a) for a in args]
    assert tasks.finish_scalar(client, task, None)


@pytest.mark.parametrize(("nbytes", "fits"), [(2040, True), (2041, False), (4000, False)])
def test_arguments_above_the_room_are_left_to_the_store(client, function, nbytes, fits):
    ref = submission.submit(client, submission.TaskOptions(function), (b"x" * nbytes,))
    assert (ref is not None) is fits
    if fits:
        task = tasks.next_task(client, 0.0, 0.0)
        assert tasks.arguments(client, task)[1] == (b"x" * nbytes,)
        tasks.finish_scalar(client, task, None)


def test_arguments_may_mix_scalars_and_references(client, function):
    a, b = handles.put_scalar(client, "a"), handles.put_scalar(client, "b")
    submission.submit(client, submission.TaskOptions(function), (1, b, "x", a, b, None))
    task = tasks.next_task(client, 0.0, 0.0)
    _, args, refs = tasks.arguments(client, task)
    assert args == (1, b, "x", a, b, None)
    assert refs == [b, a, b]
    tasks.finish_scalar(client, task, None)


PLAIN = [None, True, 1, 1 << 100, 2.5, "a", b"a", (), [1, ("a", {2: [None]})], {"a": 1, 2: {b"b": 3.0}}]
NOT_PLAIN = [
    MyInt(1),
    [MyStr("a")],
    {1: object()},
    {Color.RED: 1},
    {1, 2},
    bytearray(b""),
    [int],
    list(range(10_001)),
    print,
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_value_is_plain(value):
    assert scalar.is_plain(value)


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda v: repr(v)[:20])
def test_value_that_names_code_or_is_long_is_not_plain(value):
    assert not scalar.is_plain(value)


def test_value_that_contains_itself_is_not_plain():
    value: list[object] = []
    value.append(value)
    assert not scalar.is_plain(value)
