from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef int pool_take_object(frt_ctx *x) noexcept nogil
cdef void pool_keep_object(frt_ctx *x, uint32_t i) noexcept nogil
cdef int pool_take_task(frt_ctx *x) noexcept nogil
cdef void pool_keep_task(frt_ctx *x, uint32_t t) noexcept nogil
cdef int pool_flush(frt_ctx *x) noexcept nogil
cdef int pool_return(frt_ctx *x, bint tasks, const uint32_t *records, uint32_t n) noexcept nogil
cdef int pool_touch(frt_ctx *x, bint tasks) noexcept nogil
