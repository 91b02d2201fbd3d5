"""Versions in shared memory: which slot is written, what readers keep, and what is refused."""

import fcntl
import os
from typing import Any

import numpy as np
import pytest

from fastrt._core.tables.versions import READERS, SLOTS, PinnedView, Span, Versions
from fastrt.errors import AttachError

F = np.float32


def attached(memory: Versions) -> Versions:
    return Versions.attach(os.dup(memory.fd))


def publish(memory: Versions, value: float) -> int:
    slot = memory.begin()
    np.frombuffer(memory.slot(slot), F)[:] = value
    return memory.publish(slot)


def view(reader: Versions, number: int = 0) -> Any:
    slot, _ = reader.pin(number)
    span = Span([(reader.fd, reader.offset(slot), reader.slot_bytes)])
    return np.frombuffer(PinnedView(span, [(reader, number, slot)]), F)


def test_reader_keeps_what_it_has_pinned_and_sees_the_newest() -> None:
    memory = Versions.create(8192)
    reader = attached(memory)
    held = [view(reader)]
    for value in range(1, 10):
        assert publish(memory, value) == value + 1
        held.append(view(reader))
    assert [array[0] for array in held] == list(range(10))
    assert reader.pinned(0) == 10
    assert reader.pinned(1) == 0
    with pytest.raises(ValueError, match="read-only"):
        held[0][0] = 1
    del held
    assert reader.pinned(0) == 0


def test_no_slot_is_free_when_all_are_read_until_one_reader_is_gone() -> None:
    memory = Versions.create(4096)
    reader = attached(memory)
    for _ in range(SLOTS - 1):
        reader.pin(3)
        memory.publish(memory.begin())
    assert memory.begin() == -1
    assert memory.held() == SLOTS - 1
    memory.clear(3)
    assert memory.held() == 0
    assert memory.begin() == 0


def test_memory_that_is_retired_says_so_and_old_views_stay() -> None:
    memory = Versions.create(4096)
    publish(memory, 5)
    reader = attached(memory)
    held = view(reader)
    memory.retire()
    assert reader.pin(0) == (-1, 0)
    assert held[0] == 5


def test_pieces_of_several_memories_are_one_array() -> None:
    memories = [Versions.create(8192) for _ in range(3)]
    for k, memory in enumerate(memories):
        publish(memory, k)
    slots = [memory.current[0] for memory in memories]
    span = Span([(m.fd, m.offset(s) + 4096, 4096) for m, s in zip(memories, slots, strict=True)])
    assert np.frombuffer(PinnedView(span, []), F).tolist() == [0.0] * 1024 + [1.0] * 1024 + [2.0] * 1024
    assert np.frombuffer(PinnedView(Span([]), []), np.uint8).size == 0


def test_view_in_a_forked_child_leaves_the_parents_pins() -> None:
    memory = Versions.create(4096)
    held = view(memory)
    child = os.fork()
    if child == 0:
        del held
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.pinned(0) == 1
    del held


def test_memory_too_large_to_map_is_refused_and_its_descriptor_left_to_the_caller() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 50)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AttachError, match="cannot map"):
        Versions.attach(fd)
    assert os.listdir("/proc/self/fd") == before
    os.close(fd)


def test_what_is_no_such_memory_is_refused() -> None:
    for size in (0, 100, 5000):
        with pytest.raises(ValueError, match="multiple of 4096"):
            Versions.create(size)
    fds = [os.memfd_create("x", os.MFD_ALLOW_SEALING) for _ in range(2)]
    os.ftruncate(fds[1], 1 << 20)
    fcntl.fcntl(fds[1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    memory = Versions.create(4096)
    for fd in fds:
        with pytest.raises(AttachError):
            Versions.attach(fd)
        os.close(fd)
    for bad in (-1, READERS):
        with pytest.raises(IndexError):
            memory.pin(bad)
    with pytest.raises(IndexError):
        memory.slot(SLOTS)
    with pytest.raises(IndexError):
        memory.unpin(0, SLOTS)
    for piece in ((memory.fd, 1, 4096), (memory.fd, 0, 100), (memory.fd, 0, 0)):
        with pytest.raises(ValueError, match="not made of pages"):
            Span([piece])
    with pytest.raises(AttachError, match="cannot map"):
        Span([(-1, 0, 4096)])
