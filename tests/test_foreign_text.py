"""Text of unknown origin: what is malformed or exceeds a bound raises one error, and nothing else comes out."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt.errors import FastrtError
from fastrt.foreign_text import ForeignTextError, read_int, read_json, read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip

HOSTILE = {
    "brackets": b"[" * 4000,
    "objects": b'{"a":' * 4000,
    "paired brackets": b"[" * 4000 + b"]" * 4000,
    "brackets behind an open string": b'["' + b"[" * 4000,
    "digits": b"1" * 41,
    "a million digits": b"1" * 60_000,
    "NaN": b"NaN",
    "infinity": b"[-Infinity]",
    "a float beyond the range": b"1e999",
    "surrogate": b'"\\ud800"',
    "surrogate as a key": b'{"\\uDfff": 1}',
    "duplicate key": b'{"rank": 0, "rank": 1}',
    "not UTF-8": b'"\xff"',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "empty": b"",
    "NUL": b"\0",
    "trailing text": b"{} {}",
    "control character": b'"\n"',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused_with_the_name_of_the_text(data: bytes) -> None:
    with pytest.raises(ForeignTextError, match="the greeting"):
        read_json(data, "the greeting")


def test_refusal_is_an_error_of_fastrt_and_a_wrong_value() -> None:
    assert issubclass(ForeignTextError, FastrtError)
    assert issubclass(ForeignTextError, ValueError)


def test_long_text_is_refused_before_it_is_parsed() -> None:
    for data in (b" " * 101, " " * 101, memoryview(b" " * 101)):
        with pytest.raises(ForeignTextError, match="101 bytes; at most 100"):
            read_json(data, "x", bytes_max=100)


def test_depth_counts_brackets_outside_of_strings_only() -> None:
    wide = [['[[[[{{{{\\"' for _ in range(40)] for _ in range(40)]
    assert read_json(json.dumps(wide), "x", depth_max=2) == wide
    with pytest.raises(ForeignTextError, match="deeper than 1 levels"):
        read_json(json.dumps(wide), "x", depth_max=1)


@pytest.mark.parametrize("piece", ['"', '\\"', '"\\', "[", "]", '"[', "{}", "[]", "\\", '"a":'])
def test_time_to_refuse_grows_with_the_length_only(piece: str) -> None:
    data = "[" * 33 + piece * (1_000_000 // len(piece))
    begun = time.process_time()
    with pytest.raises(ForeignTextError):
        read_json(data, "x", bytes_max=1 << 21)
    assert time.process_time() - begun < 1.0


def test_text_too_deep_for_the_stack_is_refused_as_other_deep_text() -> None:
    deep = "[" * 500_000 + "]" * 500_000
    with pytest.raises(ForeignTextError, match="nests"):
        read_json(deep, "x", bytes_max=1 << 20, depth_max=1 << 20)


@settings(deadline=None)
@given(VALUES)
def test_json_of_our_own_comes_back_as_it_was(value: object) -> None:
    assert read_json(json.dumps(value), "x") == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode(), "x") == value


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]{}":,\\u d8019eE.-+NaInfty', max_size=200))
def test_any_text_gives_a_value_or_the_one_error(data: bytes | str) -> None:
    try:
        value = read_json(data, "x", depth_max=4)
    except ForeignTextError:
        return
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("text", ["[" * 4000, "[" * 40 + "]" * 40, "{", " " * (1 << 17), "\ud800"])
def test_text_of_our_own_is_bounded_too(text: str) -> None:
    with pytest.raises(ForeignTextError):
        read_json(text, "x", own=True)


def test_text_of_our_own_may_have_infinite_times_and_names_of_any_bytes() -> None:
    mine = {"timeout": float("inf"), "path": "/tmp/\udcff"}
    assert read_json(json.dumps(mine), "x", own=True) == mine


FIELDS = {"rank": int, "name": str, "node": (str, type(None)), "on": bool}
RIGHT = {"rank": 1, "name": "a", "node": None, "on": True, "more": []}


def test_object_with_the_right_fields_is_taken() -> None:
    assert read_object(json.dumps(RIGHT), "x", FIELDS) == RIGHT


@pytest.mark.parametrize(
    ("change", "words"),
    [({"rank": True}, "'rank' must be int, and is bool"), ({"rank": "1"}, "must be int, and is str"),
     ({"node": 1}, "must be str or null"), ({"on": 1}, "must be bool, and is int")],
)  # fmt: skip
def test_field_of_another_type_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ForeignTextError, match=words):
        read_object(json.dumps(RIGHT | change), "x", FIELDS)


def test_what_is_no_object_or_lacks_a_field_is_refused() -> None:
    with pytest.raises(ForeignTextError, match="no JSON object"):
        read_object("[]", "x")
    with pytest.raises(ForeignTextError, match="no field 'rank'"):
        read_object("{}", "x", FIELDS)


def test_whole_number_in_range_is_read() -> None:
    assert [read_int(text, "x", -5, 70_000) for text in ("0", b"65535", "-5", b"007")] == [0, 65535, -5, 7]


@pytest.mark.parametrize(
    "text",
    ["", " 1", "1 ", "1\n", "1_0", "+1", "--1", "0x1", "1.0", "\u0662", "\xb2", b"\xb2", "-1", "65536", "9" * 5000],
)
def test_what_is_no_whole_number_in_range_is_refused(text: str | bytes) -> None:
    with pytest.raises(ForeignTextError):
        read_int(text, "x", 0, 65535)
