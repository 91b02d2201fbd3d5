from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.layout cimport frt_ctx

cdef int task_let_go(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_done(frt_ctx *x, uint32_t t) noexcept nogil
cdef bint task_results_sealed(frt_ctx *x, uint32_t t) noexcept nogil
cdef bint task_is_cancelled(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_mark_cancelled(frt_ctx *x, uint32_t t, uint64_t word) noexcept nogil
