# cython: language_level=3
"""The function table: objects that hold functions, by a digest of their content, for the rest of the session.

A slot of an open hash table counts from the store of its objref on, its last field; slots are never taken back. A
digest stands within FRT_FUNCTION_PROBES slots of its place in the first table that had room for it there; where none
has, the next one is made, twice as large. So what is not found before a free slot is in no table.
The tables hold their objects: each is counted once (links), just before its slot commits.
"""
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from fastrt._core.clients cimport Client
from fastrt._core.errors cimport check
from fastrt._core.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.layout cimport *
from fastrt._core.links cimport links_hold_function, links_recount
from fastrt._core.objects cimport object_acquire
from fastrt._core.segment cimport segment_commit, segment_lock_grow
from fastrt.errors import ObjectStoreFullError

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef class Watched:
    """The globals that a function was sent with, to ask at each of its calls whether one was assigned since.

    Args:
        watched: a list of (dict of globals, name, value that was sent).

    A look costs 10 ns for each of them.
    """

    cdef tuple _watched

    def __init__(self, list watched):
        self._watched = tuple(watched)

    cpdef object changed(self):
        """The name of a global that has another value than the one that was sent; None if there is none."""
        cdef tuple one
        cdef PyObject *found
        for one in self._watched:
            found = PyDict_GetItemWithError(one[0], one[1])
            if found != NULL and found != <PyObject *>one[2]:
                return one[1]
        return None


def find_function(Client client, bytes digest):
    """A reference to the function object stored under a 16-byte digest of its content; None if there is none."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t want[2]
    cdef uint32_t index
    cdef frt_function *f
    client.ensure()
    if len(digest) != 16:
        raise ValueError(f"the digest has {len(digest)} bytes, not 16")
    memcpy(want, <char *>digest, 16)
    f = _slot(x, want)
    if f == NULL or a64_load_acq(&f.objref) == 0:
        return None
    index = f.index
    check(object_acquire(x, index, f.objref, False))
    return ref_wrap(client, index)


cdef frt_function *_slot(frt_ctx *x, const uint64_t *want) noexcept nogil:
    """Where a digest stands, or would: that slot is free then. NULL when there is room for it in no table."""
    cdef uint32_t slots = FRT_FUNCTIONS
    cdef uint32_t first = 0
    cdef uint32_t there = frt_functions(x)
    cdef uint32_t k
    cdef frt_function *f
    while first + slots <= there:
        for k in range(FRT_FUNCTION_PROBES):
            f = x.functions + first + <uint32_t>((want[0] + k) % slots)
            if a64_load_acq(&f.objref) == 0 or f.hash[0] == want[0] and f.hash[1] == want[1]:
                return f
        first += slots
        slots *= 2
    return NULL


cdef int _grow(frt_ctx *x) noexcept nogil:
    """Under the lock: make the next table."""
    cdef uint32_t there = frt_functions(x)
    cdef uint64_t more = <uint64_t>there + FRT_FUNCTIONS
    cdef int rc
    if there + more > x.functions_max:
        return FRT_TABLE_FULL
    rc = segment_lock_grow(x)
    if rc != FRT_OK:
        return rc
    rc = segment_commit(x, <char *>(x.functions + there) - x.base, more * sizeof(frt_function))
    if rc == FRT_OK:
        a32_store_rel(&x.sb.function_slots, there + <uint32_t>more)
    frt_lock_give(x.locks + FRT_LOCK_GROW)
    return rc


def function_name(Client client, uint64_t objref):
    """The name of the function whose object is `objref`; "?" when it is not in the table."""
    cdef frt_function *f
    cdef uint32_t k
    client.ensure()
    for k in range(frt_functions(&client.x)):
        f = client.x.functions + k
        if objref and f.objref == objref:
            return f.name[:strnlen(f.name, 64)].decode("utf-8", "replace")
    return "?"


def add_function(Client client, bytes digest, Ref ref, str name):
    """Store a function's object under its digest for the rest of the session.

    Args:
        digest: 16 bytes that stand for its content.
        ref: the object.
        name: for listings and messages; 63 bytes of it are kept.
    Returns:
        The reference to use: `ref`, or the one that another process stored first.
    Raises:
        ObjectStoreFullError: the table of functions is full.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t want[2]
    cdef frt_function *f
    cdef bytes text = name.encode("utf-8", "replace")[:63] + b"\0"
    cdef int rc = FRT_OK
    found = find_function(client, digest)
    if found is not None:
        return found
    ref_use(client, ref)
    memcpy(want, <char *>digest, 16)
    check(_lock_functions(x))
    f = _slot(x, want)
    while f == NULL and rc == FRT_OK:
        rc = _grow(x)
        f = _slot(x, want)
    if f != NULL and f.objref:
        rc = FRT_NOT_FOUND
    elif f != NULL:
        f.hash[0], f.hash[1], f.index = want[0], want[1], ref.index
        memcpy(f.name, <char *>text, len(text))
        rc = links_hold_function(x, ref.index)
        if rc == FRT_OK:
            a64_store_rel(&f.objref, ref.objref)  # commit
    frt_lock_give(x.locks + FRT_LOCK_FUNCTIONS)
    if rc == FRT_NOT_FOUND:
        return find_function(client, digest)
    if rc == FRT_TABLE_FULL or rc == FRT_FULL:
        raise ObjectStoreFullError(
            f"there is no room for {name!r} beside {frt_functions(x)} slots of functions, classes, demands and "
            "policies that a session keeps until it ends; make remote functions once, outside of loops, and pass what "
            "changes as arguments, or begin another session")
    check(rc)
    return ref


cdef int _lock_functions(frt_ctx *x) noexcept nogil:
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_FUNCTIONS)
    if rc == FRT_LOCK_ORPHANED:
        # A slot counts from the store of its objref on; its object may have been counted before that.
        links_recount(x)
        frt_lock_mend(x.locks + FRT_LOCK_FUNCTIONS)
        return FRT_OK
    return rc


cdef int functions_touch(frt_ctx *x) noexcept nogil:
    """Take the lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock_functions(x)
    if rc == FRT_OK:
        frt_lock_give(x.locks + FRT_LOCK_FUNCTIONS)
    return rc
