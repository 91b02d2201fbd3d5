"""Remote values as the core sees them: sealed without bytes, fetched, dropped, and what a lost source leaves."""

import pytest

from fastrt._core.objects import handles, remote, spill
from fastrt._core.repair import fsck, inspect
from fastrt._core.tasks import submission, tasks
from fastrt.errors import FastrtError, ObjectStoreFullError

NODE = "0123456789abcdef" * 2
LARGE = 100_000
DATA = bytes(range(250)) * 400


def make(client, nbytes=LARGE):
    """A remote value, with no bytes here."""
    task, held = tasks.promise(client)
    ref = remote.seal_result(client, task, 0, nbytes, 16, NODE, 7)
    assert ref == held
    tasks.finish(client, task)
    return ref


def bring(client, ref, data=DATA):
    fill = remote.fetch(client, ref)
    memoryview(fill)[:] = data
    fill.seal()


def test_remote_value_is_ready_but_not_here(client):
    ref = make(client)
    assert handles.is_ready(client, ref)
    assert handles.read(client, ref) is None
    assert handles.read_scalar(client, ref, "missing") == "missing"
    assert remote.is_missing(client, ref)
    assert remote.is_remote(client, ref.index, ref.objref)
    assert remote.sources(client) == [(ref.index, ref.objref, NODE, 7)]
    assert fsck.usage(client)["bytes_used"] == 0
    assert fsck.fsck(client, quiet=True) == []
    (row,) = inspect.objects(client)
    assert (row["state"], row["node"], row["bytes"]) == ("remote", NODE, LARGE)


def test_fetched_copy_is_read_and_dropped_without_a_file(client):
    ref = make(client)
    bring(client, ref)
    assert bytes(handles.read(client, ref)[2]) == DATA
    assert not remote.is_missing(client, ref)
    assert remote.is_remote(client, ref.index, ref.objref)
    assert spill.begin(client, ref.index, ref.objref) is None  # nothing is written of a copy
    assert remote.drop_copy(client, ref.index, ref.objref) > 0
    assert remote.is_missing(client, ref)
    assert fsck.usage(client)["bytes_used"] == 0
    assert spill.begin_restore(client, ref.index, ref.objref) is None  # there is no file to read
    bring(client, ref)
    assert fsck.fsck(client, quiet=True) == []


def test_pinned_copy_stays(client):
    ref = make(client)
    bring(client, ref)
    pin = handles.read(client, ref)[2]
    assert remote.drop_copy(client, ref.index, ref.objref) == 0
    assert bytes(pin) == DATA


def test_copies_are_dropped_before_values_are_spilled(node, client):
    own = node.put(LARGE)
    ref = make(client)
    bring(client, ref)
    spill.tick(client)
    handles.read(client, ref)
    assert [row[3] for row in spill.candidates(client)] == [ref.index, own.index]


def test_one_fetch_at_a_time_and_an_abandoned_one_frees_its_memory(client):
    ref = make(client)
    fill = remote.fetch(client, ref)
    assert remote.fetch(client, ref) is None
    with pytest.raises(ValueError, match="do not fit"):
        fill.copy(LARGE - 10, DATA)
    del fill
    assert remote.is_missing(client, ref)
    assert fsck.usage(client)["bytes_used"] == 0
    fill = remote.fetch(client, ref)
    fill.abort()
    bring(client, ref)
    with pytest.raises(BufferError, match="sealed"):
        memoryview(fill)


def test_value_without_room_stays_remote(node, client):
    ref = make(client, 1 << 40)
    with pytest.raises(ObjectStoreFullError):
        remote.fetch(client, ref)
    assert remote.is_missing(client, ref)


def test_lost_source_leaves_the_copy_or_lets_the_value_be_replaced(client):
    ref = make(client)
    bring(client, ref)
    assert remote.detach(client, ref)
    assert not remote.is_remote(client, ref.index, ref.objref)
    assert remote.drop_copy(client, ref.index, ref.objref) == 0
    assert remote.sources(client) == []
    data = spill.begin(client, ref.index, ref.objref)
    assert data is not None  # an ordinary value by now
    spill.give_up(client, data)
    gone = make(client)
    assert not remote.detach(client, gone)
    fill = remote.replace(client, gone, 5, 17, True)
    fill.copy(0, b"error")
    assert handles.read(client, gone) is None
    fill.seal()
    assert handles.read(client, gone) == (17, True, b"error")
    assert not remote.is_remote(client, gone.index, gone.objref)
    assert fsck.fsck(client, quiet=True) == []


def test_dropped_reference_frees_a_remote_value_in_every_state(client):
    for state in ("missing", "here", "fetching"):
        ref = make(client)
        fill = remote.fetch(client, ref) if state != "missing" else None
        if state == "here":
            fill.copy(0, DATA)
            fill.seal()
        del ref, fill
        assert inspect.objects(client) == []
    assert fsck.usage(client)["bytes_used"] == 0


def test_result_that_is_sealed_already_and_wrong_sources_are_refused(client):
    task, held = tasks.promise(client)
    with pytest.raises(ValueError, match="32 hex digits"):
        remote.seal_result(client, task, 0, LARGE, 16, "ab", 7)
    with pytest.raises(FastrtError, match="not this client's"):
        remote.seal_result(client, task + 1, 0, LARGE, 16, NODE, 7)
    writer = handles.result(client, task, 0, 5, 16)
    writer.copy(0, b"value")
    writer.seal()
    assert remote.seal_result(client, task, 0, LARGE, 16, NODE, 7) is None
    assert remote.replace(client, held, 5, 16) is None
    tasks.finish(client, task)


# ---- who holds an object ----


def test_objects_that_only_this_process_holds_are_found(make_node):
    node = make_node(4 << 20, objects_max=1 << 10, clients_max=1024, clients_dense=64)
    client, alone = node.client, handles.put_scalar(node.client, 1)
    function = handles.put_scalar(client, b"function")
    inner, argument, elsewhere, far = (handles.put_scalar(client, k) for k in range(4))
    refs = [alone, inner, argument, elsewhere, far]
    assert remote.only_here(client, refs) == [0, 1, 2, 3, 4]
    container = node.put(10, inner)
    task = submission.submit(client, submission.TaskOptions(function), (argument,))
    near = node.attach()
    theirs = handles.acquire(near, elsewhere.objref, elsewhere.index)
    others = [node.attach() for _ in range(100)]  # the last ones beyond the dense clients
    last = handles.acquire(others[-1], far.objref, far.index)
    assert remote.only_here(client, refs) == [0]
    assert remote.only_here(others[-1], [last]) == []
    assert remote.only_here(client, []) == []
    del far
    refs.pop()
    assert remote.only_here(others[-1], [last]) == [0]
    del theirs, last, container
    assert remote.only_here(client, refs) == [0, 1, 3]
    node.end([tasks.next_task(client, 0.0, 0.0)])
    assert remote.only_here(client, refs) == [0, 1, 2, 3]
    gone = handles.put_scalar(near, 5)
    with pytest.raises(FastrtError, match="another client of this process"):
        remote.only_here(client, [gone])
    del task
