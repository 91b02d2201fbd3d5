"""Every operation against what one process computes: types, sizes around boundaries, 1 to 5 ranks, where arrays lie."""

import hashlib
import itertools

import numpy as np
import pytest

from fastrt._core.collective import reduce
from fastrt.collective import as_bfloat16, init_group, new_token
from fastrt.coordination import Coordinator, CoordinatorOptions

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
TOKEN = new_token()
# How many elements, as (multiple of the number of ranks, constant).
SIZES = [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (0, 4095), (0, 4096), (0, 4097)]
CHUNK = 1 << 17  # elements of 4 bytes in 512 KiB
MANY_SIZES = [*SIZES, *((0, n + d) for n in (8192, CHUNK, 1 << 20) for d in (-1, 0, 1))]
PLACES = list(itertools.product(["private", "shared"], ["in place", "out"]))


def run_all_reduce(rank, world_size, name, cases):
    """Do all cases; returns how many were checked and a hash over all results."""
    digest, count, made = hashlib.sha256(), 0, {}
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        for dtype_name, op, size, where, how in cases:
            dtype = np.dtype(ml_dtypes.bfloat16 if dtype_name == "bfloat16" else dtype_name)
            n = size[0] * world_size + size[1]
            inputs = made.get((dtype_name, n))
            if inputs is None:
                rng = np.random.default_rng(n)
                inputs = [(rng.normal(size=n) * 100).astype(np.float32).astype(dtype) for _ in range(world_size)]
                made[dtype_name, n] = inputs
            make = g.empty if where == "shared" else np.empty
            mine = make(n, dtype)
            mine[:] = inputs[rank]
            out = make(n, dtype) if how == "out" else None
            got = g.all_reduce(mine, op, out)
            want = np.empty(n, dtype)
            divisor = world_size if op == "avg" else 1
            raw = [a.view(np.uint8) for a in inputs]
            reduce.reduce_buffers("sum" if op == "avg" else op, dtype_name, want.view(np.uint8), raw, divisor)
            case = (dtype_name, op, size, where, how)
            assert got is (mine if out is None else out), case
            assert got.tobytes() == want.tobytes(), case
            assert out is None or mine.tobytes() == inputs[rank].tobytes(), case
            if how == "in place":
                shared = g.all_reduce_shared(inputs[rank], op)
                assert shared.tobytes() == want.tobytes(), case
                assert not shared.flags.writeable
            digest.update(got.tobytes())
            count += 1
    return count, digest.hexdigest()


def ops_of(dtype):
    return ["sum", "prod", "min", "max", "avg", *(["band", "bor"] if "int" in dtype else [])]


def short_cases():
    yield from itertools.product(
        reduce.DTYPES, ["sum", "max"], [(1, 1), (0, 4097)], ["private", "shared"], ["in place"]
    )
    yield from (("int16", op, size, *place) for op in ops_of("int16") for size in SIZES for place in PLACES[1:2])
    yield from (("float64", op, size, *place) for op in ops_of("float64") for size in SIZES for place in PLACES[2:3])
    yield from (
        ("float32", "sum", size, *place) for size in [(0, 8193), (0, CHUNK), (0, 3 * CHUNK + 1)] for place in PLACES
    )


def long_cases():
    for dtype in reduce.DTYPES:
        sizes = MANY_SIZES if dtype in ("int8", "bfloat16", "float32") else MANY_SIZES[:-3]
        yield from ((dtype, op, size, *place) for op in ops_of(dtype) for size in sizes for place in PLACES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_reduce_equals_one_process_bit_for_bit(ranks, name, count):
    cases = list(short_cases())
    results = ranks(count, run_all_reduce, name, cases)
    assert results == [(len(cases), results[0][1])] * count


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_all_reduce_equals_one_process_bit_for_bit_in_every_combination(ranks, name, count):
    for dtype, cases in itertools.groupby(long_cases(), lambda case: case[0]):
        mine = list(cases)
        results = ranks(count, run_all_reduce, f"{name}-{dtype}", mine)
        assert results == [(len(mine), results[0][1])] * count


def run_moves(rank, world_size, name, sizes, dtypes):
    """Every operation that moves data, on private and shared arrays."""
    count = 0
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        for n, dtype, where in itertools.product(sizes, dtypes, ["private", "shared"]):
            make = g.empty if where == "shared" else np.empty
            root = n % world_size
            # Small numbers: their sums are exact in every type.
            every = (np.arange(world_size * world_size * n) % 23).reshape(world_size, world_size, n).astype(dtype)
            mine = make((world_size, n), dtype)
            mine[:] = every[rank]
            part = make(n, dtype)
            part[:] = every[rank, 0]
            total = every.sum(0, dtype=dtype)

            def check(got, want, what, case=(n, dtype, where)):
                assert np.array_equal(got, want), (what, case)

            check(g.all_gather(part), every[:, 0], "all_gather")
            check(g.all_gather(part, make((world_size, n), dtype)), every[:, 0], "all_gather out")
            check(g.all_to_all(mine), every[:, rank], "all_to_all")
            check(g.reduce_scatter(mine)[0], total[rank], "reduce_scatter")
            check(g.scatter(mine, root, make(n, dtype)), every[root, rank], "scatter")
            gathered = g.gather(part, root)
            assert (gathered is None) == (rank != root)
            if rank == root:
                check(gathered, every[:, 0], "gather")
            reduced = g.reduce(part, root, "max", make(n, dtype))
            if rank == root:
                check(reduced, every[:, 0].max(0), "reduce")
            check(part, every[rank, 0], "reduce leaves the input")
            check(g.broadcast(part, root), every[root, 0], "broadcast")
            count += 1
    return count


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_operations_that_move_data_bring_it_where_it_belongs(ranks, name, count):
    sizes = [0, 1, count, 4097, 70_001]
    assert ranks(count, run_moves, name, sizes, ["float32", "uint8"]) == [20] * count


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_operations_that_move_data_bring_it_where_it_belongs_in_all_sizes(ranks, name, count):
    sizes = [0, 1, count - 1, count, count + 1, 4095, 4096, 4097, 65536, 65537, (1 << 18) + 1]
    kinds = ["int8", "int16", "int64", "uint32", "float16", "float64"]
    assert ranks(count, run_moves, name, sizes, kinds) == [2 * len(sizes) * len(kinds)] * count


def run_bits(rank, world_size, name, address=None):
    """bfloat16 as its bits, as where nothing knows the type, beside the same as ml_dtypes has it."""
    options = {} if address is None else {"address": address, "node": f"{name}-{rank}", "token": TOKEN}
    with init_group(name=name, rank=rank, world_size=world_size, **options) as g:
        for n in (world_size, 4097 * world_size):
            known = (np.random.default_rng(rank).normal(size=n) * 100).astype(ml_dtypes.bfloat16)
            bits = known.view(np.uint16)
            for op in ("sum", "avg", "max"):
                whole = g.all_reduce(known.copy(), op)
                for got in (
                    g.all_reduce(as_bfloat16(bits.copy()), op),
                    g.all_reduce(as_bfloat16(bits), op, out=as_bfloat16(np.empty_like(bits))),
                    g.all_reduce_shared(as_bfloat16(bits), op),
                ):
                    assert got.array.tobytes() == whole.tobytes(), (n, op)
                part = g.reduce_scatter(as_bfloat16(bits), op)
                assert part.array.tobytes() == whole.reshape(world_size, -1)[rank].tobytes()
            assert g.all_gather(as_bfloat16(bits)).array.tobytes() == g.all_gather(known).tobytes()
            told = g.broadcast(as_bfloat16(bits.copy()), world_size - 1)
            assert told.array.tobytes() == g.broadcast(known.copy(), world_size - 1).tobytes()
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        sent = g.isend(as_bfloat16(bits), right)
        assert g.recv(as_bfloat16(np.empty_like(bits)), left).array.size == bits.size
        sent.wait()
        with pytest.raises(TypeError, match="16-bit integers, not float32"):
            as_bfloat16(np.ones(3, "f4"))
        frozen = bits.copy()
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            g.all_reduce(as_bfloat16(frozen))


def test_bits_of_bfloat16_are_computed_as_bfloat16(ranks, name):
    ranks(3, run_bits, name)
    with Coordinator(CoordinatorOptions(num_tasks=1)) as coordinator:
        ranks(2, run_bits, name, coordinator.address)


def run_same_bits(rank, world_size, name):
    rng = np.random.default_rng(rank)
    array = rng.normal(size=100_001).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 100_001)
    results = set()
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        shared = g.empty(array.shape, array.dtype)
        for _ in range(3):
            shared[:] = array
            results |= {
                g.all_reduce(array.copy()).tobytes(),
                g.all_reduce(shared).tobytes(),
                g.all_reduce(array, out=np.empty_like(array)).tobytes(),
                g.all_reduce_shared(array).tobytes(),
                g.reduce_scatter(np.tile(array, world_size)).tobytes(),
            }
    return [hashlib.sha256(r).hexdigest() for r in results]


def test_sums_have_the_same_bits_on_all_ranks_however_they_are_made(ranks, name):
    results = ranks(4, run_same_bits, name)
    assert len(results[0]) == 1
    assert results == [results[0]] * 4
