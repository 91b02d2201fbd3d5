from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx

cdef bint trace_wanted(frt_ctx *x) noexcept nogil
cdef void trace_settle(frt_ctx *x) noexcept nogil

cdef extern from "trace.h" nogil:
    unsigned FRT_TRACE_PROCESS, FRT_TRACE_TASK, FRT_TRACE_SUBMIT, FRT_TRACE_PUT, FRT_TRACE_GET
    unsigned FRT_TRACE_WAIT, FRT_TRACE_SPILL, FRT_TRACE_RESTORE, FRT_TRACE_FETCH
    uint64_t FRT_TRACE_BYTES_MIN
    int64_t frt_trace_ticks(uint32_t clock) noexcept
    uint64_t frt_trace_begin(frt_ctx *x, unsigned kind, uint64_t id, uint32_t what, uint32_t actor) noexcept
    void frt_trace_end(frt_ctx *x, uint64_t n) noexcept
    void frt_trace_point(frt_ctx *x, unsigned kind, uint64_t id, uint32_t what, uint32_t actor) noexcept
