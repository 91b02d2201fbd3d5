"""Memory of the payload region ahead of its use: how much there is, where, of which form, and what it leaves alone."""

import mmap
import os
import re
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from fastrt._core.memory import arena, populate
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt.node.populator import COMMIT_BYTES, Populator, has_free_processor, may_go_on, memory_nodes

MIB = 1 << 20
STORE = 160 * MIB  # two and a half steps of the core's commit


@pytest.fixture
def node(make_node):
    return make_node(STORE)


def memory_of(segment: Segment) -> int:
    """Bytes of memory that the segment's file has."""
    return os.stat(f"/dev/shm{segment.name}").st_blocks * 512


def mapping_of(segment: Segment, file: str, pattern: str) -> list[str]:
    """The lines of this process's writable mapping that match, in /proc/self/smaps or numa_maps."""
    text = Path(f"/proc/self/{file}").read_text()
    if file == "numa_maps":
        return [line for line in text.splitlines() if segment.name in line and re.search(pattern, line)]
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
    return [found for part in parts if segment.name in part and " rw-s " in part for found in re.findall(pattern, part)]


@pytest.mark.parametrize("huge", [False, True])
def test_populated_memory_is_there_and_committed_by_the_next_step(node, huge):
    before = memory_of(node.segment)
    done, of_huge = populate.populate(node.client, 0, 64 * MIB, huge)
    assert done == 64 * MIB
    assert 64 * MIB <= memory_of(node.segment) - before < 66 * MIB
    assert of_huge in ((0, 64 * MIB) if huge else (0,))  # kernels before 6.1 have small pages only
    assert arena.room(node.client)[:2] == (0, 0)
    before = memory_of(node.segment)
    assert arena.grow(node.client)
    assert memory_of(node.segment) - before < 2 * MIB  # only tables of pages
    assert fsck.fsck(node.client, quiet=True) == []


def test_no_memory_beyond_the_end_of_the_store(node):
    assert populate.populate(node.client, STORE - 4 * MIB, 64 * MIB, True)[0] == 4 * MIB
    assert populate.populate(node.client, STORE, 4 * MIB, True) == (0, 0)
    assert memory_of(node.segment) < 32 * MIB
    with pytest.raises(ValueError, match="multiple of 4096"):
        populate.populate(node.client, 100, MIB, False)


def test_populating_a_used_part_leaves_its_values(node):
    data = np.random.default_rng(1).bytes(8 * MIB)
    writer = handles.create(node.client, len(data), 16)
    writer.copy(0, data)
    ref = writer.seal()
    for huge in (False, True):
        populate.populate(node.client, 0, 16 * MIB, huge)
        assert bytes(handles.read(node.client, ref)[2]) == data
    del ref


def test_a_populating_process_does_not_keep_the_memory_mapped(node):
    populate.populate(node.client, 0, 64 * MIB, True)
    (resident,) = mapping_of(node.segment, "smaps", r"\nRss: +(\d+) kB")
    assert int(resident) < 8 << 10


def test_mapped_memory_is_written_without_faults(node):
    populate.populate(node.client, 0, 64 * MIB, False)
    arena.grow(node.client)
    at = 0
    while step := populate.map_committed(node.client, at):
        at += step
    assert at in (0, 64 * MIB)  # 0: the kernel is older than 5.14
    data = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE)
    writer = handles.create(node.client, len(data), 16)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    writer.copy(0, data)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert at == 0 or faults < 2500  # of 8192 pages; a sanitizer takes some for memory of its own
    del writer


@pytest.mark.parametrize("placement", ["interleave", "local"])
def test_placement_is_the_segments(node, placement):
    try:
        populate.place(node.client, placement, memory_nodes())
    except OSError as exc:
        pytest.skip(f"the kernel refuses placements here: {exc}")
    populate.populate(node.client, 0, MIB, False)
    arena.grow(node.client)
    populate.map_committed(node.client, 0)
    assert mapping_of(node.segment, "numa_maps", rf" {placement}\b")


def test_nodes_of_memory_are_read(tmp_path):
    (tmp_path / "has_memory").write_text("0-2,5,8-9\n")
    assert memory_nodes(tmp_path / "has_memory") == [0, 1, 2, 5, 8, 9]
    assert memory_nodes(tmp_path / "none") == [0]


def test_a_processor_is_free_while_no_thread_waits_for_one(tmp_path):
    count = os.cpu_count()
    for runnable, free in ((1, True), (count, True), (count + 1, False)):
        (tmp_path / "loadavg").write_text(f"0.10 0.20 0.30 {runnable}/812 4711\n")
        assert has_free_processor(tmp_path / "loadavg") == free
    assert has_free_processor(tmp_path / "none")


@pytest.mark.parametrize("is_free", [False, True])
def test_a_program_that_stores_values_has_the_processors_for_itself(node, monkeypatch, is_free):
    monkeypatch.setattr("fastrt.node.populator.has_free_processor", lambda: is_free)
    assert may_go_on(node.client)
    small = handles.create(node.client, MIB, 0)
    assert may_go_on(node.client)
    large = handles.create(node.client, 32 * MIB, 0)
    assert may_go_on(node.client) == is_free
    del small, large
    assert may_go_on(node.client)


# ---- the daemon's threads ----


@pytest.fixture
def populator(node):
    made = []

    def make(ahead, placement="interleave", spare=lambda: 1 << 40, may_run=lambda: True):
        made.append(Populator(node.client, ahead, True, placement, spare, may_run))
        return made[0]

    yield make
    made[0].close()


def tend(populator, node):
    """Do the daemon's part at an event: commit the populated memory, and have more populated if that is needed."""
    while populator.has_step(arena.room(node.client)[1]):
        assert arena.grow(node.client)
    populator.tend(*arena.room(node.client))


def test_threads_populate_as_much_as_is_wanted_and_end(node, populator, wait_until):
    one = populator(100 * MIB)

    def committed():
        tend(one, node)
        return arena.room(node.client)[1] == 2 * COMMIT_BYTES

    wait_until(committed, "two steps to be committed")
    assert 2 * COMMIT_BYTES <= memory_of(node.segment) < 2 * COMMIT_BYTES + 16 * MIB
    wait_until(lambda: not any(thread.is_alive() for thread in one._threads), "the threads to end")
    tend(one, node)
    assert not any(thread.is_alive() for thread in one._threads)
    assert one.patience_s() > 0.5  # an idle daemon has no reason to wake up


def test_threads_go_on_as_memory_is_used_and_stop_at_the_end_of_the_store(node, populator, wait_until):
    one = populator(64 * MIB)

    def committed(nbytes):
        tend(one, node)
        return arena.room(node.client)[1] == nbytes

    wait_until(lambda: committed(64 * MIB), "the first step to be committed")
    writer = handles.create(node.client, 40 * MIB, 16)
    wait_until(lambda: committed(128 * MIB), "the second step to be committed")
    more = handles.create(node.client, 80 * MIB, 16)
    wait_until(lambda: committed(STORE), "the rest to be committed")
    assert memory_of(node.segment) < STORE + 24 * MIB
    del writer, more


def test_threads_begin_again_once_half_of_the_ready_memory_is_used(node, populator, wait_until):
    one = populator(128 * MIB)

    def at_rest(nbytes):
        tend(one, node)
        return arena.room(node.client)[1] == nbytes and not any(thread.is_alive() for thread in one._threads)

    wait_until(lambda: at_rest(128 * MIB), "two steps to be committed")
    writer = handles.create(node.client, 60 * MIB, 16)
    assert at_rest(128 * MIB)
    more = handles.create(node.client, 8 * MIB, 16)
    wait_until(lambda: at_rest(STORE), "the rest to be committed")
    del writer, more


def test_threads_stop_before_memory_is_short(node, populator, wait_until):
    begin = memory_of(node.segment)
    one = populator(STORE, spare=lambda: 40 * MIB - (memory_of(node.segment) - begin))

    def stopped():
        tend(one, node)
        return one._threads and not any(thread.is_alive() for thread in one._threads)

    wait_until(stopped, "the threads to stop")
    assert 20 * MIB <= memory_of(node.segment) - begin <= 40 * MIB
    tend(one, node)
    assert not any(thread.is_alive() for thread in one._threads)


def test_threads_look_at_the_machines_memory_once_in_many_units(node, populator, wait_until):
    looks = []

    def spare():
        looks.append(1)  # it reads several files, which takes as long as two huge pages
        return 1 << 40

    one = populator(STORE, spare=spare)

    def committed():
        tend(one, node)
        return arena.room(node.client)[1] == STORE

    wait_until(committed, "all memory to be committed")
    assert 1 <= len(looks) <= STORE // COMMIT_BYTES + 1


def test_threads_wait_while_processors_are_busy(node, populator, wait_until, monkeypatch):
    looks, begun, lock, is_free = [], [], threading.Lock(), threading.Event()

    def may_run():
        with lock:
            if not looks:
                assert arena.grow(node.client)  # as a put does that finds no room
            looks.append(1)
        return is_free.is_set()

    def seen(client, at, nbytes, huge, populate=populate.populate):
        begun.append(at)
        return populate(client, at, nbytes, huge)

    monkeypatch.setattr("fastrt.node.populator.populate.populate", seen)
    one = populator(STORE, may_run=may_run)
    one._begin_at = 0.0
    tend(one, node)
    wait_until(lambda: len(begun) == 2, "two units to be populated all the same")
    assert len(looks) >= 5
    is_free.set()

    def committed():
        tend(one, node)
        return arena.room(node.client)[1] == STORE

    wait_until(committed, "the rest to be committed")
    assert min(begun) == COMMIT_BYTES  # what has memory already is left alone


def test_local_placement_populates_nothing(node, populator):
    one = populator(STORE, placement="local")
    one._begin_at = 0.0
    tend(one, node)
    assert one._threads == []
