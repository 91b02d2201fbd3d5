"""Ids: texts of hex digits with the methods of Ray's."""

import json
import pickle

import pytest

from fastrt import ObjectRef, ids
from fastrt.errors import UnsupportedError

BYTES = {
    ids.ActorID: 16, ids.JobID: 4, ids.NodeID: 28, ids.PlacementGroupID: 18, ids.TaskID: 24, ids.UniqueID: 28,
    ids.WorkerID: 28,
}  # fmt: skip


@pytest.mark.parametrize("kind", BYTES)
def test_id_is_its_digits_and_its_bytes_of_rays_number(kind):
    digits = "00Ab" + "0" * (2 * BYTES[kind] - 4)
    one = kind.from_hex(digits)
    value = b"\x00\xab" + bytes(BYTES[kind] - 2)
    assert (one, one.hex(), one.binary(), one.size()) == (digits.lower(), digits.lower(), value, BYTES[kind])
    assert kind.from_binary(value) == one == kind(one) == kind(value) == kind.widened("00ab")
    assert repr(one) == f"{kind.__name__}({digits.lower()})"
    assert {one: 1}[digits.lower()] == 1
    assert json.loads(json.dumps(one)) == one
    again = pickle.loads(pickle.dumps(one))
    assert type(again) is kind
    assert again == one
    assert kind.nil().is_nil()
    assert not one.is_nil()
    assert kind.from_random() != kind.from_random()
    assert kind.nil().size() == kind.from_random().size() == BYTES[kind]


def test_ids_contain_no_other_ids():
    with pytest.raises(UnsupportedError, match=r"no job_id\(\) of a TaskID.*get_runtime_context"):
        ids.TaskID.from_random().job_id()
    assert not hasattr(ids.ActorID.nil(), "job_id")
    with pytest.raises(AttributeError, match="'JobID' object has no attribute 'colour'"):
        ids.JobID.nil().colour  # noqa: B018


def test_job_has_a_number():
    assert ids.JobID.from_int(258).int() == 258
    assert ids.JobID.from_int(258).hex() == "02010000"
    assert ids.JobID.from_int((5 << 32) + 1).int() == 1


def test_nil_reference_names_nothing():
    assert ObjectRef.nil().is_nil()
    assert ObjectRef.nil() == ObjectRef.nil()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("xy", ValueError), ("abc", ValueError), ("", ValueError), (b"abc", ValueError), (5, TypeError)],
)
def test_other_values_are_refused(wrong, error):
    with pytest.raises(error):
        ids.TaskID(wrong)
