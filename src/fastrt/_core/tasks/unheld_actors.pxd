from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef bint actor_unheld(frt_ctx *x, uint32_t a) noexcept nogil
