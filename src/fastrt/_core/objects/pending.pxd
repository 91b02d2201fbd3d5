from libc.stdint cimport int64_t, uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_ctx


cdef class Watch:
    cdef Client client
    cdef list kept      # (ref, waiter), in the order of `entries`
    cdef list incoming  # (ref, waiter) that other threads have added, not yet in `kept`
    cdef list removed   # waiters whose references `wait` takes out
    cdef uint32_t *entries
    cdef uint32_t count, room
    cdef uint32_t added, poked, answered, asleep

    cdef int _merge(self) except -1
    cdef int _remove(self) except -1
    cdef list _collect(self)
    cdef int _poke(self) except -1
    cdef int _sleep(self, frt_ctx *x, uint32_t added, uint32_t poked, bint any_wake, uint32_t word,
                    int64_t deadline) noexcept nogil
