from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx

cdef int stream_push(frt_ctx *x, uint32_t s, uint32_t i) noexcept nogil
cdef int stream_pop(frt_ctx *x, uint32_t s, uint64_t head) noexcept nogil
cdef int stream_rebuild(frt_ctx *x, uint32_t s) noexcept nogil
