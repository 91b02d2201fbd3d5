from libc.stdint cimport uint8_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx, frt_refslot

cdef bint links_names(frt_ctx *x, const frt_refslot *slot) noexcept nogil
cdef int task_result(frt_ctx *x, uint32_t t, uint32_t k) noexcept nogil
cdef bint task_is_mine(frt_ctx *x, uint32_t t) noexcept nogil
cdef int links_count(frt_ctx *x, const frt_refslot *slots, uint32_t n, uint8_t *flags, uint8_t flag) noexcept nogil
cdef int links_uncount(frt_ctx *x, const frt_refslot *slots, uint32_t n, uint8_t *flags, uint8_t flag) noexcept nogil
cdef void links_wait(frt_ctx *x, uint32_t t) noexcept nogil
cdef void links_unwait(frt_ctx *x, uint32_t t) noexcept nogil
cdef void links_sealed(frt_ctx *x, uint32_t i) noexcept nogil
cdef bint links_unheld(frt_ctx *x, const frt_refslot *slot, uint32_t own) noexcept nogil
cdef int links_hold_function(frt_ctx *x, uint32_t i) noexcept nogil
cdef void links_tell_held(frt_ctx *x) noexcept nogil
cdef bint links_hold(frt_ctx *x, uint32_t t) noexcept nogil
cdef int links_take_held(frt_ctx *x) noexcept nogil
cdef int links_take_waiting(frt_ctx *x, uint32_t t, uint64_t id, int state,
                            uint32_t devices, bint first) noexcept nogil
cdef void links_relist(frt_ctx *x) noexcept nogil
cdef int links_touch(frt_ctx *x) noexcept nogil
cdef void links_recount(frt_ctx *x) noexcept nogil
cdef int links_add_item(frt_ctx *x, uint32_t s, uint32_t i) noexcept nogil
cdef int links_take_item(frt_ctx *x, uint32_t s, uint64_t head) noexcept nogil
