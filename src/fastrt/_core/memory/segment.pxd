from libc.stdint cimport uint64_t

from fastrt._core.memory.layout cimport frt_ctx, frt_superblock


cdef class Segment:
    cdef readonly str name
    cdef readonly uint64_t total_bytes
    cdef char *base
    cdef const char *view
    cdef int fd
    cdef int pid
    cdef frt_ctx plan

    cdef frt_superblock *superblock(self) except NULL
    cdef int describe(self, frt_ctx *x) except -1
    cdef void _plan(self, const frt_superblock *sb) noexcept
    cdef int _map(self, int fd, const frt_superblock *sb) except -1
    cdef object _why_unusable(self, frt_superblock *sb, uint64_t size)
    cdef int _initialise(self, frt_superblock *sb, bint trace) except -1

cdef uint64_t segment_room(int fd) noexcept nogil
cdef int segment_discard(frt_ctx *x, uint64_t offset, uint64_t nbytes) noexcept nogil
cdef void spill_remove(frt_ctx *x, uint64_t objref) noexcept nogil
cdef int segment_commit(frt_ctx *x, uint64_t offset, uint64_t nbytes) noexcept nogil
cdef int segment_lock_grow(frt_ctx *x) noexcept nogil
