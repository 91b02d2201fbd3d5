from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client


cdef struct frt_seen:
    uint64_t word  # of the task's record at the last look; 0: it is reported at the next one
    uint32_t task


cdef class Watch:
    cdef Client client
    cdef list keys  # in the order of `seen`
    cdef dict places  # by record: its place in both
    cdef list gone  # tasks whose record was used again between two looks
    cdef frt_seen *seen
    cdef size_t room

    cdef int _grow(self) except -1
