# The types that placing.py is compiled with.
cimport cython
from libc.stdint cimport int64_t

from fastrt.node.other_nodes cimport OtherNodes, Search, _OtherNode


@cython.final
@cython.no_gc  # it is in no cycle: a key, a demand and a node do not lead back to it
cdef class _Entry:
    cdef public object key
    cdef public object demand
    cdef public tuple amounts
    cdef public bint is_spread
    cdef public bint is_bundle
    cdef public bint is_plain
    cdef public _OtherNode there
    cdef public int place
    cdef public str node
    cdef public double since
    cdef public bint listed
    cdef public object named
    cdef public int64_t priority
    cdef public int64_t workers


@cython.final
cdef class _Line:
    cdef public tuple choices
    cdef public list searches
    cdef public object tasks
    cdef public int64_t passed
    cdef public bint warned


cdef class Placing:
    cdef public str node
    cdef public str name
    cdef public dict total
    cdef public dict labels
    cdef public dict used
    cdef public int64_t relief
    cdef public object devices
    cdef public bint _has_devices
    cdef public bint can_grow
    cdef public bint has_uplink
    cdef public OtherNodes _others
    cdef public dict _entries
    cdef public dict _placed
    cdef public dict placed_actors
    cdef public dict followed
    cdef public list _ordered
    cdef public int64_t tasks_here
    cdef public dict _lines
    cdef public set _gone_groups
    cdef public set pending_groups
    cdef public dict gone_groups
    cdef public dict stirred_groups
    cdef public int64_t changes
    cdef public int64_t growth
    cdef public dict waiting_actors
    cdef public dict unopened
    cdef public dict held
    cdef public object _selectors
    cdef public int64_t _spread_here
    cdef public int64_t _plain_here

    @cython.locals(entry=_Entry, line=_Line)
    cpdef wait(self, object key, object demand, double now, object named=*, int64_t priority=*)

    @cython.locals(entry=_Entry)
    cpdef moved(self, object key, int place, double now)

    cpdef see(self, object views, object left=*)

    @cython.locals(
        demand=object, priority=int64_t, line=_Line, entry=_Entry, count=Py_ssize_t, orders=list, short=set, node=str
    )
    cpdef list decide(self, double now)

    cdef int64_t _free(self, str name) except? -1
    cdef dict _near(self, _Entry entry)

    @cython.locals(node=str, k=Py_ssize_t)
    cdef _place(self, _Line line, set short, double now, dict near, bint ahead)

    @cython.locals(fits=bint, parts=int64_t, name=str)
    cdef _place_by(self, object demand, Search search, set short, double now, dict near)

    @cython.locals(cpus=int64_t, count=int64_t)
    cdef _deal(self)

    cdef _learn(self, object demand)
    cdef _send(self, _Entry entry, str node, double now)
    cdef _enter(self, _Entry entry, int place, object devices)
    cdef _leave(self, _Entry entry, int place)
    cdef _keep(self, _Entry entry)
    cdef _stir(self, _Entry entry)
    cdef _stop_waiting(self, _Entry entry)

    @cython.locals(name=str, parts=int64_t, cpu=int64_t)
    cdef _count(self, _Entry entry, int sign)
