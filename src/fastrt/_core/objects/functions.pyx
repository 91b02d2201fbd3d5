# cython: language_level=3, freethreading_compatible=True
"""The function table: objects that hold functions, by a digest of their content.

The table is a series of open hash tables, each twice as large as the one before. A slot is in use from the store of its
objref on, its commit. A digest lies within FRT_FUNCTION_PROBES slots of its hash position in the first table that had
room for it there; if none has, the next table is made. No slot becomes free again, so a search may end at a free slot:
the slot of a swept function is GONE, and may be used for another digest. The table holds its objects: each is counted
once (references.pyx), just before its slot commits.

`sweep` drops a function that only the table holds and no unfinished task names. A process that finds a function takes
its hold first and then checks whether the slot is being swept; the sweeper marks the slot first and then checks for
holds: one of them sees the other.
"""
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit, segment_lock_grow
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.objects cimport object_acquire, object_maybe_delete, object_release
from fastrt._core.objects.references cimport links_hold_function, links_recount, links_uncount
from fastrt.errors import ObjectStoreFullError

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef class Watched:
    """The globals that a function was sent with, to check at each call whether one was assigned since.

    Args:
        watched: a list of (dict of globals, name, value that was sent).

    A check costs 10 ns per global.
    """

    cdef tuple _watched

    def __init__(self, list watched):
        self._watched = tuple(watched)

    cpdef object changed(self):
        """The name of a global whose value differs from the one that was sent; None if there is none."""
        cdef tuple one
        cdef PyObject *found
        for one in self._watched:
            found = PyDict_GetItemWithError(one[0], one[1])
            if found != NULL and found != <PyObject *>one[2]:
                return one[1]
        return None


cdef extern from *:
    """
    static inline uint32_t *frt_function_marks(frt_function *f) { return &f->pad; }
    """
    uint32_t *frt_function_marks(frt_function *f) noexcept nogil

cdef enum:
    SWEEPABLE = 1  # mark of a slot: it may be swept
    SWEEPING = 2  # mark of a slot: it is being swept


def find_function(Client client, bytes digest):
    """A reference to the function object stored under a 16-byte digest of its content; None if there is none."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t want[2]
    cdef uint64_t objref
    cdef uint32_t index
    cdef frt_function *f
    client.ensure()
    if len(digest) != 16:
        raise ValueError(f"the digest has {len(digest)} bytes, not 16")
    memcpy(want, <char *>digest, 16)
    f = _slot(x, want, False)
    if f == NULL:
        return None
    objref, index = a64_load_acq(&f.objref), f.index
    if objref == 0 or objref == FRT_FUNCTION_GONE or index >= frt_objects(x):
        return None
    if object_acquire(x, index, objref, False) != FRT_OK:
        return None
    if a32_load_sc(frt_function_marks(f)) & SWEEPING or a64_load_sc(&f.objref) != objref or \
            f.hash[0] != want[0] or f.hash[1] != want[1]:
        object_release(x, index, False)
        return None
    return ref_wrap(client, index)


cdef frt_function *_slot(frt_ctx *x, const uint64_t *want, bint room) noexcept nogil:
    """The slot of a digest, or one where it may be stored: a free slot, or with `room` a GONE one. NULL: none."""
    cdef uint32_t slots = FRT_FUNCTIONS
    cdef uint32_t first = 0
    cdef uint32_t there = frt_functions(x)
    cdef uint32_t k
    cdef uint64_t objref
    cdef frt_function *f
    cdef frt_function *gone = NULL
    while first + slots <= there:
        for k in range(FRT_FUNCTION_PROBES):
            f = x.functions + first + <uint32_t>((want[0] + k) % slots)
            objref = a64_load_acq(&f.objref)
            if objref == 0:
                return gone if gone != NULL else f
            if objref == FRT_FUNCTION_GONE:
                gone = f if room and gone == NULL else gone
            elif f.hash[0] == want[0] and f.hash[1] == want[1]:
                return f
        first += slots
        slots *= 2
    return gone


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
    cdef const char *name
    client.ensure()
    name = functions_name(&client.x, objref)
    return name[:strnlen(name, FRT_NAME_BYTES)].decode("utf-8", "replace") if name != NULL else "?"


cdef const char *functions_name(frt_ctx *x, uint64_t objref) noexcept nogil:
    """The name of a function or class, at most FRT_NAME_BYTES; NULL if it is not in the table."""
    cdef uint32_t k
    for k in range(frt_functions(x)):
        if objref and x.functions[k].objref == objref:
            return x.functions[k].name
    return NULL


def add_function(Client client, bytes digest, Ref ref, str name, bint lasting=True):
    """Store a function's object under its digest.

    Args:
        digest: 16 bytes that identify its content.
        ref: the object.
        name: for listings and messages; 63 bytes of it are kept.
        lasting: whether it stays until the session ends; otherwise until `sweep` finds it unused.
    Returns:
        The reference to use: `ref`, or the one that another process stored first.
    Raises:
        ObjectStoreFullError: the table of functions is full.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t want[2]
    cdef uint32_t index = FRT_NONE
    cdef frt_function *f
    cdef bytes text = name.encode("utf-8", "replace")[:63] + b"\0"
    cdef int rc = FRT_OK
    found = find_function(client, digest)
    if found is not None:
        return found
    ref_use(client, ref)
    memcpy(want, <char *>digest, 16)
    check(_lock_functions(x))
    f = _slot(x, want, True)
    while f == NULL and rc == FRT_OK:
        rc = _grow(x)
        f = _slot(x, want, True)
    if f != NULL and f.objref and f.objref != FRT_FUNCTION_GONE:
        index = f.index
        rc = object_acquire(x, index, f.objref, False)
    elif f != NULL:
        f.hash[0], f.hash[1], f.index = want[0], want[1], ref.index
        memcpy(f.name, <char *>text, len(text))
        a32_store_sc(frt_function_marks(f), 0 if lasting else SWEEPABLE)
        rc = links_hold_function(x, ref.index)
        if rc == FRT_OK:
            a64_store_rel(&f.objref, ref.objref)  # commit
    frt_lock_give(x.locks + FRT_LOCK_FUNCTIONS)
    if rc == FRT_TABLE_FULL or rc == FRT_FULL:
        raise ObjectStoreFullError(
            f"there is no room for {name!r} beside {frt_functions(x)} slots of functions, classes, demands and "
            "policies that are in use; make remote functions once, outside of loops, and pass what changes as "
            "arguments, or begin another session")
    check(rc)
    return ref if index == FRT_NONE else ref_wrap(client, index)


cdef bint _is_unused(frt_ctx *x, frt_function *f) noexcept nogil:
    """Whether only the table holds a function: no process, value, argument or actor.

    Pins do not count: they belong to workers that have loaded it, for a task that names it or has ended.
    """
    cdef uint32_t i = f.index
    return functions_counts(f) and i < frt_objects(x) and a64_load_sc(&x.entries[i].objref) == f.objref and \
        not frt_any(x, i, FRT_REFS) and a32_load_sc(&x.entries[i].counted) == 1


cdef set _named_by_tasks(frt_ctx *x):
    """The objrefs of the functions of unfinished tasks: a task holds its function only by this name."""
    cdef uint32_t t
    cdef int state
    cdef set found = set()
    for t in range(frt_tasks(x)):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state != FRT_TASK_EMPTY and state != FRT_TASK_RESERVED:
            found.add(x.tasks[t].function)
    return found


def is_stored(Client client, uint64_t objref, uint32_t index):
    """Whether a function's object exists and the table, or a value, still holds it."""
    client.ensure()
    return index < frt_objects(&client.x) and a64_load_acq(&client.x.entries[index].objref) == objref and \
        a32_load_sc(&client.x.entries[index].counted) != 0


def sweep(Client client):
    """Drop functions that are not lasting and no longer in use, and delete their objects.

    Returns:
        How many were dropped.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_function *f
    cdef uint32_t k
    cdef int count = 0
    cdef list unused = []
    client.ensure()
    for k in range(frt_functions(x)):
        if a32_load_acq(frt_function_marks(x.functions + k)) == SWEEPABLE and _is_unused(x, x.functions + k):
            unused.append(k)
    if not unused:
        return 0
    check(_lock_functions(x))
    try:
        for k in unused:
            a32_store_sc(frt_function_marks(x.functions + k), SWEEPABLE | SWEEPING)
        unused = [k for k in unused if _is_unused(x, x.functions + <uint32_t>k)]
        named = _named_by_tasks(x)
        for k in unused:
            f = x.functions + k
            if f.objref not in named:
                _drop(x, f)
                count += 1
    finally:
        _unmark(x)
        frt_lock_give(x.locks + FRT_LOCK_FUNCTIONS)
    return count


cdef void _drop(frt_ctx *x, frt_function *f) noexcept nogil:
    """Under the lock: remove a function from the table. After a death inside, the counts are rebuilt."""
    cdef frt_refslot slot
    cdef uint8_t flags = 1
    slot.objref, slot.index, slot.extra = f.objref, f.index, 0
    a64_store_sc(&f.objref, FRT_FUNCTION_GONE)
    while links_uncount(x, &slot, 1, &flags, 1) != FRT_OK:
        pass
    object_maybe_delete(x, slot.index)


cdef void _unmark(frt_ctx *x) noexcept nogil:
    cdef uint32_t k
    for k in range(frt_functions(x)):
        if a32_load_acq(frt_function_marks(x.functions + k)) & SWEEPING:
            a32_store_sc(frt_function_marks(x.functions + k), SWEEPABLE)


cdef int _lock_functions(frt_ctx *x) noexcept nogil:
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_FUNCTIONS)
    if rc == FRT_LOCK_ORPHANED:
        # A slot is in use from the store of its objref on; its object may have been counted before that.
        links_recount(x)
        _unmark(x)
        frt_lock_mend(x.locks + FRT_LOCK_FUNCTIONS)
        return FRT_OK
    return rc


cdef int functions_touch(frt_ctx *x) noexcept nogil:
    """Take the lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock_functions(x)
    if rc == FRT_OK:
        frt_lock_give(x.locks + FRT_LOCK_FUNCTIONS)
    return rc
