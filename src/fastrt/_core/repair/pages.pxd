from libc.stddef cimport size_t

from fastrt._core.memory.layout cimport frt_ctx

cdef enum:
    PAGES_COPIED = 1 << 16  # bytes of records that are copied at once: more do not stay in the processor's cache

cdef void pages_copy(frt_ctx *x, const void *first, size_t nbytes, char *to) noexcept nogil
