from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport FRT_CALLER_WORDS, frt_actor


cdef class Inbox:
    cdef Client client
    cdef frt_actor *actor
    cdef uint32_t index
    cdef bint ordered
    cdef uint64_t *cells  # from `head` to `count`: taken out of the mailbox, not looked at yet
    cdef uint32_t head, count, room
    cdef uint64_t *held
    cdef uint32_t nheld, held_room
    cdef uint64_t blocked[FRT_CALLER_WORDS]  # callers of whom something is held back
    cdef uint32_t found
    cdef uint32_t released  # as of the last look
    cdef bint quiet  # the last wait found nothing: the next one does not spin

cdef int inbox_next(Inbox self, double timeout_s, double spin_s) except -100
