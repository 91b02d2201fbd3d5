from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef void orphans_mark(frt_ctx *x, uint32_t v) noexcept nogil
