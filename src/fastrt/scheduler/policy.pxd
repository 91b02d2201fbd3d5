# The types that policy.py is compiled with.
cimport cython
from libc.stdint cimport int64_t


cdef double _ROUNDING
cdef int _NEITHER, _RAISED, _MISSING


@cython.final
cdef class Node:
    cdef public object id
    cdef public object site
    cdef public str main
    cdef public double room
    cdef public dict others
    cdef public object kinds
    cdef public int64_t rank
    cdef public int64_t load
    cdef public int64_t highest
    cdef public _Seat raised
    cdef public _Seat missing

    @cython.locals(room=double, amount=double, name=str)
    cpdef bint fits(self, tuple shape) except -1

    cpdef double free(self, str name) except? -1
    cpdef use(self, str name, double amount)

    @cython.locals(amount=double)
    cpdef bint can(self, tuple shape) except -1


@cython.final
cdef class _Seat:
    cdef public _Heap heap
    cdef public Node node
    cdef public int64_t stored
    cdef public int chain
    cdef public _Seat before
    cdef public _Seat after

    @cython.locals(node=Node, before=_Seat, after=_Seat, first=_Seat)
    cdef join(self, int chain)


@cython.final
cdef class _Heap:
    cdef public tuple shape
    cdef public object site
    cdef public bint pack
    cdef public list entries
    cdef public dict seats

    @cython.locals(entry=int64_t, entries=list, seats=dict, seat=_Seat, node=Node)
    cpdef Node best(self)
    cpdef add(self, Node node)

    @cython.locals(node=Node, stored=int64_t, entries=list)
    cpdef push(self, _Seat seat)

    @cython.locals(seat=_Seat)
    cpdef drop(self, Node node)


@cython.final
cdef class _Ranking:
    cdef public tuple shape
    cdef public _Heap every
    cdef public _Heap packed
    cdef public dict at_site


@cython.final
cdef class Placement:
    cdef public dict _nodes
    cdef public dict _sites
    cdef public dict _rankings
    cdef public dict _all_heaps
    cdef public int64_t _rank

    @cython.locals(name=str)
    cpdef report(self, Node node, dict free, int64_t load)
    cpdef rank(self, Node node, int64_t load)

    @cython.locals(ranking=_Ranking, node=Node, heap=_Heap)
    cpdef Node choose(self, tuple shape, tuple locality, str strategy, object only)

    @cython.locals(amount=double, name=str)
    cpdef occupy(self, Node node, tuple shape)

    @cython.locals(amount=double, name=str)
    cpdef vacate(self, Node node, tuple shape)

    @cython.locals(
        left=list, place=tuple, node=Node, best=Py_ssize_t, i=Py_ssize_t, most=double, nbytes=double,
        load=int64_t, least=int64_t,
    )
    cdef Node _local(self, _Ranking ranking, tuple locality)

    @cython.locals(heap=_Heap, beside=list, node=Node)
    cdef Node _best_at(self, _Ranking ranking, object site)

    @cython.locals(beside=list, node=Node)
    cdef int64_t _load_at(self, object site) except? -1

    @cython.locals(seat=_Seat, after=_Seat)
    cdef _lowered(self, Node node)

    @cython.locals(seat=_Seat, after=_Seat)
    cdef _offer(self, Node node)


@cython.final
cdef class _Waiting:
    cdef public int64_t number
    cdef public object task
    cdef public object demand
    cdef public object site
    cdef public int64_t skipped
    cdef public bint gone


@cython.final
cdef class _Line:
    cdef public int64_t count
    cdef public object order
    cdef public dict by_site

    cpdef add(self, _Waiting waiting)

    @cython.locals(oldest=_Waiting, near=_Waiting)
    cpdef _Waiting first(self, object site)
    cpdef drop(self, _Waiting waiting)


@cython.final
cdef class Backlog:
    cdef public dict _lines
    cdef public dict _waiting
    cdef public int64_t _number

    cpdef bint blocks(self, tuple shape, object node=*) except -1

    @cython.locals(best=_Waiting, found=_Waiting, oldest=_Waiting, line=_Line)
    cpdef take(self, Node node)


cdef _Waiting _head(object line)
