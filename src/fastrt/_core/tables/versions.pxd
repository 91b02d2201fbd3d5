from libc.stdint cimport uint32_t, uint64_t

cdef extern from "versions.h" nogil:
    uint64_t FRT_VERSIONS_MAGIC
    ctypedef struct frt_versions:
        uint64_t magic
        uint64_t slot_bytes
        uint64_t current
        uint32_t pins[63][16]


cdef class Versions:
    cdef readonly int fd
    cdef readonly uint64_t slot_bytes
    cdef uint64_t total_bytes
    cdef char *base
    cdef frt_versions *head

    @staticmethod
    cdef Versions _map(int fd)


cdef class Span:
    cdef char *base
    cdef readonly uint64_t nbytes


cdef class Slot:
    cdef Versions memory
    cdef int slot
