from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef int actors_touch(frt_ctx *x) noexcept nogil
cdef bint actor_unheld(frt_ctx *x, uint32_t a) noexcept nogil
cdef void actors_of_dead(frt_ctx *x, uint32_t v) noexcept nogil
