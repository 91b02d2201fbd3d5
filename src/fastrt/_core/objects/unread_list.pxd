from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef void unread_keep(frt_ctx *x, uint32_t i) noexcept nogil
cdef void unread_read(frt_ctx *x, uint32_t i) noexcept nogil
cdef bint unread_waits() noexcept nogil
cdef int unread_notify() except -1
