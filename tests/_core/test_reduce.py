import itertools
import math

import numpy as np
import pytest

from fastrt._core.collective import reduce

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
NUMPY = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
BITS = {"band": np.bitwise_and, "bor": np.bitwise_or}
HALVES = ("float16", "bfloat16")
LENGTHS = [0, 1, 3, 31, 1023, 1024, 1025, 2049, 8197]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def inputs(name, count, length, seed=1):
    """Arrays of all magnitudes, with NaN, infinities and both zeros among the floats."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    raw = rng.integers(0, 256, (count, length * dtype.itemsize), dtype=np.uint8)
    return [row.view(dtype) for row in raw]


def expected(reduction, name, arrays):
    """The same in NumPy, one source after the other; 16-bit floats in float32, rounded once."""
    how = {**NUMPY, **BITS}[reduction]
    wide = [a.astype(np.float32) for a in arrays] if name in HALVES else arrays
    out = wide[0].copy()
    for a in wide[1:]:
        out = how(out, a)
    return out.astype(arrays[0].dtype)


def same(got, want):
    """Equal bit for bit, where any NaN equals any other: processors differ in which one they hand on."""
    if got.dtype.kind in "iu":
        return np.array_equal(got, want)
    nan = np.isnan(got.astype(np.float64))
    bits = f"u{got.itemsize}"
    return np.array_equal(nan, np.isnan(want.astype(np.float64))) and np.array_equal(
        got.view(bits)[~nan], want.view(bits)[~nan]
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])
@pytest.mark.parametrize("name", reduce.DTYPES)
def test_reduction_equals_numpy_bit_for_bit(name, portable):
    reductions = list(NUMPY) if dtype_of(name).kind not in "iu" else [*NUMPY, *BITS]
    for reduction, count, length in itertools.product(reductions, (1, 2, 3, 5), LENGTHS):
        arrays = inputs(name, count, length, seed=length + count)
        bits = [a.view(np.uint8) for a in arrays]
        out = np.zeros_like(arrays[0])
        reduce.reduce_buffers(reduction, name, out.view(np.uint8), bits, portable=portable)
        want = expected(reduction, name, arrays)
        zeros = (out.view(f"u{out.itemsize}") ^ want.view(f"u{out.itemsize}")) == 1 << (8 * out.itemsize - 1)
        if reduction in ("min", "max") and out.dtype.kind == "f":
            out[zeros & (out == 0)] = want[zeros & (out == 0)]  # min(0, -0) may be either
        assert same(out, want), (reduction, count, length)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", reduce.DTYPES)
def test_result_may_be_any_of_the_sources(name):
    for count in (2, 3, 5):
        arrays = inputs(name, count, 5000)
        want = np.zeros_like(arrays[0])
        reduce.reduce_buffers("sum", name, want.view(np.uint8), [a.view(np.uint8) for a in arrays])
        for k in range(count):
            copies = [a.copy() for a in arrays]
            reduce.reduce_buffers("sum", name, copies[k].view(np.uint8), [a.view(np.uint8) for a in copies])
            assert same(copies[k], want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", reduce.DTYPES)
def test_both_sets_of_loops_give_the_same_bits(name):
    arrays = [a.view(np.uint8) for a in inputs(name, 3, 70001)]
    one, other = np.zeros_like(arrays[0]), np.zeros_like(arrays[0])
    for reduction in ("sum", "min", "max"):
        reduce.reduce_buffers(reduction, name, one, arrays, 3)
        reduce.reduce_buffers(reduction, name, other, arrays, 3, portable=True)
        assert same(one.view(dtype_of(name)), other.view(dtype_of(name)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", HALVES)
def test_every_16_bit_float_is_widened_and_rounded_as_it_should(name):
    every = np.arange(1 << 16, dtype=np.uint16)
    zeros = np.zeros_like(every)
    for portable in (False, True):
        out = np.empty_like(every)
        reduce.reduce_buffers("max", name, out, [every, every], portable=portable)
        assert same(out.view(dtype_of(name)), every.view(dtype_of(name)))
        # A third of each: results that need rounding, subnormal ones too.
        reduce.reduce_buffers("sum", name, out, [every, zeros], 3, portable=portable)
        with np.errstate(all="ignore"):
            want = (every.view(dtype_of(name)).astype(np.float32) / np.float32(3)).astype(dtype_of(name))
        finite = every != 0x8000  # -0 + 0 is 0
        assert same(out.view(dtype_of(name))[finite], want[finite])


def test_average_of_integers_is_cut_towards_zero():
    out = np.empty(3, np.int32)
    reduce.reduce_buffers("sum", "int32", out, [np.array([-7, 7, 8], np.int32), np.zeros(3, np.int32)], 2)
    assert out.tolist() == [math.trunc(-3.5), 3, 4]


def test_bits_of_floats_are_refused():
    with pytest.raises(TypeError, match="no band of float32"):
        reduce.reduce_buffers("band", "float32", bytearray(8), [bytes(8), bytes(8)])


@pytest.mark.parametrize(("out", "sources"), [(8, [8, 12]), (6, [6]), (8, []), (4, [4] * 65)])
def test_buffers_that_do_not_fit_are_refused(out, sources):
    with pytest.raises(ValueError, match="source"):
        reduce.reduce_buffers("sum", "float32", bytearray(out), [bytes(n) for n in sources])
