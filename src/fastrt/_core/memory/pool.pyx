# cython: language_level=3, freethreading_compatible=True
"""Free records of the object and task tables. They are taken and returned in batches, under one lock per batch.

A client keeps up to FRT_MAGAZINE free records of each table in a private magazine; their state words say
RESERVED(client), so recovery finds them when the client dies. The free stack in the segment is derived:
after a death inside the lock it is rebuilt from the EMPTY words. The most recently freed records are taken first:
their cache lines are warm.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport *
from fastrt._core.memory.queue cimport queue_cells
from fastrt._core.memory.segment cimport segment_commit, segment_lock_grow

cdef enum:
    BATCH = 64


cdef inline uint64_t *_word(frt_ctx *x, bint tasks, uint32_t i) noexcept nogil:
    return x.task_words + i if tasks else frt_state(x, i)


cdef inline frt_pool *_pool(frt_ctx *x, bint tasks) noexcept nogil:
    return &x.sb.tasks if tasks else &x.sb.objects


cdef inline uint32_t _max(frt_ctx *x, bint tasks) noexcept nogil:
    return x.tasks_max if tasks else x.objects_max


cdef inline uint32_t *_free(frt_ctx *x, bint tasks) noexcept nogil:
    return x.free_tasks if tasks else x.free_objects


cdef void _rebuild(frt_ctx *x, bint tasks) noexcept nogil:
    """Rebuild the free stack from the state words."""
    cdef frt_pool *pool = _pool(x, tasks)
    cdef uint32_t *free = _free(x, tasks)
    cdef uint32_t i, n = 0
    for i in range(frt_most(&pool.fresh, _max(x, tasks))):
        if frt_word_state(a64_load_acq(_word(x, tasks, i))) == FRT_OBJ_EMPTY:  # 0 in both tables
            free[n] = i
            n += 1
    pool.free_count = n


cdef int _lock(frt_ctx *x, bint tasks) noexcept nogil:
    cdef frt_lock *lock = x.locks + (FRT_LOCK_TASKS if tasks else FRT_LOCK_OBJECTS)
    cdef int rc = frt_lock_take(lock)
    if rc == FRT_LOCK_ORPHANED:
        _rebuild(x, tasks)
        frt_lock_mend(lock)
        return FRT_OK
    return rc


cdef inline void _unlock(frt_ctx *x, bint tasks) noexcept nogil:
    frt_lock_give(x.locks + (FRT_LOCK_TASKS if tasks else FRT_LOCK_OBJECTS))


cdef int pool_touch(frt_ctx *x, bint tasks) noexcept nogil:
    """Take the pool's lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock(x, tasks)
    if rc == FRT_OK:
        _unlock(x, tasks)
    return rc


cdef int _commit_more(frt_ctx *x, bint tasks) noexcept nogil:
    """Commit memory for the next FRT_COMMIT_RECORDS records. Called without the pool's lock: fallocate is slow."""
    cdef frt_pool *pool = _pool(x, tasks)
    cdef uint64_t first, n
    cdef uint32_t p
    cdef int rc = segment_lock_grow(x)
    if rc != FRT_OK:
        return rc
    first = frt_most(&pool.committed, _max(x, tasks))
    n = _max(x, tasks) - first if _max(x, tasks) - first < FRT_COMMIT_RECORDS else FRT_COMMIT_RECORDS
    rc = FRT_OK
    if pool.fresh + BATCH <= first:
        pass  # another client was here first
    elif n == 0:
        rc = FRT_TABLE_FULL
    elif tasks:
        rc = segment_commit(x, <char *>(x.task_words + first) - x.base, n * 8)
        rc |= segment_commit(x, <char *>(x.tasks + first) - x.base, n * sizeof(frt_task))
        rc |= segment_commit(x, <char *>(x.free_tasks + first) - x.base, n * 4)
        rc |= segment_commit(x, <char *>x.ring - x.base, queue_cells(first + n) * FRT_CELL_BYTES)
    else:
        rc = segment_commit(x, <char *>frt_state(x, <uint32_t>first) - x.base, n * x.stride * 8)
        for p in range(frt_planes(x)):
            rc |= segment_commit(x, <char *>frt_plane(x, p, <uint32_t>first) - x.base, n * FRT_PLANE_BYTES)
        rc |= segment_commit(x, <char *>(x.entries + first) - x.base, n * sizeof(frt_entry))
        rc |= segment_commit(x, <char *>(x.free_objects + first) - x.base, n * 4)
    if rc == FRT_OK and n != 0 and pool.fresh + BATCH > first:
        a32_store_rel(&pool.committed, <uint32_t>(first + n))
    frt_lock_give(x.locks + FRT_LOCK_GROW)
    return rc


cdef int _refill(frt_ctx *x, bint tasks, uint32_t *magazine, uint32_t *kept) noexcept nogil:
    """Take up to BATCH records, from the free stack or never used, and mark each RESERVED(me)."""
    cdef frt_pool *pool = _pool(x, tasks)
    cdef uint32_t *free = _free(x, tasks)
    cdef uint32_t i, fresh
    cdef uint64_t *word
    cdef int rc
    while kept[0] == 0:  # other clients may take all free records before this one has the lock
        fresh = a32_load_rlx(&pool.fresh)  # read without the lock; checked again under it
        if a32_load_rlx(&pool.free_count) == 0 and fresh + BATCH > a32_load_acq(&pool.committed):
            rc = _commit_more(x, tasks)
            fresh = a32_load_rlx(&pool.fresh)
            if rc != FRT_OK and (rc != FRT_TABLE_FULL or fresh == a32_load_acq(&pool.committed)):
                if a32_load_rlx(&pool.free_count) == 0:
                    return rc
        rc = _lock(x, tasks)
        if rc != FRT_OK:
            return rc
        while kept[0] < BATCH:
            if pool.free_count:
                i = free[pool.free_count - 1] if pool.free_count <= _max(x, tasks) else FRT_NONE
                if i < _max(x, tasks) and frt_word_state(_word(x, tasks, i)[0]) != FRT_OBJ_EMPTY:
                    i = FRT_NONE
            elif pool.fresh < pool.committed:
                i = pool.fresh  # a client that died in this place may have stamped it already
            elif pool.fresh == pool.committed:
                break
            else:
                i = FRT_NONE
            if i >= _max(x, tasks):
                rc = frt_broken(x, "a stack of free records is damaged")
                break
            word = _word(x, tasks, i)
            # Commit point: from here on recovery returns the record if this process dies.
            a64_store_rel(word, frt_word(FRT_OBJ_RESERVED, x.me, frt_word_gen(word[0])))
            if pool.free_count:
                a32_store_rlx(&pool.free_count, pool.free_count - 1)
            else:
                a32_store_rlx(&pool.fresh, pool.fresh + 1)
            magazine[kept[0]] = i
            kept[0] += 1
        _unlock(x, tasks)
        if rc != FRT_OK:
            return rc
    return FRT_OK


cdef int pool_return(frt_ctx *x, bint tasks, const uint32_t *records, uint32_t n) noexcept nogil:
    """Return records to the shared stack: they become EMPTY and keep their generation."""
    cdef frt_pool *pool = _pool(x, tasks)
    cdef uint32_t *free = _free(x, tasks)
    cdef uint64_t *word
    cdef uint32_t k
    cdef int rc = _lock(x, tasks)
    if rc != FRT_OK:
        return rc
    for k in range(n):
        if pool.free_count >= _max(x, tasks):
            rc = frt_broken(x, "a stack of free records is damaged")
            break
        word = _word(x, tasks, records[k])
        a64_store_rel(word, frt_word(FRT_OBJ_EMPTY, 0, frt_word_gen(word[0])))
        free[pool.free_count] = records[k]
        a32_store_rlx(&pool.free_count, pool.free_count + 1)
    _unlock(x, tasks)
    return rc


cdef int _take(frt_ctx *x, bint tasks, uint32_t *magazine, uint32_t *kept) noexcept nogil:
    cdef int rc = FRT_OK
    frt_threads_take(x)
    if kept[0] == 0:
        rc = _refill(x, tasks, magazine, kept)
    if rc == FRT_OK:
        kept[0] -= 1
        rc = <int>magazine[kept[0]]
    frt_threads_give(x)
    return rc


cdef void _keep(frt_ctx *x, bint tasks, uint32_t *magazine, uint32_t *kept, uint32_t i) noexcept nogil:
    cdef uint32_t k
    frt_threads_take(x)
    if kept[0] == FRT_MAGAZINE:
        # Return the least recently used half. If that fails (a stuck lock), recovery finds the records by their words.
        pool_return(x, tasks, magazine, BATCH)
        kept[0] = FRT_MAGAZINE - BATCH
        for k in range(FRT_MAGAZINE - BATCH):
            magazine[k] = magazine[k + BATCH]
    magazine[kept[0]] = i
    kept[0] += 1
    frt_threads_give(x)


cdef int pool_take_object(frt_ctx *x) noexcept nogil:
    """Take a free entry, now RESERVED(me): its index, or a negative code."""
    return _take(x, False, x.objects, &x.objects_kept)


cdef void pool_keep_object(frt_ctx *x, uint32_t i) noexcept nogil:
    """Put an entry whose word already says RESERVED(me) into the magazine."""
    _keep(x, False, x.objects, &x.objects_kept, i)


cdef int pool_take_task(frt_ctx *x) noexcept nogil:
    """Take a free task record, now RESERVED(me): its index, or a negative code."""
    return _take(x, True, x.tasks_free, &x.tasks_kept)


cdef void pool_keep_task(frt_ctx *x, uint32_t t) noexcept nogil:
    """Put a task record whose word already says RESERVED(me) into the magazine."""
    _keep(x, True, x.tasks_free, &x.tasks_kept, t)


cdef int pool_flush(frt_ctx *x) noexcept nogil:
    """Return every record in the magazines: the client leaves."""
    cdef int rc
    frt_threads_take(x)
    rc = pool_return(x, False, x.objects, x.objects_kept)
    if rc == FRT_OK:
        x.objects_kept = 0
        rc = pool_return(x, True, x.tasks_free, x.tasks_kept)
    if rc == FRT_OK:
        x.tasks_kept = 0
    frt_threads_give(x)
    return rc
