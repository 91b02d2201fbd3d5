from libc.stdint cimport uint16_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport (
    FRT_PINS, FRT_REFS, a64_or_sc, frt_ctx, frt_has_left, frt_mine, frt_refslot, frt_threads_give, frt_threads_take)

cdef int object_new(frt_ctx *x) noexcept nogil
cdef char *object_room(frt_ctx *x, uint32_t i, uint64_t nbytes, uint32_t nrefs, int *rc) noexcept nogil
cdef int object_contain(frt_ctx *x, uint32_t i) noexcept nogil
cdef void object_seal_new(frt_ctx *x, uint32_t i) noexcept nogil
cdef void object_seal_file(frt_ctx *x, uint32_t i) noexcept nogil
cdef void object_seal_pending(frt_ctx *x, uint32_t i) noexcept nogil
cdef void object_seal_remote(frt_ctx *x, uint32_t i) noexcept nogil
cdef void object_tell(frt_ctx *x, uint32_t i) noexcept nogil
cdef int object_discard(frt_ctx *x, uint32_t i) noexcept nogil
cdef int object_empty(frt_ctx *x, uint32_t i) noexcept nogil
cdef int object_acquire(frt_ctx *x, uint32_t i, uint64_t objref, bint pin) noexcept nogil
cdef void object_release(frt_ctx *x, uint32_t i, bint pin) noexcept nogil
cdef void object_maybe_delete(frt_ctx *x, uint32_t i) noexcept nogil
cdef void object_free(frt_ctx *x, uint32_t i) noexcept nogil
cdef bint object_is_sealed(frt_ctx *x, uint32_t i) noexcept nogil
cdef const char *object_view(frt_ctx *x, uint32_t i, uint64_t *nbytes) noexcept nogil


cdef inline void object_hold_new(frt_ctx *x, uint32_t i, bint pin) noexcept nogil:
    """Take this process's first hold of an entry that no other process knows yet."""
    frt_threads_take(x)
    if pin:
        x.pins_held[i] = 1
    elif not frt_has_left(x):
        x.refs_held[i] = 1
    if pin or not frt_has_left(x):
        a64_or_sc(frt_mine(x, i, FRT_PINS if pin else FRT_REFS), x.me_bit)
    frt_threads_give(x)
