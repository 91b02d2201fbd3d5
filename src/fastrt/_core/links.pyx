# cython: language_level=3
"""What objects and tasks hold of each other: counts of contained and argument refs, and tasks that wait.

Two derived things under one robust lock:
  counted    how many containers and unfinished tasks name an entry. The record that causes a count carries a
             COUNTED flag, set in the same critical section; after a death inside it, all counts are rebuilt
             from the flagged records.
  waiters    per unsealed entry the list of tasks that wait for it. A task waits for one argument at a time:
             when that is sealed, its arguments are read again, and it either waits for the next unsealed one
             or becomes READY by one compare-and-swap. No counter can disagree with the truth.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from fastrt._core.layout cimport *
from fastrt._core.queue cimport queue_push


cdef frt_refslot *task_slots(frt_ctx *x, uint32_t t) noexcept nogil:
    """The task's results, followed by its refs, followed by the bytes of its arguments."""
    cdef frt_task *task = x.tasks + t
    return <frt_refslot *>(x.base + task.offset if task.offset else task.inlined)


cdef frt_refslot *entry_slots(frt_ctx *x, uint32_t i) noexcept nogil:
    """The refs that a value contains, after its bytes, at the next multiple of 8."""
    cdef frt_entry *entry = x.entries + i
    return <frt_refslot *>((x.base + entry.offset if entry.offset else entry.inlined) + ((entry.bytes + 7) & ~7))


cdef int _lock(frt_ctx *x) noexcept nogil:
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_LINKS)
    if rc == FRT_LOCK_ORPHANED:
        rc = _rebuild(x)
        if rc == FRT_OK:
            frt_lock_mend(x.locks + FRT_LOCK_LINKS)
        else:
            frt_lock_give(x.locks + FRT_LOCK_LINKS)
    return rc


cdef inline void _unlock(frt_ctx *x) noexcept nogil:
    frt_lock_give(x.locks + FRT_LOCK_LINKS)


cdef int links_touch(frt_ctx *x) noexcept nogil:
    """Take the lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        _unlock(x)
    return rc


cdef int links_recount(frt_ctx *x) noexcept nogil:
    """Rebuild everything although nobody died inside this lock (somebody did next to it)."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        rc = _rebuild(x)
        _unlock(x)
    return rc


cdef inline bint _names(frt_ctx *x, const frt_refslot *slot) noexcept nogil:
    return slot.index < x.objects_max and x.entries[slot.index].objref == slot.objref


cdef int links_count(frt_ctx *x, const frt_refslot *slots, uint32_t n, uint8_t *flags, uint8_t flag) noexcept nogil:
    """Count n refs that the record with these flags names. The caller holds each of them."""
    cdef uint32_t k
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    for k in range(n):
        a32_add_sc(&x.entries[slots[k].index].counted, 1)
    flags[0] |= flag
    _unlock(x)
    return FRT_OK


cdef int links_uncount(frt_ctx *x, const frt_refslot *slots, uint32_t n, uint8_t *flags, uint8_t flag) noexcept nogil:
    """Take the counts back; the caller then deletes what nobody holds any more."""
    cdef uint32_t k
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    if flags[0] & flag:
        for k in range(n):
            a32_sub_sc(&x.entries[slots[k].index].counted, 1)
        flags[0] &= ~flag
    _unlock(x)
    return FRT_OK


cdef int links_hold_function(frt_ctx *x, uint32_t i) noexcept nogil:
    """Count an entry once on behalf of the function table (which a rebuild reads too)."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        a32_add_sc(&x.entries[i].counted, 1)
        _unlock(x)
    return rc


cdef int _advance(frt_ctx *x, uint32_t t) noexcept nogil:
    """Under the lock: make a WAITING task wait for its next unsealed argument, or READY and queued."""
    cdef frt_task *task = x.tasks + t
    cdef const frt_refslot *deps = task_slots(x, t) + task.nreturns
    cdef uint64_t word = a64_load_acq(x.task_words + t)
    cdef uint32_t i
    while task.dep < task.ndeps:
        i = deps[task.dep].index
        if frt_word_state(a64_load_sc(frt_state(x, i))) == FRT_OBJ_PENDING:
            task.waiter = x.entries[i].waiter
            a32_store_sc(&x.entries[i].waiter, t + 1)
            # A sealer stores the state and then looks for waiters; we do it the other way round.
            if frt_word_state(a64_load_sc(frt_state(x, i))) == FRT_OBJ_PENDING:
                return FRT_OK
            a32_store_sc(&x.entries[i].waiter, task.waiter)
        task.dep += 1
    if frt_word_state(word) != FRT_TASK_WAITING:
        return FRT_OK
    # A death from here to the end of the push leaves READY outside the ring: the rebuild of this lock's data,
    # which follows, queues every READY task that may be missing.
    if a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_READY, x.me, frt_word_gen(word))):
        return queue_push(x, t)
    return FRT_OK


cdef int links_wait(frt_ctx *x, uint32_t t) noexcept nogil:
    """Let a task whose word says WAITING wait for its arguments; it is queued at once if all are sealed."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        x.tasks[t].dep = 0
        rc = _advance(x, t)
        _unlock(x)
    return rc


cdef int links_unwait(frt_ctx *x, uint32_t t) noexcept nogil:
    """Take a task that is being cancelled out of the list it waits in."""
    cdef frt_task *task = x.tasks + t
    cdef uint32_t *at
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    if task.dep < task.ndeps:
        at = &x.entries[task_slots(x, t)[task.nreturns + task.dep].index].waiter
        while at[0] != 0 and at[0] != t + 1:
            at = &x.tasks[at[0] - 1].waiter
        if at[0] == t + 1:
            at[0] = task.waiter
    _unlock(x)
    return FRT_OK


cdef int links_sealed(frt_ctx *x, uint32_t i) noexcept nogil:
    """Tell the tasks that wait for entry i, which was just sealed."""
    cdef uint32_t t, waiter
    cdef int rc
    if a32_load_sc(&x.entries[i].waiter) == 0:
        return FRT_OK
    rc = _lock(x)
    if rc != FRT_OK:
        return rc
    # Detached first: the entry may have been freed and taken by a new tenant meanwhile, and then a task of
    # the old list that waits for the new tenant links itself again.
    waiter = x.entries[i].waiter
    a32_store_sc(&x.entries[i].waiter, 0)
    while waiter:
        t = waiter - 1
        waiter = x.tasks[t].waiter
        _advance(x, t)
    _unlock(x)
    return FRT_OK


cdef int _rebuild(frt_ctx *x) noexcept nogil:
    """All counts and waiter lists again, from the records. Under the lock, after a death inside it."""
    cdef uint32_t i, t, k
    cdef int state
    cdef frt_refslot *slots
    cdef uint32_t objects = x.sb.objects.fresh
    cdef uint32_t tasks = x.sb.tasks.fresh
    for i in range(objects):
        a32_store_rlx(&x.entries[i].counted, 0)
        if frt_word_state(a64_load_acq(frt_state(x, i))) == FRT_OBJ_PENDING:
            a32_store_rlx(&x.entries[i].waiter, 0)
    for i in range(objects):
        if x.entries[i].flags & FRT_ENTRY_COUNTED and \
                frt_word_state(a64_load_acq(frt_state(x, i))) != FRT_OBJ_EMPTY:
            slots = entry_slots(x, i)
            for k in range(x.entries[i].nrefs):
                if _names(x, slots + k):
                    a32_add_sc(&x.entries[slots[k].index].counted, 1)
    for k in range(FRT_FUNCTIONS):
        if x.functions[k].objref and x.functions[k].index < objects:
            a32_add_sc(&x.entries[x.functions[k].index].counted, 1)
    for t in range(tasks):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state != FRT_TASK_EMPTY and x.tasks[t].flags & FRT_TASK_COUNTED:
            slots = task_slots(x, t) + x.tasks[t].nreturns
            for k in range(x.tasks[t].nrefs):
                if _names(x, slots + k):
                    a32_add_sc(&x.entries[slots[k].index].counted, 1)
    for t in range(tasks):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state == FRT_TASK_WAITING:
            x.tasks[t].dep = 0
            _advance(x, t)
        elif state == FRT_TASK_READY and x.tasks[t].ndeps:
            queue_push(x, t)  # perhaps a second time, which is harmless
    a_fence_sc()
    return FRT_OK
