from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx

cdef int arena_alloc(frt_ctx *x, uint64_t nbytes, uint32_t owner, uint64_t *home) noexcept nogil
cdef int arena_free(frt_ctx *x, uint32_t owner, uint64_t *home) noexcept nogil
cdef int arena_grow(frt_ctx *x, uint32_t seen, uint64_t most) noexcept nogil
cdef int arena_touch(frt_ctx *x) noexcept nogil
cdef uint64_t arena_block_bytes(frt_ctx *x, uint64_t offset) noexcept nogil
cdef uint32_t arena_owner(frt_ctx *x, uint64_t offset) noexcept nogil
