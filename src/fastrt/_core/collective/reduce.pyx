# cython: language_level=3, freethreading_compatible=True
"""Vector kernels: sum, product, minimum, maximum and bitwise and/or of several buffers, element by element.

The loops are C (include/reduce.h), in two versions: for any processor of the architecture, and with AVX2 if the
processor has it. Both give the same result, bit for bit. `reduce_buffers` is the interface for Python callers and
tests.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t

cdef extern from "reduce.h" nogil:
    ctypedef int (*frt_reduce_fn)(int, int, void *, const void *const *, int, size_t, uint32_t) noexcept nogil
    int frt_reduce_has_avx2() noexcept
    frt_reduce_fn frt_reduce_choose(int) noexcept

cdef enum:
    SOURCES_MAX = 64

HARDWARE = bool(frt_reduce_has_avx2())
DTYPES = {
    "int8": FRT_I8, "int16": FRT_I16, "int32": FRT_I32, "int64": FRT_I64,
    "uint8": FRT_U8, "uint16": FRT_U16, "uint32": FRT_U32, "uint64": FRT_U64,
    "float16": FRT_F16, "bfloat16": FRT_BF16, "float32": FRT_F32, "float64": FRT_F64,
}
REDUCTIONS = {
    "sum": FRT_SUM, "prod": FRT_PROD, "min": FRT_MIN, "max": FRT_MAX, "band": FRT_BAND, "bor": FRT_BOR,
}
cdef frt_reduce_fn _best = frt_reduce_choose(frt_reduce_has_avx2())


cdef int reduce_into(int reduction, int dtype, void *out, const void *const *sources, int sources_count, size_t count,
                     uint32_t divisor) noexcept nogil:
    """Combine the sources in their order into `out`, which may be one of them; -1: not defined for this type."""
    return _best(reduction, dtype, out, sources, sources_count, count, divisor)


def reduce_buffers(str reduction, str dtype, out, list sources, uint32_t divisor=1, bint portable=False):
    """Combine buffers of one size, element by element, in their order.

    Args:
        reduction: one of REDUCTIONS.
        dtype: one of DTYPES: how the bytes are read.
        out: a writable contiguous buffer; it may be one of the sources, but must not partly overlap one.
        sources: 1 to 64 contiguous buffers of the length of `out`.
        divisor: divide the result by it; integers round towards zero.
        portable: do not use AVX2, even if the processor has it.
    Raises:
        ValueError: sizes differ, or there are too many sources or none.
        TypeError: the reduction is not defined for this type (bitwise operations on floats).
    """
    cdef Py_buffer views[SOURCES_MAX + 1]
    cdef const void *pointers[SOURCES_MAX]
    cdef int held = 0, rc, k
    cdef int how = REDUCTIONS[reduction]
    cdef int code = DTYPES[dtype]
    cdef tuple held_sources = tuple(sources)  # another thread may change the list
    cdef int count = <int>len(held_sources)
    cdef frt_reduce_fn run = frt_reduce_choose(0) if portable else _best
    if not 1 <= count <= SOURCES_MAX:
        raise ValueError(f"{count} sources; there must be 1 to {SOURCES_MAX}")
    try:
        PyObject_GetBuffer(out, &views[0], PyBUF_WRITABLE)
        held = 1
        for k in range(count):
            PyObject_GetBuffer(held_sources[k], &views[k + 1], PyBUF_SIMPLE)
            held += 1
            pointers[k] = views[k + 1].buf
            if views[k + 1].len != views[0].len or views[0].len % FRT_ITEM_BYTES[code]:
                raise ValueError(f"source {k} has {views[k + 1].len} bytes, the result {views[0].len}")
        with nogil:
            rc = run(how, code, views[0].buf, pointers, count, views[0].len // FRT_ITEM_BYTES[code], divisor)
    finally:
        for k in range(held):
            PyBuffer_Release(&views[k])
    if rc < 0:
        raise TypeError(f"there is no {reduction} of {dtype}")
