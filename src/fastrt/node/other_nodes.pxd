# The types that other_nodes.py is compiled with.
cimport cython
from libc.stdint cimport int64_t

from fastrt.scheduler.policy cimport Node, Placement


cdef int64_t _USE_SHIFT, _SPREAD_SHIFT, _ROOM_SHIFT, _ALL_IN_USE, _SPREAD_MAX, _ROOM_MAX, _A_CPU


@cython.locals(cpus=int64_t, use=int64_t, room=int64_t, whole=int64_t)
cpdef int64_t load_of(dict total, int64_t free, int64_t spread, int64_t order) except -1


@cython.final
cdef class _OtherNode:
    cdef public int64_t order
    cdef public object view
    cdef public int64_t spread
    cdef public dict mine
    cdef public dict others
    cdef public object ended
    cdef public object reported

    @cython.locals(name=str, total=int64_t, free=dict)
    cpdef see(self, object view)

    cpdef int64_t free(self, dict total, str name) except? -1
    cpdef int64_t ahead(self, double now) except -1

    @cython.locals(share=int64_t, ahead=int64_t, free=int64_t, parts=int64_t, name=str, total=dict)
    cpdef bint room(self, tuple amounts, double now) except -1


@cython.final
cdef class OtherNodes:
    cdef public str node
    cdef public dict views
    cdef public dict _known
    cdef public Placement _policy
    cdef public dict _names
    cdef public dict _quick
    cdef public dict _searches
    cdef public dict _is_able

    @cython.locals(there=_OtherNode, node=str, name=str, load=int64_t, totals=dict, free=dict)
    cpdef see(self, object views, object left)

    @cython.locals(there=_OtherNode)
    cpdef ended(self, str node, double now)

    @cython.locals(there=_OtherNode, name=str, load=int64_t)
    cpdef charge(self, str node, tuple amounts, int sign, bint spread)

    @cython.locals(best=Node)
    cpdef choose(self, object demand, object near)

    @cython.locals(best=Node, beside=Node)
    cpdef least_used(self, tuple amounts, object near, object here)

    @cython.locals(left=dict, there=_OtherNode)
    cpdef soon(self, tuple search, object near, double now)

    @cython.locals(left=dict)
    cdef _look_again(self, str node, _OtherNode there)
