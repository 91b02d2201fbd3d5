from libc.stdint cimport int8_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx

cdef int ranked_mark(frt_ctx *x, uint32_t t, int8_t priority) noexcept nogil
cdef uint64_t ranked_key(frt_ctx *x, uint32_t t) noexcept nogil
cdef void ranked_put(frt_ctx *x, uint32_t t, uint64_t cell) noexcept nogil
cdef int ranked_take(frt_ctx *x, bint any_priority) noexcept nogil
cdef void ranked_rebuild(frt_ctx *x) noexcept nogil
