# The types that other_nodes.py is compiled with.
cimport cython
from libc.stdint cimport int64_t

from fastrt.scheduler.policy cimport Node, Placement


cdef int64_t _USE_SHIFT, _SPREAD_SHIFT, _ROOM_SHIFT, _ALL_IN_USE, _SPREAD_MAX, _ROOM_MAX, _A_CPU, _AHEAD
cdef double _RECENT_S


@cython.locals(use=int64_t, room=int64_t, whole=int64_t)
cpdef int64_t load_of(int64_t cpus, int64_t free, int64_t spread, int64_t order) except -1


@cython.final
cdef class _OtherNode:
    cdef public str node
    cdef public int64_t order
    cdef public object view
    cdef public Node ranked
    cdef public int64_t cpus
    cdef public int64_t spread
    cdef public int64_t plain
    cdef public int64_t cpus_used
    cdef public dict used
    cdef public double since
    cdef public int64_t ended
    cdef public int64_t ended_before
    cdef public bint is_quick

    @cython.locals(unused=int64_t, free=int64_t)
    cdef int64_t left(self, object view, str name) except? -1

    @cython.locals(age=double)
    cpdef end(self, double now)

    @cython.locals(age=double)
    cpdef double recent(self, double now) except? -1

    @cython.locals(recent=double, whole=int64_t)
    cpdef int64_t ahead(self, double now) except -1

    @cython.locals(ranked=Node, ahead=int64_t, free=int64_t, parts=int64_t, name=str)
    cpdef bint room(self, tuple amounts, double now) except -1


@cython.final
cdef class Search:
    cdef public tuple amounts
    cdef public dict left


@cython.final
cdef class OtherNodes:
    cdef public str node
    cdef public dict views
    cdef public dict _known
    cdef public Placement _policy
    cdef public dict _names
    cdef public list _quick
    cdef public dict _searches
    cdef public dict _is_able

    @cython.locals(there=_OtherNode, node=str)
    cpdef see(self, object views, object left)

    @cython.locals(name=str, free=dict, totals=dict, ranked=Node)
    cdef _rank(self, _OtherNode there, object view, bint again)
    cdef _unrank(self, _OtherNode there)

    cpdef _OtherNode at(self, str node)
    cpdef ended(self, _OtherNode there, double now)

    @cython.locals(ranked=Node, name=str, parts=int64_t, change=int64_t, load=int64_t)
    cpdef charge(self, _OtherNode there, tuple amounts, int sign, bint spread, bint plain)

    @cython.locals(best=Node)
    cpdef choose(self, object demand, object near)

    @cython.locals(best=Node, there=_OtherNode, beside=Node)
    cpdef least_used(self, tuple amounts, object near, object here)

    @cython.locals(its=double, least=int64_t, there=_OtherNode, found=_OtherNode, ranked=Node)
    cpdef fewest_plain(self, double share)

    @cython.locals(left=dict, there=_OtherNode, beside=_OtherNode)
    cpdef soon(self, Search search, object near, double now)

    cpdef stop_search(self, Search search)

    @cython.locals(search=Search)
    cdef _look_again(self, _OtherNode there)
