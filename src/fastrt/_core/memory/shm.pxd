from libc.stdint cimport uint64_t

cdef int open_shm(str name, uint64_t create_bytes=*) except -1
cdef int create_shm(str name, uint64_t nbytes) except -1
cdef bint unlink_shm(str name) except -1
cdef void *map_aligned(int fd, uint64_t nbytes, uint64_t align, int access) noexcept nogil
