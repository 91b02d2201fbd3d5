"""The life of objects: contained references, chains, and holders against deleters."""

import json

import pytest

from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import submission, tasks
from fastrt.errors import ObjectStoreFullError, StaleReferenceError


def objects(client) -> int:
    return fsck.usage(client)["objects"]


def test_contained_object_lives_as_long_as_its_container(node, client):
    child = node.put(100)
    parent = node.put(10, child, child)
    name = child.objref, child.index
    assert handles.describe(client, child)["counted"] == 2
    del child
    again = handles.acquire(client, *name)
    assert handles.contained(client, parent) == [again, again]
    del again, parent
    assert objects(client) == 0
    with pytest.raises(StaleReferenceError):
        handles.acquire(client, *name)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 40, 41, 72, 1000, 20_000])
@pytest.mark.parametrize("nrefs", [1, 2, 500])
def test_value_of_any_size_contains_any_number(node, client, nbytes, nrefs):
    children = [handles.put_scalar(client, k) for k in range(nrefs)]
    parent = node.put(nbytes, *children)
    assert handles.contained(client, parent) == children
    assert len(handles.read(client, parent)[2]) == nbytes
    del children
    assert objects(client) == nrefs + 1
    assert [handles.read_scalar(client, ref, None) for ref in handles.contained(client, parent)] == list(range(nrefs))
    del parent
    assert objects(client) == 0


def test_pinned_container_keeps_its_content(node, client):
    parent = node.put(5000, node.put(10))
    pin = handles.read(client, parent)[2]
    del parent
    assert objects(client) == 2
    del pin
    assert objects(client) == 0


def test_tree_of_shared_objects_goes_bottom_last(node, client):
    leaf = node.put(300)
    layer = [leaf] * 10
    for _ in range(5):
        layer = [node.put(100, *layer) for _ in range(10)]
    assert objects(client) == 51
    assert handles.describe(client, leaf)["counted"] == 100
    del leaf, layer[1:]
    assert objects(client) == 42
    layer.clear()
    assert objects(client) == 0


def test_chain_of_a_million_is_freed_without_recursion(make_node):
    node = make_node(store_bytes=1 << 20, objects_max=1_000_100)
    client = node.client
    ref = handles.put_scalar(client, 0)
    for _ in range(1_000_000):
        writer = handles.create(client, 1, node.KIND, 1)
        ref = writer.seal([ref])
    del writer
    assert objects(client) == 1_000_001
    del ref
    assert objects(client) == 0


def test_unsealed_result_may_be_contained(node, client, function):
    result = submission.submit(client, submission.TaskOptions(function), ())
    parent = node.put(10, result)
    name = result.objref, result.index
    del result
    task = tasks.next_task(client, 0.0, 0.0)
    assert not handles.is_ready(client, handles.acquire(client, *name))
    tasks.finish_scalar(client, task, "late")
    assert handles.read_scalar(client, handles.contained(client, parent)[0], None) == "late"
    del parent
    assert objects(client) == 1  # the function


def test_result_nobody_wants_is_gone_when_it_is_sealed(client, function):
    for value in (5, b"x" * 5000):
        submission.submit(client, submission.TaskOptions(function), ())
        task = tasks.next_task(client, 0.0, 0.0)
        assert objects(client) == 2
        tasks.finish_scalar(client, task, value)
        assert objects(client) == 1


def test_table_full_raises_and_recovers(make_node):
    node = make_node(objects_max=64)
    for _ in range(3):
        held = node.fill(lambda: handles.put_scalar(node.client, 1), "table of the arena is full")
        assert len(held) == 64
        with pytest.raises(ObjectStoreFullError):
            handles.create(node.client, 10, node.KIND)
        with pytest.raises(ObjectStoreFullError):
            submission.submit(node.client, submission.TaskOptions(held[0]), ())
        assert fsck.fsck(node.client, quiet=True) == []
        del held


def test_records_that_another_client_hoards_come_back_when_it_closes(make_node):
    node = make_node(objects_max=128)
    other = node.attach()
    held = [handles.put_scalar(other, k) for k in range(128)]
    del held  # up to 128 free records stay with the client that freed them
    with pytest.raises(ObjectStoreFullError):
        handles.put_scalar(node.client, 1)
    other.close()
    held = [handles.put_scalar(node.client, k) for k in range(128)]
    del held


@pytest.mark.parametrize("objects_max", [64, 65, 100, 8191, 8193])
def test_tables_of_any_size_are_used_to_the_last_record(make_node, objects_max):
    node = make_node(objects_max=objects_max)
    held = node.fill(lambda: handles.put_scalar(node.client, 1))
    assert len(held) == objects_max
    del held


def test_object_passes_from_holder_to_holder_without_a_gap(node, client):
    """The last hold moves between processes and kinds as fast as it can; it is never missed by a deleter."""
    peer = node.peer()
    ref = node.put(3000)
    peer.run(f"mine = handles.acquire(client, {ref.objref}, {ref.index})")
    peer.start(
        f"""
for _ in range(20_000):
    box = handles.create(client, 8, 16, 1).seal([mine])
    pin = handles.read(client, mine)[2]
    del mine
    mine = handles.contained(client, box)[0]
    del box
    data = bytes(memoryview(pin)[:2])
    del pin
data == bytes([{3000 % 251}]) * 2
"""
    )
    name = ref.objref, ref.index
    while not peer.answered():
        del ref
        ref = handles.acquire(client, *name)
    assert peer.finish() is True


def test_many_processes_acquire_and_drop_one_object(node, client):
    """Each drop may be the last one and each acquire may come too late, but nothing is ever read that is not there."""
    peers = [node.peer() for _ in range(3)]
    code = """
ok = late = 0
for _ in range(400):
    names = json.loads(sys.stdin.readline())
    for objref, index in names:
        try:
            ref = handles.acquire(client, objref, index)
        except Exception as exc:
            assert type(exc).__name__ == "StaleReferenceError", exc
            late += 1
        else:
            assert handles.read_scalar(client, ref, None) == objref
            ok += 1
            del ref
(ok, late)
"""
    for peer in peers:
        peer.start(code)
    for _ in range(400):
        held = []
        for _ in range(10):
            following = handles.put_scalar(client, 0).objref + 1
            held.append(handles.put_scalar(client, following))
            assert held[-1].objref == following  # the value is the name, so that a reader can tell
        for peer in peers:
            peer.process.stdin.write(json.dumps([(ref.objref, ref.index) for ref in held]).encode() + b"\n")
            peer.process.stdin.flush()
        while held:
            held.pop()
    counts = [peer.finish() for peer in peers]
    assert all(ok + late == 4000 for ok, late in counts)
    assert fsck.fsck(client, quiet=True) == []
