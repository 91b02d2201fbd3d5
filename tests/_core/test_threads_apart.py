"""Threads that use parts of the core which need no client: counts of references, collectives, tables, transfers."""

import os
import random
import socket
import threading
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fastrt._core.collective.channel import Channels
from fastrt._core.collective.collective import Collective
from fastrt._core.collective.groups import GroupMemory
from fastrt._core.collective.reduce import reduce_buffers
from fastrt._core.refcounts.audit import check_invariants
from fastrt._core.refcounts.refcount import RefTable
from fastrt._core.tables import optimizer
from fastrt._core.tables.embedding import PARTS, EmbeddingMemory, lookup
from fastrt._core.tables.versions import PinnedView, Span, Versions
from fastrt._core.transfer import chunk, stream
from fastrt.errors import ReferenceCountError
from support.threads import together

THREADS = 4
CORE = Path(__file__).parents[2] / "src/fastrt/_core"
F = np.float32


@pytest.fixture
def ranks(drop_arguments: None) -> Iterator[list[GroupMemory]]:
    """Two ranks of one group, both in this process."""
    fd = GroupMemory.create(2, heap_bytes=1 << 24)
    yield [GroupMemory.attach(os.dup(fd), rank, 2) for rank in range(2)]
    os.close(fd)


def test_every_module_says_that_it_needs_no_gil():
    """The first import of one that does not would turn the GIL on for all threads; see docs/adr/0010."""
    silent = [path.name for path in CORE.rglob("*.pyx") if "freethreading_compatible=True" not in path.read_text()]
    assert silent == []


def test_each_dead_reference_is_listed_once(frequent_turns):
    """Threads drop references that contain others, while others read the table and blocks of it are forgotten."""
    table = RefTable()
    dropped: list[list[int]] = [[] for _ in range(THREADS)]
    ended = threading.Event()

    def drop(number: int) -> None:
        for _ in range(200):
            first = table.add(60, 2, False)
            refs = list(range(first, first + 60))
            table.increment(array("Q", refs))
            table.contain(first, refs[1:30])  # their second count
            table.alias(first + 59, first + 58)
            dropped[number] += table.decrement(refs)
            dropped[number] += table.decrement(refs)
            dropped[number] += table.decrement([first, *refs[30:]])

    def read() -> None:
        dice = random.Random(1)
        while not ended.is_set():
            made = len(table)
            assert table.alive <= len(table)
            assert table.dangling == 0
            for count in table.counts(max(0, made - 200)):
                assert count
            assert all(ref < made for ref, _, _ in table.alive_before(made))
            if made:
                ref = dice.randrange(made)
                table.is_alive(ref), table.is_pending(ref), table.count(ref), table.kept
                assert all(inner < len(table) for inner in table.contained(ref))
                try:
                    assert ref in table.members(ref)
                except ReferenceCountError:  # it is dead
                    pass

    def work() -> None:
        try:
            together(*[partial(drop, number) for number in range(THREADS)])
        finally:
            ended.set()

    together(work, read, read)
    assert sorted(one for some in dropped for one in some) == list(range(len(table)))
    assert table.alive == 0
    check_invariants(table)


def test_a_batch_takes_its_references_from_a_list_as_it_is():
    """Another thread makes the list longer and shorter: a call sees one of its states."""
    table = RefTable()
    table.add(2, 1, False)
    refs = [0]
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            refs.extend([0] * 40)
            del refs[1:]

    def use() -> None:
        try:
            for _ in range(3000):
                table.increment(refs)
        finally:
            ended.set()

    together(use, change)
    assert table.count(0) > 3000
    assert table.count(1) == 1


def test_blocks_of_a_heap_are_apart(ranks, frequent_turns):
    memory, other = ranks

    def work(number: int) -> None:
        dice = random.Random(number)
        held: list[np.ndarray] = []
        for k in range(300):
            nbytes = dice.choice((100, 5000, 20_000))
            block = memory.allocate(nbytes, is_result=k % 7 == 0)
            if k % 7 == 0:
                other.result(block.place, nbytes)  # and dropped: the block is free once this rank has dropped it, too
                continue
            made = np.frombuffer(block, np.uint8)
            made[:] = number
            held.append(made)
            if len(held) > 8:
                assert (held.pop(dice.randrange(8)) == number).all()
        assert all((one == number).all() for one in held)

    together(*[partial(work, number) for number in range(THREADS)])
    assert memory.used_bytes == 0


def test_one_thread_at_a_time_is_in_an_operation(ranks):
    """Threads that come meanwhile are refused, and change nothing."""
    groups = [Collective(memory, 20.0) for memory in ranks]
    tickets = [None] * 300
    refused: list[RuntimeError] = []

    def reduce(rank: int) -> bool:
        """Whether no other thread was in an operation."""
        mine = np.full(1000, rank + 1, F)
        try:
            groups[rank].all_reduce(mine)
        except RuntimeError as error:
            refused.append(error)
            return False
        assert (mine == 3).all()
        return True

    def crowd() -> None:
        while tickets:
            try:
                tickets.pop()
            except IndexError:
                return
            while not reduce(0):
                os.sched_yield()

    def alone() -> None:
        for _ in range(300):
            assert reduce(1)

    together(alone, *[crowd] * THREADS)
    assert [group.operations for group in groups] == [300, 300]
    assert all("another thread" in str(error) for error in refused)


def test_messages_of_many_threads_keep_to_their_pairs():
    """Each rank has a thread for each direction, all in one process."""
    count = 3
    fd = GroupMemory.create(count, heap_bytes=1 << 20)
    members = [Channels(GroupMemory.attach(os.dup(fd), rank, count)) for rank in range(count)]
    os.close(fd)

    def send(source: int, target: int) -> None:
        for k in range(200):
            assert members[source].send(np.full(k + 1, 10 * source + target, np.uint8), target, k % 3, 20.0)

    def receive(source: int, target: int) -> None:
        for three in range(0, 198, 3):
            for k in (three + 2, three, three + 1):  # those of other tags are kept aside meanwhile
                got = np.empty(k + 1, np.uint8)
                assert members[target].receive(got, source, k % 3, 20.0)
                assert (got == 10 * source + target).all()

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    together(*[partial(work, *pair) for pair in pairs for work in (send, receive)])
    members[0].closed = True
    assert members[0].closed
    assert not members[1].closed


def test_sums_by_many_threads_are_right():
    def work(number: int) -> None:
        parts = [np.full(2000, number + k, np.int64) for k in range(5)]
        out = np.empty(2000, np.int64)
        for _ in range(100):
            reduce_buffers("sum", "int64", out, parts)
            assert (out == 5 * number + 10).all()

    together(*[partial(work, number) for number in range(THREADS)])


def test_rows_made_and_removed_by_many_threads_are_found(frequent_turns):
    """Threads of the server change its rows; a reader with a mapping of its own looks them up meanwhile."""
    memory = EmbeddingMemory.create(4, 20_000, True)
    reader = EmbeddingMemory.attach(os.dup(memory.fd))
    ended = threading.Event()
    keep = 500

    def serve(number: int) -> None:
        for k in range(40):
            keys = (np.arange(keep, dtype=np.uint64) + k * keep) * THREADS + number
            rows = np.empty(keep, np.int64)
            memory.insert(keys, np.repeat(keys, 4).astype(F), rows)
            memory.begin(rows)
            memory.end(rows)
            found = np.empty(keep, np.uint64)
            memory.keys_of(rows, found)
            assert (found == keys).all()
            assert len(memory.notes_bytes()) >= 16 * keep
            if k:
                before = keys - THREADS * keep
                assert memory.find(before, rows) == 0
                memory.remove(rows)

    def look() -> None:
        dice = np.random.default_rng(1)
        out, missing = np.empty((256, 4), F), np.empty(256, np.int64)
        while not ended.is_set():
            keys = dice.integers(0, 40 * keep * THREADS, 256).astype(np.uint64)
            absent = set(missing[: lookup([reader], bytes(PARTS), keys, out, missing)].tolist())
            there = [k for k in range(256) if k not in absent]
            assert (out[there] == keys[there, None].astype(F)).all()

    def work() -> None:
        try:
            together(*[partial(serve, number) for number in range(THREADS)])
        finally:
            ended.set()

    together(work, look)
    assert memory.count == THREADS * keep
    last = np.arange(39 * keep * THREADS, 40 * keep * THREADS, dtype=np.uint64)
    assert memory.find(last, np.empty(len(last), np.int64)) == 0


def test_versions_that_many_threads_pin_are_whole():
    memory = Versions.create(8192)
    readers = [Versions.attach(os.dup(memory.fd)) for _ in range(2)]
    ended = threading.Event()

    def serve() -> None:
        try:
            for value in range(1, 400):
                slot = memory.begin()
                if slot >= 0:
                    np.frombuffer(memory.slot(slot), F)[:] = value
                    memory.publish(slot)
        finally:
            ended.set()

    def read(number: int) -> None:
        reader, row = readers[number % 2], number % 3
        while not ended.is_set():
            slot, _ = reader.pin(row)
            span = Span([(reader.fd, reader.offset(slot), reader.slot_bytes)])
            view = np.frombuffer(PinnedView(span, [(reader, row, slot)]), F)
            assert (view == view[0]).all()

    together(serve, *[partial(read, number) for number in range(THREADS)])
    assert memory.held() == 0
    assert [memory.pinned(row) for row in range(3)] == [0, 0, 0]


def test_updates_of_many_threads_do_not_meet():
    def work(number: int) -> None:
        param, grad = np.full(5000, number, F), np.ones(5000, F)
        for _ in range(200):
            optimizer.sgd(param, grad, 1.0)
        optimizer.sgd(param, grad[:100], 1.0, rows=np.arange(100))
        assert (param[:100] == number - 201).all()
        assert (param[100:] == number - 200).all()

    together(*[partial(work, number) for number in range(THREADS)])


def test_chunks_and_streams_of_many_threads_are_whole():
    def work(number: int) -> None:
        ours, theirs = socket.socketpair()
        data = os.urandom(200_000)
        with ours, theirs:
            for k in range(20):
                message = chunk.encode(number, k, data)
                sent = threading.Thread(target=stream.send_parts, args=(ours.fileno(), [message], 20.0))
                sent.start()
                got = bytearray(len(message))
                assert stream.receive_parts(theirs.fileno(), [got], len(got), 20.0) == len(got)
                sent.join()
                assert stream.crc32c(got) == stream.crc32c(message, software=k % 2 == 0)
                made = chunk.decode(bytes(got))
                assert (made.objref, made.totalsize, bytes(made)) == (number, k, data)

    together(*[partial(work, number) for number in range(THREADS)])


def test_parts_beyond_the_most_are_refused():
    """One more part than there is room for, also where the list has grown since it was looked at."""
    with pytest.raises(ValueError, match="at most"):
        stream.send_parts(-1, [b""] * (stream.PARTS_MAX + 1), 1.0)
