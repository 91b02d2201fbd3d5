# cython: language_level=3, freethreading_compatible=True
"""The list of errors that were freed unread, kept until this process reports them.

A read marks an error's entry. When the last hold of an unmarked error is dropped, the process that frees the entry
first copies its bytes into a list: it owns the entry by then, so no reader can come in between. The object of an actor
whose constructor raised counts as such an error until a call of the actor has raised it. Results that are not errors
cost nothing: freeing an entry reads its flags anyway.
"""
cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from fastrt._core.memory.layout cimport *

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef extern from *:
    """
    static inline void *frt_load_pointer(void **at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static inline void *frt_swap_pointer(void **at, void *to) { return __atomic_exchange_n(at, to, __ATOMIC_ACQ_REL); }
    static inline int frt_cas_pointer(void **at, void *want, void *to) {
        return __atomic_compare_exchange_n(at, &want, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    static inline void frt_count_one(uint32_t *at) { __atomic_fetch_add(at, 1, __ATOMIC_RELAXED); }
    static inline uint32_t frt_swap_count(uint32_t *at, uint32_t to) {
        return __atomic_exchange_n(at, to, __ATOMIC_ACQ_REL);
    }
    """
    void *frt_load_pointer(void **) noexcept nogil
    void *frt_swap_pointer(void **, void *) noexcept nogil
    bint frt_cas_pointer(void **, void *, void *) noexcept nogil
    void frt_count_one(uint32_t *) noexcept nogil
    uint32_t frt_swap_count(uint32_t *, uint32_t) noexcept nogil

cdef enum:
    KEPT_MAX = 1000  # errors kept until the next report; later ones are only counted
    BYTES_MAX = 1 << 18  # larger errors are only counted

ACTOR = 0xffff  # the kind of an actor's reason of death, which is text

cdef struct kept_error:
    kept_error *next
    uint64_t objref
    uint64_t nbytes
    uint16_t kind
    char *data

cdef void *_first = NULL
cdef uint32_t _kept = 0
cdef uint32_t _dropped = 0
cdef uint32_t _notified = 0
cdef object _callback = None
cdef object _calling = object()  # its critical section guards `_callback`


cdef void unread_read(frt_ctx *x, uint32_t i) noexcept nogil:
    """Mark an error, or the object of an actor, as read."""
    a8_or_sc(&x.entries[i].flags, FRT_ENTRY_READ)


cdef void unread_keep(frt_ctx *x, uint32_t i) noexcept nogil:
    """Copy the error in entry i into the list, if it was not read. The caller owns the entry."""
    cdef frt_entry *entry = x.entries + i
    cdef frt_actor *actor
    cdef const char *data
    if entry.flags & FRT_ENTRY_READ:
        return
    if entry.flags & FRT_ENTRY_ACTOR:
        actor = x.actors + (entry.actor - 1)
        if entry.actor - 1 < FRT_ACTORS and actor.objref == entry.objref and \
                a32_load_sc(&actor.ended) == FRT_END_FAILED and not actor.flags & FRT_ACTOR_BARE:
            _keep(entry.objref, <uint16_t>0xffff, actor.reason, strnlen(actor.reason, sizeof(actor.reason)))
    elif entry.flags & FRT_ENTRY_ERROR and entry.bytes:
        data = entry.inlined if entry.bytes <= FRT_INLINE_BYTES else NULL
        if entry.offset:
            data = frt_inside(x, entry.offset, entry.bytes)
        if data != NULL:  # errors in a file are not reported
            _keep(entry.objref, entry.kind, data, entry.bytes)


cdef void _keep(uint64_t objref, uint16_t kind, const char *data, uint64_t nbytes) noexcept nogil:
    cdef kept_error *made
    cdef void *before
    if a32_load_rlx(&_kept) >= KEPT_MAX or nbytes > BYTES_MAX:
        frt_count_one(&_dropped)
        return
    made = <kept_error *>malloc(sizeof(kept_error) + nbytes)
    if made == NULL:
        frt_count_one(&_dropped)
        return
    made.objref, made.kind, made.nbytes, made.data = objref, kind, nbytes, <char *>(made + 1)
    memcpy(made.data, data, nbytes)
    frt_count_one(&_kept)
    while True:
        before = frt_load_pointer(&_first)
        made.next = <kept_error *>before
        if frt_cas_pointer(&_first, before, made):
            return


cdef bint unread_waits() noexcept nogil:
    """Whether the list has errors for which the callback has not been called."""
    return frt_load_pointer(&_first) != NULL and not a32_load_rlx(&_notified)


cdef int unread_notify() except -1:
    """Call the callback, once until the list is taken."""
    with cython.critical_section(_calling):  # `on_unread` in another thread may drop the one that is read here
        callback = _callback
    if callback is not None:
        a32_store_rlx(&_notified, 1)
        callback()
    return 0


def keep(uint16_t kind, bytes data):
    """Add the error of a task without results to the list."""
    _keep(0, kind, data, len(data))


def on_unread(callback):
    """Call `callback()` when a dropped reference frees an unread error; it must not block or raise."""
    global _callback
    with cython.critical_section(_calling):
        _callback = callback


def waits():
    """Whether there are errors to report."""
    return frt_load_pointer(&_first) != NULL or a32_load_rlx(&_dropped) != 0


def take():
    """Take all errors to report.

    Returns:
        (errors, dropped): a list of (objref, kind, bytes), oldest first, and how many more were not kept. The kind
        is the store's encoding, or ACTOR: then the bytes are the text of why an actor could not be built.
    """
    cdef kept_error *one
    cdef kept_error *following
    cdef list found = []
    a32_store_rlx(&_notified, 0)
    one = <kept_error *>frt_swap_pointer(&_first, NULL)
    a32_store_rlx(&_kept, 0)
    while one != NULL:
        found.append((one.objref, one.kind, one.data[:one.nbytes]))
        following = one.next
        free(one)
        one = following
    found.reverse()
    return found, frt_swap_count(&_dropped, 0)
