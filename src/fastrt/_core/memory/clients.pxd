from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport a32_load_rlx, a32_store_rlx, frt_ctx
from fastrt._core.memory.segment cimport Segment


cdef enum:
    FRT_JOB_BITS = 48  # of a job's number: {gen:32 | client + 1:16}; an uplink has a tag above them


cdef class Client:
    cdef readonly Segment segment
    cdef frt_ctx x
    cdef readonly int pid
    cdef readonly uint64_t epoch

    cdef int forks
    cdef uint32_t has_closed, has_left  # atomic: a thread may close the client that others use
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


cdef inline bint client_stops(frt_ctx *x, uint32_t t) noexcept nogil:
    """Note that this client does not work on task `t` any more; whether it was the one noted last."""
    if a32_load_rlx(&x.clients[x.me].task) != t + 1:
        return False
    a32_store_rlx(&x.clients[x.me].task, 0)
    return True
