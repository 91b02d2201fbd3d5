from libc.stdint cimport int64_t, uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef int wait_nap(frt_ctx *x, uint32_t seen, int64_t deadline_ns, int64_t nap_ns=*) noexcept nogil
cdef bint wait_spin_on(int64_t started, int64_t spin_ns) noexcept nogil
cdef bint spin_sealed(frt_ctx *x, uint32_t i, int64_t spin_ns) noexcept nogil
cdef int wait_sealed(frt_ctx *x, uint32_t i, int64_t deadline_ns, int64_t spin_ns) noexcept nogil
cdef int wait_resident(frt_ctx *x, uint32_t i, int64_t deadline_ns) noexcept nogil
cdef int wait_news(frt_ctx *x, uint32_t *word, uint32_t seen, int64_t deadline_ns) noexcept nogil
cdef int wait_any(frt_ctx *x, const uint32_t *entries, uint32_t n, uint32_t want, int64_t deadline_ns,
                  int64_t spin_ns) noexcept nogil
cdef int wait_task(frt_ctx *x, int64_t deadline_ns, int64_t spin_ns) noexcept nogil
