"""Values as `Obj` messages, and what arrives as one but is none."""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt.errors import SerializationError
from fastrt.store.serialize import serialize
from fastrt.transfer import obj

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([1 << 13_000, "\ud800", {1, 2}, 3j]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
ARRAYS = [np.dtype(code) for code in "?bBhHiIlLqQfd"]


@settings(deadline=None)
@given(PLAIN)
def test_value_comes_back_as_it_was(value: Any) -> None:
    found = obj.from_bytes(obj.to_bytes(value), True)
    assert found == value
    assert type(found) is type(value)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_a_value_or_an_error_of_ours(data: bytes) -> None:
    try:
        obj.from_bytes(data, False)
    except (obj.ObjError, obj.UntrustedPickleError):
        pass


@pytest.mark.parametrize("dtype", ARRAYS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 4), (3, 0)])
def test_array_comes_back_as_it_was(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) * 3 - 5).astype(dtype).reshape(shape)
    message = obj.to_obj(array)
    assert message.array_data.dtype == dtype.num
    found = obj.from_obj(message, False)
    assert (found.dtype, found.shape, type(found)) == (dtype, shape, np.ndarray)
    np.testing.assert_array_equal(found, array)
    if not shape:
        found = obj.from_bytes(obj.to_bytes(array[()]), False)
        assert (found, type(found)) == (array[()], dtype.type)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=">i4"), np.arange(12).reshape(3, 4).T, np.arange(10)[::3],
        np.array([1, "a", None], dtype=object), np.ones(3, np.complex128), np.array(["text"]),
        np.zeros(3, [("a", "i4")]), np.array(["2020-01-01"], "M8[D]"), np.ones(4, np.float16),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_other_arrays_come_back_equal(array: np.ndarray) -> None:
    np.testing.assert_array_equal(obj.from_bytes(obj.to_bytes(array), True), array)


def test_text_of_a_seed_client_is_text_and_bytes_are_bytes() -> None:
    message = obj.Obj()
    message.string_data.data = "gr\u00fc\u00df".encode()
    assert obj.from_obj(message, False) == "gr\u00fc\u00df"
    message.string_data.data = b"\xff"
    assert obj.from_obj(message, False) == b"\xff"
    for data in (b"", b"text", b"\xff"):
        assert obj.from_obj(obj.to_obj(data), False) == data
    message.unicode_data.data = "later"
    message.ClearField("string_data")
    assert obj.from_obj(message, False) == "later"


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickle_of_a_stranger_is_never_opened(tmp_path: Path) -> None:
    message = obj.Obj()
    message.list_data.elem.add().pyobj_data.data = pickle.dumps(Canary(tmp_path / "sang"))
    with pytest.raises(obj.UntrustedPickleError, match="has not shown the session's token"):
        obj.from_obj(message, False)
    assert not (tmp_path / "sang").exists()
    obj.from_obj(message, True)
    assert (tmp_path / "sang").exists()


def nested(depth: int) -> Any:
    message = obj.Obj()
    inner = message
    for _ in range(depth):
        inner = inner.list_data.elem.add()
    inner.empty_data.SetInParent()
    return message


def array(**fields: Any) -> Any:
    return obj.Obj(array_data=fields)


BAD = {
    "no field": (obj.Obj(), "has 0 fields set"),
    "two fields": (obj.Obj(int_data={"data": 1}, bool_data={"data": True}), "has 2 fields set"),
    "too deep": (nested(40), "nested more than 30 deep"),
    "an element without a field": (obj.Obj(list_data={"elem": [{}]}), "has 0 fields set"),
    "an unhashable key": (
        obj.Obj(dict_data={"elem": [{"key": {"list_data": {}}, "value": {"empty_data": {}}}]}),
        "key of type list",
    ),
    "no digits": (obj.Obj(long_data={"data": "0x10"}), "not a decimal number"),
    "too many digits": (obj.Obj(long_data={"data": "9" * 5000}), "not a decimal number"),
    "an unknown type": (array(shape=[1], dtype=99, double_data=[1.0]), "type number 99"),
    "a wrong shape": (array(shape=[3], dtype=12, double_data=[1.0]), r"shape \[3\] has 1 elements in double_data"),
    "data in another field": (array(shape=[1], dtype=12, float_data=[1.0]), "has 0 elements in double_data"),
    "a shape that wraps": (array(shape=[1 << 63, 2], dtype=12), "has 0 elements"),
    "a huge empty shape": (array(shape=[1] * 100 + [0], dtype=12), "has 0 elements"),
    "out of range": (array(shape=[1], dtype=1, int_data=[300]), "int8 has an element out of its range"),
    "a reference": (obj.Obj(objref_data={"data": 5}), "references are not known here"),
    "a broken pickle": (obj.Obj(pyobj_data={"data": b"\x80\x04."}), "cannot be unpickled"),
}


@pytest.mark.parametrize(("message", "match"), BAD.values(), ids=BAD.keys())
def test_message_that_says_no_value_is_refused(message: Any, match: str) -> None:
    with pytest.raises(obj.ObjError, match=match):
        obj.from_bytes(message.SerializeToString(), True)


def test_deep_value_goes_as_a_pickle() -> None:
    value: Any = None
    for _ in range(200):
        value = [value]
    assert obj.from_bytes(obj.to_bytes(value), True) == value


def test_unpicklable_value_says_so() -> None:
    with pytest.raises(SerializationError, match="pickle"):
        obj.to_bytes(x for x in ())


@pytest.mark.parametrize("value", ["text", b"bytes", {"a": 1}, np.arange(5000.0), [np.arange(3000), b"x" * 9000]])
def test_envelope_is_recognised_and_is_a_pickle_for_everybody_else(value: Any) -> None:
    if isinstance(value, (str, bytes)):
        kind, data = (5, value.encode()) if isinstance(value, str) else (6, value)
    else:
        parts = serialize(value)
        kind, data = parts.kind, parts.to_bytes()
    head = obj.envelope(kind, False, len(data))
    whole = head + data + obj.TAIL
    assert obj.opened(whole, len(whole)) == (kind, False, len(data), len(head))
    assert obj.opened(whole[: len(head)], len(whole)) == (kind, False, len(data), len(head))
    assert obj.opened(whole, len(whole) + 1) is None
    assert obj.opened(b"x" + whole, len(whole) + 1) is None
    np.testing.assert_equal(obj.from_bytes(whole, True), value)
    np.testing.assert_equal(pickle.loads(obj.Obj.FromString(whole).pyobj_data.data), value)


@settings(deadline=None)
@given(st.integers(0, 20), st.booleans(), st.integers(0, 1 << 40), st.integers(-3, 3), st.integers(0, 130))
def test_envelope_is_recognised_as_written_only(kind: int, is_error: bool, nbytes: int, off: int, cut: int) -> None:
    head = obj.envelope(kind, is_error, nbytes)
    total = len(head) + nbytes + len(obj.TAIL) + off
    expected = (kind, is_error, nbytes, len(head)) if off == 0 and cut >= len(head) and obj.is_raw(kind) else None
    assert obj.opened(head[:cut], total) == expected


def test_error_in_an_envelope_is_raised_where_it_is_opened() -> None:
    parts = serialize(KeyError("there"))
    data = parts.to_bytes()
    whole = obj.envelope(parts.kind, True, len(data)) + data + obj.TAIL
    with pytest.raises(obj.ObjError, match="KeyError"):
        obj.from_bytes(whole, True)
