# The types that objects.py is compiled with.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

from fastrt._core.refcounts.refcount cimport RefTable


cdef int64_t _BITS, _READY, _ALIAS, _LOSE, _FREE, _PAGE_BITS, _PAGE
cdef uint64_t _KEPT
cdef bytes _STEPS, _TARGETS


@cython.final
cdef class Delivery:
    cdef public int64_t source
    cdef public int64_t tries
    cdef public dict aliases
    cdef public list workers


@cython.final
cdef class Entry:
    cdef public uint64_t ref
    cdef public uint64_t nbytes
    cdef public uint64_t moves
    cdef public int32_t first
    cdef public int32_t second
    cdef public int32_t maker
    cdef public int32_t site
    cdef public int32_t state


@cython.locals(number=uint64_t)
cdef bint _move(Entry entry, int64_t event) except -1


@cython.final
cdef class Objects:
    cdef public RefTable refs
    cdef public list pages
    cdef list _page_alive
    cdef public dict further
    cdef public dict incoming
    cdef public dict lost
    cdef public dict pushes
    cdef public dict sending
    cdef public dict requests
    cdef public dict _tasks
    cdef public dict notified
    cdef list _effects
    cdef object _to_resolve
    cdef object _failing

    @cython.locals(first=uint64_t, ref=uint64_t, page=list)
    cpdef uint64_t add(self, uint64_t count, uint64_t counted) except? 0

    @cython.locals(page=list, at=uint64_t)
    cpdef Entry entry(self, uint64_t ref)

    @cython.locals(canonical=int64_t, entry=Entry)
    cpdef Entry resolve(self, uint64_t ref)
    cpdef bint is_resolved(self, uint64_t ref) except -1
    cpdef why_lost(self, uint64_t ref)

    cpdef bint has(self, Entry entry, int64_t store) except -1
    cpdef list stores(self, Entry entry)
    cpdef put(self, Entry entry, int64_t store)

    @cython.locals(others=dict)
    cpdef take(self, Entry entry, int64_t store)

    @cython.locals(only=Entry, entry=Entry, by_store=dict, nbytes=uint64_t)
    cpdef tuple places(self, list found)
    cpdef wait_for(self, ref, task)

    @cython.locals(entry=Entry)
    cpdef request(self, ref, int64_t worker, int64_t store)

    @cython.locals(delivery=Delivery, canonical=uint64_t, coming=dict)
    cpdef bring(self, uint64_t ref, Entry entry, int64_t store, int64_t worker)

    @cython.locals(entry=Entry, delivery=Delivery, first=bint, freed=list)
    cpdef ready(self, uint64_t ref, int64_t store, uint64_t nbytes)

    @cython.locals(entry=Entry)
    cpdef make(self, uint64_t ref, int64_t worker, int64_t store)

    @cython.locals(entry=Entry)
    cpdef unmake(self, uint64_t ref)

    @cython.locals(entry=Entry)
    cpdef abandon(self, ref, str reason)

    @cython.locals(entry=Entry, ref=uint64_t, page=list, number=uint64_t)
    cpdef drop(self, list freed)

    @cython.locals(page=list)
    cdef _forget(self, uint64_t number)

    @cython.locals(entry=Entry, delivery=Delivery)
    cpdef delivery_failed(self, ref, source, target, str reason)

    @cython.locals(store=int64_t, source=int64_t, sending=int64_t, least=int64_t)
    cdef int64_t _source(self, Entry entry, int64_t avoid) except? -2

    @cython.locals(coming=dict)
    cdef Delivery _arrived(self, ref, target)
    cdef _send(self, uint64_t ref, uint64_t target, Delivery delivery)

    @cython.locals(left=int64_t)
    cdef _sent(self, Delivery delivery)

    @cython.locals(delivery=Delivery)
    cdef _give_up(self, ref, target, reason, bint sent)
    cdef _notify(self, store, alias, canonical)

    @cython.locals(entry=Entry)
    cdef _resolved(self, names)
