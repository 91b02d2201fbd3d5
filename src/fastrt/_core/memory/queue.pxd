from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport a32_load_sc, a64_load_sc, frt_ctx

cdef void queue_push(frt_ctx *x, uint32_t t, bint first) noexcept nogil
cdef uint64_t queue_cells(uint64_t tasks) noexcept nogil

cdef inline bint queue_any(frt_ctx *x) noexcept nogil:
    """Whether there may be a ready task."""
    return a64_load_sc(&x.sb.ring_head) != a64_load_sc(&x.sb.ring_tail) or a32_load_sc(&x.sb.ranked) != 0

cdef int queue_pop(frt_ctx *x) noexcept nogil
cdef uint64_t queue_length(frt_ctx *x) noexcept nogil
cdef bint queue_means(frt_ctx *x, uint64_t cell, uint64_t word) noexcept nogil
cdef void queue_wake_idle(frt_ctx *x) noexcept nogil
cdef void queue_report_load(frt_ctx *x) noexcept nogil
cdef int queue_touch(frt_ctx *x) noexcept nogil
