"""Rows under keys in shared memory beside a dictionary; damage, sizes, and lookups while rows are written."""

import fcntl
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt._core.tables.embedding import PARTS, EmbeddingMemory, lookup, parts_of, sum_rows
from fastrt.errors import AttachError, ObjectStoreFullError

F = np.float32
OWNER = bytes(PARTS)
KEYS = st.integers(0, 40) | st.sampled_from([(1 << 64) - 1, 1 << 63, 0])


def keys_of(*keys: int) -> Any:
    return np.array(keys, np.uint64)


def insert(memory: EmbeddingMemory, keys: Any, values: Any) -> Any:
    rows = np.empty(len(keys), np.int64)
    memory.insert(keys, np.ascontiguousarray(values, F), rows)
    return rows


def look(memory: EmbeddingMemory, keys: Any) -> tuple[Any, list[int]]:
    out, missing = np.full((len(keys), memory.dim), -1, F), np.empty(len(keys), np.int64)
    count = lookup([memory], OWNER, keys, out, missing)
    return out, missing[:count].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "remove", "write"]), st.lists(KEYS, max_size=30)), max_size=12))
def test_rows_are_those_of_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    memory = EmbeddingMemory.create(3, 60, True)
    reader = EmbeddingMemory.attach(os.dup(memory.fd))
    values = np.frombuffer(memory, F).reshape(-1, 3)
    model: dict[int, float] = {}
    count = 0.0
    for what, chosen in steps:
        there = [key for key in dict.fromkeys(chosen) if (key in model) != (what == "insert")]
        some = keys_of(*there)
        rows = np.empty(len(there), np.int64)
        count += 1
        if what == "insert":
            insert(memory, some, np.full((len(there), 3), count))
            model.update(dict.fromkeys(there, count))
            continue
        assert memory.find(some, rows) == 0
        if what == "remove":
            memory.remove(rows)
            for key in there:
                del model[key]
        else:
            memory.begin(rows)
            values[rows] = count
            memory.end(rows)
            model.update(dict.fromkeys(there, count))
    asked = keys_of(*range(41), (1 << 64) - 1, 1 << 63)
    out, missing = look(reader, asked)
    assert missing == [k for k, key in enumerate(asked.tolist()) if key not in model]
    found = [k for k in range(len(asked)) if k not in missing]
    assert out[found].tolist() == [[model[int(key)]] * 3 for key in asked[found]]
    assert memory.count == len(model)


def test_index_grows_and_is_made_anew_among_evictions() -> None:
    memory = EmbeddingMemory.create(2, 1 << 16, False)
    reader = EmbeddingMemory.attach(os.dup(memory.fd))
    keys = np.arange(50_000, dtype=np.uint64) * np.uint64(7919)
    rows = insert(memory, keys, np.repeat(np.arange(50_000)[:, None], 2, axis=1))
    for begin in range(0, 40_000, 4000):  # many more come and go than the index has entries
        memory.remove(rows[begin : begin + 4000])
        rows[begin : begin + 4000] = insert(memory, keys[begin : begin + 4000], np.full((4000, 2), begin))
    out, missing = look(reader, keys)
    assert not missing
    assert np.array_equal(out[40_000:, 0], np.arange(40_000, 50_000))
    assert (out[4000:8000] == 4000).all()
    with pytest.raises(ObjectStoreFullError, match="50000 of at most 65536"):
        insert(memory, np.arange(20_000, dtype=np.uint64) + np.uint64(1 << 50), np.zeros((20_000, 2)))
    assert memory.count == 50_000


def test_row_that_is_being_written_or_was_abandoned_so_is_not_found() -> None:
    memory = EmbeddingMemory.create(2, 10, False)
    rows = insert(memory, keys_of(1, 2), [[1, 1], [2, 2]])
    memory.begin(rows[:1])
    out, missing = look(memory, keys_of(1, 2))
    assert missing == [0]
    assert out[1].tolist() == [2, 2]
    with pytest.raises(IndexError, match="being changed already"):
        memory.begin(rows)
    memory.end(rows[:1])
    assert look(memory, keys_of(1, 2))[1] == []
    memory.retire()
    assert look(memory, keys_of(1, 2))[1] == [0, 1]


def test_last_use_is_noted_by_lookups() -> None:
    memory = EmbeddingMemory.create(1, 10, True)
    insert(memory, keys_of(1, 2, 3), [[1], [2], [3]])
    look(memory, keys_of(2))
    look(memory, keys_of(1))
    note = np.dtype([("key", "<u8"), ("seq", "<u4"), ("used", "<u4")])
    notes = np.frombuffer(memory.notes_bytes(), note)
    assert notes["key"][np.argsort(notes["used"])].tolist() == [3, 2, 1]


def test_damage_in_the_shared_head_is_an_error_or_a_miss_never_a_crash() -> None:
    dice = np.random.default_rng(3)
    for _ in range(300):
        memory = EmbeddingMemory.create(4, 100, True)
        insert(memory, np.arange(50, dtype=np.uint64), np.ones((50, 4)))
        reader = EmbeddingMemory.attach(os.dup(memory.fd))
        where = int(dice.integers(0, 4096 + 1600))
        os.pwrite(memory.fd, dice.bytes(int(dice.integers(1, 16))), where)
        out, missing = look(reader, np.arange(60, dtype=np.uint64))
        for k in set(range(60)) - set(missing):
            assert out[k].tolist() == [1] * 4
        try:
            EmbeddingMemory.attach(other := os.dup(memory.fd))
        except AttachError:
            os.close(other)


def test_what_does_not_fit_is_refused() -> None:
    for dim, rows in ((0, 1), (1, 0), (1 << 21, 1), (1, 1 << 31), (1 << 20, 1 << 30)):
        with pytest.raises(ValueError, match="cannot be"):
            EmbeddingMemory.create(dim, rows, False)
    memory = EmbeddingMemory.create(2, 10, False)
    rows = np.empty(1, np.int64)
    for call in (
        lambda: memory.find(keys_of(1, 2), rows),
        lambda: memory.insert(keys_of(1), np.zeros(3, F), rows),
        lambda: memory.keys_of(rows, np.empty(2, np.uint64)),
        lambda: lookup([memory], OWNER, keys_of(1), np.zeros(3, F), rows),
        lambda: lookup([memory], b"", keys_of(1), np.zeros(2, F), rows),
        lambda: lookup([memory], OWNER, keys_of(1, 2), np.zeros(4, F), rows),
        lambda: sum_rows(keys_of(1), np.zeros(2, F), keys_of(), np.zeros(2, F)),
        lambda: parts_of(keys_of(1), np.zeros(2, np.uint8)),
        lambda: EmbeddingMemory.attach(os.dup(memory.fd)).insert(keys_of(1), np.zeros(2, F), rows),
    ):
        with pytest.raises(ValueError, match=" "):
            call()
    with pytest.raises(TypeError, match="items of 8 bytes"):
        memory.find(np.zeros(1, np.int32), rows)
    for bad in (-1, 0, 10):
        with pytest.raises(IndexError):
            memory.remove(np.array([bad]))
        with pytest.raises(IndexError):
            memory.begin(np.array([bad]))
        with pytest.raises(IndexError, match="was never used"):
            memory.keys_of(np.array([bad]), np.empty(1, np.uint64))
    memory.insert(keys_of(7, 1 << 63, 9), np.zeros(6, F), np.empty(3, np.int64))
    for removed in ([0, 5], [0, 1, 0]):
        with pytest.raises(IndexError):
            memory.remove(np.array(removed))
        assert memory.find(keys_of(7, 1 << 63, 9), np.empty(3, np.int64)) == 0, "a refused call removes no row"
    found = np.empty(2, np.uint64)
    memory.keys_of(np.array([2, 1]), found)
    assert found.tolist() == [9, 1 << 63]
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    for size in (0, 1 << 20):
        os.ftruncate(fd, size)
        with pytest.raises(AttachError):
            EmbeddingMemory.attach(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(AttachError):
        EmbeddingMemory.attach(fd)
    os.close(fd)


@settings(max_examples=60, deadline=None)
@given(st.lists(KEYS, max_size=60))
def test_rows_of_equal_keys_are_summed_in_their_order(keys: list[int]) -> None:
    given_keys = keys_of(*keys)
    grads = np.random.default_rng(len(keys)).standard_normal((len(keys), 3)).astype(F)
    out_keys, out = np.empty_like(given_keys), np.empty_like(grads)
    count = sum_rows(given_keys, grads, out_keys, out)
    model: dict[int, Any] = {}
    for key, grad in zip(keys, grads, strict=True):
        model[key] = model[key] + grad if key in model else grad
    assert out_keys[:count].tolist() == list(model)
    assert np.array_equal(out[:count], np.array(list(model.values()), F).reshape(-1, 3))
