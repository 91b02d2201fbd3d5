from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx

cdef void failure_crashed(frt_ctx *x, uint32_t v, uint32_t t, const char *type, const char *message, int signal,
                          bint retried) noexcept nogil
cdef void failures_mend(frt_ctx *x, uint64_t id) noexcept nogil
cdef void failures_of_dead(frt_ctx *x, uint32_t v) noexcept nogil
