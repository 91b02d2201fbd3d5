"""The allocator, through the values that lie in its blocks: sizes, reuse, fragmentation, fullness, growth."""

import random
import textwrap
from itertools import pairwise

import numpy as np
import pytest

from fastrt._core.memory import arena
from fastrt._core.objects import handles, spill
from fastrt._core.repair import fsck
from fastrt.errors import ObjectStoreFullError

INLINE = 72
CLASSES = [256 << k for k in range(6)]
SIZES = [0, 1, INLINE, INLINE + 1]
SIZES += [size + d for size in CLASSES for d in (-1, 0, 1)]
SIZES += [16384 + d for d in (-1, 0, 1)] + [100_000, 1 << 20, (1 << 20) + 1]


def pattern(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def put(client, data: bytes):
    writer = handles.create(client, len(data), 16)
    writer.copy(0, data)
    return writer.seal()


def address(client, ref) -> int:
    """Where a value that is too large to be copied out lies in this process."""
    view = np.frombuffer(handles.read(client, ref)[2], np.uint8)
    return int(view.__array_interface__["data"][0])


@pytest.mark.parametrize("nbytes", SIZES)
def test_value_of_any_size_comes_back(client, nbytes):
    data = pattern(nbytes, nbytes)
    ref = put(client, data)
    assert bytes(handles.read(client, ref)[2]) == data
    row = handles.describe(client, ref)
    assert (row["bytes"], row["inline"]) == (nbytes, nbytes <= INLINE)


def test_values_of_all_sizes_at_once_do_not_overlap(client):
    datas = [pattern(k, nbytes) for k, nbytes in enumerate(SIZES * 3)]
    refs = [put(client, data) for data in datas]
    assert fsck.fsck(client, quiet=True) == []
    assert [bytes(handles.read(client, ref)[2]) for ref in refs] == datas
    for k in range(0, len(refs), 2):
        refs[k] = put(client, datas[k])
    assert [bytes(handles.read(client, ref)[2]) for ref in refs] == datas


@pytest.mark.parametrize("nbytes", [2000, 16384, 1 << 20, 5 << 20])
def test_freed_block_is_the_next_one_given(client, nbytes):
    """A page that is mapped already costs a twelfth of a fresh one."""
    anchor = put(client, pattern(1, nbytes))
    first = put(client, pattern(2, nbytes))
    where = address(client, first)
    assert where % 64 == 0
    for seed in range(5):
        del first
        first = put(client, pattern(seed, nbytes))
        assert address(client, first) == where
    assert bytes(handles.read(client, anchor)[2]) == pattern(1, nbytes)


def test_freed_neighbours_join(make_node):
    """In any order of their release, all pages are one run again in the end."""
    node = make_node(store_bytes=2 << 20)
    for seed in range(20):
        held = [node.put(16384 * (1 + k % 3)) for k in range(60)]
        random.Random(seed).shuffle(held)
        while held:
            held.pop()
        whole = handles.create(node.client, 2 << 20, node.KIND)
        assert fsck.fsck(node.client, quiet=True) == []
        del whole


def test_fragmented_store_refuses_what_has_no_run_and_takes_what_has(make_node):
    node = make_node(store_bytes=2 << 20)
    held = [node.put(16384) for _ in range(128)]
    del held[::2]
    with pytest.raises(ObjectStoreFullError):
        handles.create(node.client, 16385, node.KIND)
    again = [node.put(16384) for _ in range(64)]
    with pytest.raises(ObjectStoreFullError):
        handles.create(node.client, 300, node.KIND)
    assert fsck.usage(node.client)["bytes_used"] == 2 << 20
    again.clear()
    handles.create(node.client, 300, node.KIND)


@pytest.mark.parametrize("nbytes", [200, 1000, 8192, 16384, 300_000])
def test_store_filled_to_the_brim_is_whole_again_after(make_node, nbytes):
    node = make_node(store_bytes=1 << 20)
    for _ in range(3):
        held = node.fill(lambda: node.put(nbytes), "store is full")
        blocks = (1 << 20) // max(256, 1 << (nbytes - 1).bit_length()) if nbytes <= 16384 else 3
        assert len(held) == blocks
        assert fsck.fsck(node.client, quiet=True) == []
        assert handles.put_scalar(node.client, 5) is not None  # small values need no block
        del held


@pytest.mark.parametrize("nbytes", [(1 << 20) + 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 16384])
@pytest.mark.parametrize("nrefs", [0, 1, (1 << 32) - 1])
def test_value_that_can_never_fit_is_refused(make_node, nbytes, nrefs):
    node = make_node(store_bytes=1 << 20)
    with pytest.raises(ObjectStoreFullError, match="larger than the whole store"):
        handles.create(node.client, nbytes, node.KIND, nrefs)


@pytest.mark.parametrize("nbytes", [-1, 1 << 64])
def test_size_that_is_no_size_is_refused(client, nbytes):
    with pytest.raises(OverflowError):
        handles.create(client, nbytes, 16)


def test_store_grows_when_needed_by_as_much_as_it_has_and_64_mib_at_most(make_node):
    node = make_node(store_bytes=200 << 20)
    assert fsck.usage(node.client)["bytes_committed"] == 0
    steps = []
    held = []
    for nbytes in (1, 4 << 20, 48 << 20, 60 << 20, 68 << 20):
        held.append(handles.create(node.client, nbytes + 100, node.KIND))
        steps.append(fsck.usage(node.client)["bytes_committed"] >> 20)
    assert steps == [4, 8, 64, 128, 192]
    with pytest.raises(ObjectStoreFullError):
        handles.create(node.client, 20 << 20, node.KIND)


def test_grow_ahead_of_need_goes_to_the_end_and_then_says_no(make_node):
    node = make_node(store_bytes=100 << 20)
    assert arena.room(node.client) == (0, 0, 100 << 20)
    assert [arena.grow(node.client) for _ in range(3)] == [True, True, False]
    assert arena.room(node.client) == (0, 100 << 20, 100 << 20)


def test_empty_slab_pages_go_back_but_for_one_of_each_class(client):
    held = [handles.create(client, size, 16) for size in CLASSES for _ in range(300)]
    assert fsck.usage(client)["bytes_used"] > 200 * 16384
    held.clear()
    assert fsck.usage(client)["bytes_used"] == len(CLASSES) * 16384


def test_empty_slab_pages_do_not_stand_in_the_way_of_a_large_value(make_node):
    """Each class keeps one empty page, wherever it happens to lie; a value that needs the whole store gets it."""
    node = make_node(store_bytes=2 << 20)
    held, spares = [], []
    for size in CLASSES:
        held.append(node.put(250_000))
        spares.append(handles.create(node.client, size, node.KIND))
    del held, spares
    assert fsck.usage(node.client)["bytes_used"] == len(CLASSES) * node.PAGE
    whole = handles.create(node.client, 2 << 20, node.KIND)
    assert fsck.fsck(node.client, quiet=True) == []
    del whole


def test_blocks_of_every_class_are_packed(client):
    """64 blocks of 256 bytes to a page of 16 KiB, and so on: no page is lost to a header."""
    for size in CLASSES:
        used = fsck.usage(client)["bytes_used"]
        held = [handles.create(client, size, 16) for _ in range(4 * 16384 // size)]
        assert fsck.usage(client)["bytes_used"] == used + 4 * 16384
        held.clear()


def test_two_processes_allocate_from_one_store(make_node):
    node = make_node(store_bytes=8 << 20)
    peers = [node.peer(), node.peer()]
    code = """
        import random
        r = random.Random({seed})
        held, full = [], 0
        for k in range(20_000):
            if held and r.random() < 0.5:
                held.pop(r.randrange(len(held)))
            else:
                nbytes = r.choice((80, 300, 2000, 9000, 20_000, 200_000))
                try:
                    w = handles.create(client, nbytes, 16)
                except Exception as exc:
                    assert type(exc).__name__ == "ObjectStoreFullError"
                    full += 1
                    held.clear()
                    continue
                w.copy(0, bytes([k % 251]) * nbytes)
                held.append((k % 251, nbytes, w.seal()))
        good = all(bytes(handles.read(client, ref)[2]) == bytes([b]) * n for b, n, ref in held)
        held.clear()
        good
    """
    for seed, peer in enumerate(peers):
        peer.start(textwrap.dedent(code.format(seed=seed)))
    assert [peer.finish() for peer in peers] == [True, True]
    assert fsck.fsck(node.client, quiet=True) == []


@pytest.mark.parametrize("seed", range(4))
def test_free_runs_are_what_a_model_of_the_memory_says(make_node, seed):
    """Values of random sizes come and go: blocks and free runs cover the memory, and no two free runs touch."""
    node = make_node(store_bytes=8 << 20)
    client, rng = node.client, random.Random(seed)
    while arena.grow(client):
        pass
    held = []
    for step in range(1500):
        if held and (rng.random() < 0.45 or step > 1400):
            held.pop(rng.randrange(len(held)))
        else:
            try:
                held.append(node.put(rng.choice((100, 5000, 16384, 40_000, 300_000, 1 << 20))))
            except ObjectStoreFullError:
                held.pop(rng.randrange(len(held)))
        if step % 10 == 0:
            runs = spill.free_runs(client)
            blocks = [(row[2], row[1]) for row in spill.candidates(client)]
            pieces = sorted(runs + blocks)
            assert all(one[0] + one[1] <= two[0] for one, two in pairwise(pieces)), "memory is given twice"
            assert all(one[0] + one[1] < two[0] for one, two in pairwise(runs)), "neighbours were not joined"
            assert sum(nbytes for _, nbytes in runs) + arena.room(client)[0] == 8 << 20
    held.clear()
    assert fsck.fsck(client, quiet=True) == []


def test_small_values_lie_at_the_low_end_and_then_at_the_high_end(make_node):
    """Between large values they would divide the room that these leave behind."""
    node = make_node(store_bytes=16 << 20)
    client = node.client
    assert arena.grow(client)
    start = spill.free_runs(client)[0][0]
    large = [node.put(1 << 20) for _ in range(3)]
    small = [node.put(16_000) for _ in range(16)]
    places = [address(client, ref) - address(client, small[0]) for ref in small]
    assert places == [k * node.PAGE for k in range(16)]
    assert spill.free_runs(client)[0][0] == start + (3 << 20) + 16 * node.PAGE
    small += [node.put(16_000) for _ in range(16)]
    large += [node.put(12 << 20)]
    assert [nbytes for _, nbytes in spill.free_runs(client)] == [32 * node.PAGE]
    del large
    assert max(nbytes for _, nbytes in spill.free_runs(client)) >= 15 << 20
