"""Ids: texts of hex digits with the methods of Ray's."""

import json
import pickle

import pytest

from fastrt import ids

KINDS = [ids.ActorID, ids.JobID, ids.NodeID, ids.PlacementGroupID, ids.TaskID, ids.UniqueID, ids.WorkerID]


@pytest.mark.parametrize("kind", KINDS)
def test_id_is_its_digits_and_its_bytes(kind):
    one = kind.from_hex("00Ab")
    assert (one, one.hex(), one.binary(), one.size()) == ("00ab", "00ab", b"\x00\xab", 2)
    assert kind.from_binary(b"\x00\xab") == one == kind(one) == kind(b"\x00\xab")
    assert repr(one) == f"{kind.__name__}(00ab)"
    assert {one: 1}["00ab"] == 1
    assert json.loads(json.dumps(one)) == one
    again = pickle.loads(pickle.dumps(one))
    assert type(again) is kind
    assert again == one
    assert kind.nil().is_nil()
    assert not one.is_nil()
    assert kind.from_random() != kind.from_random()


def test_job_has_a_number():
    assert ids.JobID.from_int(258).int() == 258
    assert ids.JobID.from_int(258).binary()[-2:] == b"\x01\x02"


@pytest.mark.parametrize(
    ("wrong", "error"), [("xy", ValueError), ("abc", ValueError), ("", ValueError), (5, TypeError)]
)
def test_other_values_are_refused(wrong, error):
    with pytest.raises(error):
        ids.TaskID(wrong)
