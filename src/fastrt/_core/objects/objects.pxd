from libc.stdint cimport uint16_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx, frt_refslot

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
