"""Many small objects in one call: the same as one by one, also where there is no room or nothing to pin."""

import pytest

from fastrt._core.objects import bulk, handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import tasks
from fastrt.errors import ObjectStoreFullError

KIND = 16


def test_objects_made_together_are_read_as_written(client):
    specs = [(0, KIND, False), (10, KIND, True), (70_000, 17, False)]
    writers = bulk.create_many(client, specs)
    for k, writer in enumerate(writers):
        writer.copy(0, bytes([k]) * specs[k][0])
    refs = bulk.seal_many(writers)
    for k, ref in enumerate(refs):
        kind, is_error, pin = handles.read(client, ref, raw=True)
        assert (kind, is_error, bytes(pin)) == (specs[k][1], specs[k][2], bytes([k]) * specs[k][0])
    with pytest.raises(BufferError, match="sealed"):
        bulk.seal_many(writers)
    pins = bulk.pin_many(client, refs, 1 << 20, 1 << 20)
    assert [(kind, is_error, len(pin)) for kind, is_error, pin in pins] == [(k, e, n) for n, k, e in specs]
    del refs, ref, writers, writer
    assert bytes(pins[2][2]) == b"\2" * 70_000  # a pin keeps its bytes without any reference
    del pins, pin
    assert fsck.usage(client)["objects"] == 0
    assert fsck.fsck(client, True) == []


def test_as_many_are_made_as_there_is_room_for(client):
    nbytes = fsck.usage(client)["bytes_max"] // 10
    made = bulk.create_many(client, [(nbytes, KIND, False)] * 20)
    assert 5 <= len(made) <= 10
    with pytest.raises(ObjectStoreFullError):
        handles.create(client, nbytes, KIND)
    made.pop()
    assert len(bulk.create_many(client, [(nbytes, KIND, False)] * 20)) == 1
    made.clear()
    assert fsck.usage(client)["objects"] == 0
    with pytest.raises(ValueError, match="at most"):
        bulk.create_many(client, [(0, KIND, False)] * (bulk.MANY_MAX + 1))


def test_what_cannot_be_pinned_at_once_is_passed_over(client):
    small, large = (handles.create(client, n, KIND).seal() for n in (1000, 5000))
    outer = handles.create(client, 10, KIND, 1).seal([small])
    task, pending = tasks.promise(client)
    found = bulk.pin_many(client, [None, large, outer, pending, small], 4000, 1 << 20)
    assert [one is None for one in found] == [True, True, True, True, False]
    assert [one is None for one in bulk.pin_many(client, [small, large, small], 9000, 5500)] == [False, True, False]
    assert tasks.finish_scalar(client, task, None)
    del found
