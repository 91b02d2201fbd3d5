"""Writers, pins and references: what Python holds of the table, and what misuse comes to."""

import contextlib
import copy
import gc
import os
import threading
import traceback

import numpy as np
import pytest

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import submission, tasks
from fastrt.errors import FastrtError, StaleReferenceError


def objects(client) -> int:
    return fsck.usage(client)["objects"]


# ---- writing ----


def test_writer_dropped_unsealed_leaves_nothing(client):
    for nbytes in (0, 50, 1000, 100_000):
        writer = handles.create(client, nbytes, 16, 3)
        assert len(writer) == nbytes
        del writer
    assert objects(client) == 0


def test_writer_takes_any_contiguous_buffer_at_any_offset(client):
    writer = handles.create(client, 200_000, 16)
    writer.copy(0, np.arange(10_000, dtype=np.uint64))
    writer.copy(80_000, bytearray(b"b" * 100_000))
    writer.copy(180_000, memoryview(b"c" * 20_000))
    writer.copy(200_000, b"")
    read = bytes(handles.read(client, writer.seal())[2])
    assert read == np.arange(10_000, dtype=np.uint64).tobytes() + b"b" * 100_000 + b"c" * 20_000


@pytest.mark.parametrize("more", [0, 1, 63, 64])
@pytest.mark.parametrize(("to", "source_at"), [(0, 0), (1, 0), (0, 5), (48, 16), (63, 17)])
def test_large_copy_writes_its_bytes_and_no_others(make_node, to, source_at, more):
    nbytes = (8 << 20) + more  # from 8 MiB on, copies go past the cache
    source = np.random.default_rng(1).integers(0, 255, source_at + nbytes, np.uint8)[source_at:]
    client = make_node(64 << 20).client
    writer = handles.create(client, to + nbytes + 100, 16)
    np.frombuffer(writer, np.uint8)[:] = 255
    writer.copy(to, source)
    read = np.frombuffer(handles.read(client, writer.seal())[2], np.uint8)
    assert np.array_equal(read[to : to + nbytes], source)
    assert np.all(read[:to] == 255)
    assert np.all(read[to + nbytes :] == 255)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 101), (1, 100), (100, 1), (101, 0), (-1, 1), (-(1 << 62), 5), ((1 << 63) - 1, 5)]
)
def test_copy_beyond_the_value_is_refused(client, offset, nbytes):
    writer = handles.create(client, 100, 16)
    with pytest.raises(ValueError, match="do not fit"):
        writer.copy(offset, b"x" * nbytes)


@pytest.mark.parametrize("source", [None, 5, "text", [1], np.arange(20, dtype=np.uint8)[::2]])
def test_copy_of_what_is_no_contiguous_buffer_is_refused(client, source):
    writer = handles.create(client, 100, 16)
    with pytest.raises((TypeError, ValueError, BufferError)):
        writer.copy(0, source)


def test_sealed_value_cannot_be_written(client):
    writer = handles.create(client, 2000, 16)
    ref = writer.seal()
    for call in (lambda: writer.copy(0, b"x"), lambda: memoryview(writer), lambda: writer.seal()):
        with pytest.raises(BufferError, match="sealed"):
            call()
    assert bytes(handles.read(client, ref)[2]) == bytes(2000)


def test_seal_with_other_than_the_announced_references_is_refused_and_may_be_repeated(client):
    child = handles.put_scalar(client, 1)
    writer = handles.create(client, 10, 16, 2)
    for refs in ((), [child], [child] * 3):
        with pytest.raises(ValueError, match="were announced"):
            writer.seal(refs)
    for refs in ([child, None], [child, 5], [child, handles.Ref()]):
        with pytest.raises((TypeError, StaleReferenceError)):
            writer.seal(refs)
    ref = writer.seal([child, child])
    assert handles.contained(client, ref) == [child, child]


@pytest.mark.parametrize("make", [handles.Writer, handles.Pin, handles.Ref])
def test_handle_made_by_hand_is_empty(client, make):
    made = make()
    calls = [
        lambda: made.seal(),
        lambda: made.copy(0, b"x"),
        lambda: handles.read(client, made),
        lambda: handles.contained(client, made),
    ]
    for call in calls:
        with pytest.raises((TypeError, AttributeError, FastrtError)):
            call()
    assert make is handles.Ref or bytes(made if make is handles.Pin else b"") == b""


@pytest.mark.parametrize(("kind", "nrefs"), [(-1, 0), (1 << 16, 0), (16, -1), (16, 1 << 32)])
def test_kind_or_count_out_of_range_is_refused(client, kind, nrefs):
    with pytest.raises(OverflowError):
        handles.create(client, 10, kind, nrefs)


def test_error_flag_comes_back(client):
    writer = handles.create(client, 3, 17, 0, True)
    writer.copy(0, b"err")
    ref = writer.seal()
    assert handles.read(client, ref) == (17, True, b"err")
    assert handles.read_scalar(client, ref, "missing") == "missing"


# ---- reading: the zero-copy rule ----


def test_view_outlives_its_reference_and_memory_comes_back_with_its_end(node, client):
    ref = node.put(1 << 20)
    used = fsck.usage(client)["bytes_used"]
    array = np.frombuffer(handles.read(client, ref)[2], np.uint8)
    part = memoryview(array)[100:200]
    assert handles.describe(client, ref)["pins"] == [client.index]
    del ref, array
    gc.collect()
    assert objects(client) == 1
    taken = [node.put(1 << 20) for _ in range(10)]  # would overwrite it, were it free
    assert bytes(part) == bytes(100)
    del taken
    assert fsck.usage(client)["bytes_used"] == used
    part.release()
    assert objects(client) == 0
    assert fsck.usage(client)["bytes_used"] <= 6 * node.PAGE


def test_views_of_one_value_share_its_memory(node, client):
    ref = node.put(1 << 20)
    views = [np.frombuffer(handles.read(client, ref)[2], np.uint8) for _ in range(3)]
    assert len({view.__array_interface__["data"][0] for view in views}) == 1
    assert handles.describe(client, ref)["pins"] == [client.index]
    del ref, views[1:]
    assert objects(client) == 1
    del views
    assert objects(client) == 0


def test_view_is_read_only(node, client):
    array = np.frombuffer(handles.read(client, node.put(100_000))[2], np.uint8)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match=r"cannot set WRITEABLE|read-only"):
        array.flags.writeable = True
    with pytest.raises(TypeError, match="read-only"):
        memoryview(handles.read(client, node.put(100_000))[2])[0] = 1


def test_small_value_is_a_copy_that_holds_nothing(node, client):
    kind, error, data = handles.read(client, node.put(1024))
    assert (kind, error, type(data), len(data)) == (node.KIND, False, bytes, 1024)
    assert objects(client) == 0
    assert isinstance(handles.read(client, node.put(1025))[2], handles.Pin)


@pytest.mark.parametrize(
    ("value", "raw"),
    [(None, b""), (True, b""), (-2, b"\xfe" + b"\xff" * 7), ("\u00e9", b"\xc3\xa9"), (b"x" * 5000, b"x" * 5000)],
)
def test_bytes_of_any_kind_are_read_as_they_lie_and_pinned(node, client, value, raw):
    ref = handles.put_scalar(client, value)
    kind, error, pin = handles.read(client, ref, raw=True)
    assert (kind, error, bytes(pin)) == (handles.describe(client, ref)["kind"], False, raw)
    assert handles.describe(client, ref)["pins"] == [client.index]
    del ref
    assert objects(client) == 1
    assert bytes(pin) == raw
    del pin
    assert objects(client) == 0


def test_read_before_the_seal_is_refused(client, function):
    ref = submission.submit(client, submission.TaskOptions(function), ())
    with pytest.raises(FastrtError, match="not ready yet"):
        handles.read(client, ref)
    with pytest.raises(FastrtError, match="not ready yet"):
        handles.read(client, ref, raw=True)
    assert handles.contained(client, ref) == []
    assert handles.read_scalar(client, ref, "missing") == "missing"
    assert not handles.is_ready(client, ref)
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)


# ---- references ----


def test_copies_of_a_reference_are_the_reference(client):
    """A copy that Python makes by itself would share the hold and release it twice."""
    for kind in (handles.Ref, type(handles.put_scalar(client, 1))):
        handles.set_ref_class(kind)
        ref = handles.put_scalar(client, 42)
        assert copy.copy(ref) is ref
        assert copy.deepcopy([ref, ref]) == [ref, ref]
    del ref
    assert objects(client) == 0


def test_bare_reference_cannot_be_pickled(client):
    with pytest.raises(TypeError, match="only the store can pickle"):
        handles.Ref.__reduce__(handles.put_scalar(client, 1))


@pytest.mark.parametrize("cls", [None, int, 5, "Ref"])
def test_class_that_is_no_reference_is_refused(cls):
    with pytest.raises(TypeError):
        handles.set_ref_class(cls)


def test_references_compare_by_object(client):
    a, b = handles.put_scalar(client, 1), handles.put_scalar(client, 1)
    again = handles.acquire(client, a.objref, a.index)
    assert a == again
    assert hash(a) == hash(again)
    assert a != b
    assert a != a.objref
    assert len({a, b, again}) == 2
    assert a.owner is client


def test_objref_carries_the_node_in_its_high_bits(make_node):
    for number in (0, 1, 65535):
        client = make_node(node=number).client
        refs = [handles.put_scalar(client, k) for k in range(3)]
        assert {ref.objref >> 48 for ref in refs} == {number}
        assert [ref.objref - refs[0].objref for ref in refs] == [0, 1, 2]


def test_objrefs_of_two_clients_never_meet(node, client):
    other = node.attach()
    mine = {handles.put_scalar(client, k).objref for k in range(70_000)}
    theirs = {handles.put_scalar(other, k).objref for k in range(70_000)}
    assert len(mine | theirs) == 140_000
    other.close()


def test_stale_name_is_refused(node, client):
    ref = node.put(10)
    objref, index = ref.objref, ref.index
    del ref
    with pytest.raises(StaleReferenceError, match="the last reference to it was dropped"):
        handles.acquire(client, objref, index)
    others = [handles.put_scalar(client, k) for k in range(200)]
    assert index in {other.index for other in others}
    with pytest.raises(StaleReferenceError):
        handles.acquire(client, objref, index)
    for at in (1 << 20, 0xFFFFFFFF):
        with pytest.raises(StaleReferenceError, match="not in this session's table"):
            handles.acquire(client, objref, at)
    assert fsck.fsck(client, quiet=True) == []


def test_name_is_refused_in_the_middle_of_other_holders(node, client):
    """A wrong name for a live entry takes no hold of it."""
    ref = node.put(10)
    other = node.attach()
    with pytest.raises(StaleReferenceError):
        handles.acquire(other, ref.objref + 1, ref.index)
    assert handles.describe(client, ref)["refs"] == [client.index]
    other.close()


def test_describe_says_who_holds_what(node, client):
    other = node.attach()
    ref = node.put(5000, handles.put_scalar(client, 1))
    there = handles.acquire(other, ref.objref, ref.index)
    pin = handles.read(other, there)[2]
    row = handles.describe(client, ref)
    assert (row["refs"], row["pins"]) == ([client.index, other.index], [other.index])
    assert (row["bytes"], row["contains"], row["ready"], row["kind"]) == (5000, 1, True, node.KIND)
    who = {row["client"]: row for row in fsck.holders(client)}
    assert {client.index, other.index} <= set(who)
    assert who[other.index]["objects"] == 1
    assert who[other.index]["bytes"] == 8192
    del pin, there
    other.close()


def test_writer_that_a_traceback_keeps_does_no_harm(client, function):
    """A result half-written when its serializer raised: the frame keeps the writer while the error is sealed."""
    ref = submission.submit(client, submission.TaskOptions(function), ())
    task = tasks.next_task(client, 0.0, 0.0)

    def fail():
        half = handles.result(client, task, 0, 5000, 16)
        half.copy(0, b"half")
        raise ValueError("in the middle")

    with contextlib.suppress(ValueError):
        try:
            fail()
        except ValueError as exc:
            kept = exc
            writer = handles.result(client, task, 0, 6000, 16, 0, True)
            writer.copy(0, b"whole")
            writer.seal()
            tasks.finish(client, task)
            raise
    traceback.clear_frames(kept.__traceback__)
    del kept
    gc.collect()
    assert bytes(memoryview(handles.read(client, ref)[2])[:5]) == b"whole"
    assert fsck.fsck(client, quiet=True) == []


def test_cycle_of_handles_is_collected_and_lets_go(node, client):
    """The collector clears objects in an order of its own: a writer must not forget its client first."""
    other = node.attach()
    ref = handles.create(other, 50_000, node.KIND, 1).seal([handles.put_scalar(other, 1)])
    cycle = [other, ref, handles.read(other, ref)[2], handles.create(other, 500_000, node.KIND)]
    cycle.append(cycle)
    del other, ref, cycle
    gc.collect()
    assert objects(client) == 0
    assert fsck.usage(client)["bytes_used"] <= 6 * node.PAGE


@pytest.mark.parametrize("keep", [False, True])
def test_cycle_with_its_segment_is_collected_without_a_crash(drop_arguments, keep):
    """The mapping must outlive the references that release their holds in it, and the views."""
    for _ in range(3):
        made = Segment.create(1 << 20)
        other = Client(made, *clients.admit(made, os.getpid(), clients.KIND_TOOL))
        ref = handles.create(other, 50_000, 16, 1).seal([handles.put_scalar(other, 1)])
        cycle = [made, other, ref, handles.read(other, ref)[2], handles.create(other, 5000, 16)]
        view = memoryview(cycle[3]) if keep else bytes(50_000)
        cycle.append(cycle)
        made.unlink()
        del made, other, ref, cycle
        gc.collect()
        assert view == bytes(50_000)
        del view
        gc.collect()


def test_threads_do_everything_at_once(node, client):
    """Magazines, private counts and stamps are shared by the threads of a process."""
    failed = []
    anchor = handles.put_scalar(client, "anchor")

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held = []
        try:
            for k in range(1500):
                nbytes = int(rng.choice([10, 100, 3000, 70_000]))
                writer = handles.create(client, nbytes, 16, 1)
                writer.copy(0, bytes([k % 251]) * nbytes)
                ref = writer.seal([anchor])
                held.append((ref, k % 251, nbytes))
                view = handles.read(client, ref)[2]
                if len(held) > 20:
                    ref, byte, nbytes = held.pop(int(rng.integers(20)))
                    view = handles.read(client, ref)[2]
                    assert bytes(view) == bytes([byte]) * nbytes
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    gc.collect()
    assert objects(client) == 1
