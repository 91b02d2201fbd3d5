"""C declarations of the reductions: one function over raw pointers; its callers have checked sizes and types."""
from libc.stdint cimport uint32_t

cdef extern from "reduce.h" nogil:
    int FRT_SUM, FRT_PROD, FRT_MIN, FRT_MAX, FRT_BAND, FRT_BOR, FRT_REDUCTIONS
    int FRT_I8, FRT_I16, FRT_I32, FRT_I64, FRT_U8, FRT_U16, FRT_U32, FRT_U64
    int FRT_F16, FRT_BF16, FRT_F32, FRT_F64, FRT_DTYPES
    const unsigned char *FRT_ITEM_BYTES

cdef int reduce_into(int reduction, int dtype, void *out, const void *const *sources, int sources_count, size_t count,
                     uint32_t divisor) noexcept nogil
