# The types that records.py is compiled with.
cimport cython
from libc.stdint cimport int64_t, uint64_t

from fastrt.scheduler.policy cimport Node, Placement


cdef int64_t _BITS, _REFUSING, _LOST
cdef uint64_t _KEPT
cdef bytes _WORKER_STEPS, _WORKER_TARGETS, _CALL_STEPS, _CALL_TARGETS


@cython.final
cdef class Group:
    cdef public tuple key
    cdef public Node node
    cdef public int64_t count
    cdef public int64_t top


@cython.final
cdef class Worker:
    cdef public int64_t number
    cdef public str address
    cdef public int64_t store
    cdef public dict functions
    cdef public int64_t functions_number
    cdef public Group group
    cdef public int64_t below
    cdef public Task task
    cdef public int64_t state
    cdef public uint64_t moves

    @cython.locals(number=uint64_t)
    cpdef bint move(self, int64_t event) except -1
    cpdef tuple in_use(self)


@cython.final
cdef class Function:
    cdef public str name
    cdef public int64_t result_count
    cdef public tuple shape
    cdef public dict workers


@cython.final
cdef class Task:
    cdef public int64_t number
    cdef public Function function
    cdef public bytes body
    cdef public tuple args
    cdef public tuple nested
    cdef public uint64_t first
    cdef public int64_t count
    cdef public str strategy
    cdef public int64_t retries_left
    cdef public object waits_for
    cdef public Worker worker
    cdef public bint sent
    cdef public int64_t state
    cdef public uint64_t moves

    @cython.locals(number=uint64_t)
    cpdef bint move(self, int64_t event) except -1
    cpdef results(self)


@cython.final
cdef class Groups:
    cdef Placement _placement
    cdef list _workers
    cdef dict _groups
    cdef dict _sets
    cdef list _names
    cdef readonly dict _changed

    cpdef add(self, Worker worker)
    cpdef remove(self, Worker worker)
    cpdef gain(self, Worker worker, str function)
    cpdef settle(self)

    @cython.locals(group=Group)
    cpdef occupy(self, Worker worker, tuple shape)

    @cython.locals(group=Group)
    cpdef vacate(self, Worker worker, tuple shape)

    @cython.locals(above=Worker)
    cdef _take(self, Group group, Worker worker)

    @cython.locals(group=Group)
    cdef _join(self, Worker worker)

    @cython.locals(group=Group)
    cdef _leave(self, Worker worker)
