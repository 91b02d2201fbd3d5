from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx
from fastrt._core.memory.segment cimport Segment


cdef enum:
    FRT_JOB_BITS = 48  # of a job's number: {gen:32 | client + 1:16}; an uplink has a tag above them


cdef class Client:
    cdef readonly Segment segment
    cdef frt_ctx x
    cdef readonly int pid
    cdef readonly bint closed
    cdef readonly uint64_t epoch

    cdef int forks
    cdef bint left
    cdef Client former
    cdef bytes names
    cdef object __weakref__

    cdef int ensure(self) except -1
    cdef bint usable(self) noexcept
    cdef bint may_let_go(self) noexcept
    cdef uint32_t *_private_counts(self) except NULL

cdef uint64_t client_new_objref(frt_ctx *x) noexcept nogil
cdef uint32_t clients_attached(frt_ctx *x) noexcept nogil
cdef uint32_t clients_ever(frt_ctx *x) noexcept nogil
cdef void client_wake(frt_ctx *x, uint32_t client) noexcept nogil
