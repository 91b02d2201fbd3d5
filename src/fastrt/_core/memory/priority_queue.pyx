# cython: language_level=3, freethreading_compatible=True
"""The ready tasks with a priority: a heap beside the ready queue's ring, under the same lock.

The highest priority is taken first, and among equal ones the task that was submitted first. The ids of such tasks come
directly from the counter that all clients share, so they grow with submission across clients, and a retried task keeps
its place. As in the ring, the cells are hints: a cell is skipped if the task's word does not match. But a heap in the
middle of a change has no order, so after a death inside the lock it is rebuilt from the task records. It is also
rebuilt when it is full: there cannot be more READY tasks than cells. Its memory grows to the highest index of a task
with a priority: a session without such tasks has none.
"""
from libc.stdint cimport int8_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit, segment_lock_grow

cdef enum:
    NUMBER_BITS = 48  # the counter in a task id, below the node's bits


cdef int ranked_mark(frt_ctx *x, uint32_t t, int8_t priority) noexcept nogil:
    """Give a RESERVED record a priority, and commit room for it in the heap."""
    cdef uint64_t cells = (<uint64_t>t // FRT_COMMIT_RECORDS + 1) * FRT_COMMIT_RECORDS
    cdef frt_task *task = x.tasks + t
    cdef int rc
    if cells > x.tasks_max:
        cells = x.tasks_max
    if a32_load_acq(&x.sb.ranked_cells) < cells:
        rc = segment_lock_grow(x)
        if rc != FRT_OK:
            return rc
        if x.sb.ranked_cells < cells:
            rc = segment_commit(x, <char *>x.ranked - x.base, cells * sizeof(frt_ranked))
            if rc == FRT_OK:
                a32_store_rel(&x.sb.ranked_cells, <uint32_t>cells)
        frt_lock_give(x.locks + FRT_LOCK_GROW)
        if rc != FRT_OK:
            return rc
    task.priority = priority
    task.flags |= FRT_TASK_RANKED
    return FRT_OK


cdef uint64_t ranked_key(frt_ctx *x, uint32_t t) noexcept nogil:
    """The task's sort key: the smallest is taken first."""
    cdef uint64_t number = x.tasks[t].id & ((<uint64_t>1 << NUMBER_BITS) - 1)
    return <uint64_t>(127 - x.tasks[t].priority) << NUMBER_BITS | number


cdef uint32_t _count(frt_ctx *x) noexcept nogil:
    """How many cells are in use; 0 if the number is damaged."""
    cdef uint32_t n = a32_load_rlx(&x.sb.ranked)
    if n > frt_most(&x.sb.ranked_cells, x.tasks_max):
        frt_broken(x, "the heap of ready tasks is larger than its memory")
        return 0
    return n


cdef inline void _set(frt_ranked *at, frt_ranked one) noexcept nogil:
    a64_store_rlx(&at.key, one.key)
    a64_store_rlx(&at.cell, one.cell)


cdef void _rise(frt_ranked *heap, uint32_t k, frt_ranked one) noexcept nogil:
    """Put a cell at the free place `k`, or as far above it as its key demands."""
    cdef uint32_t above
    while k:
        above = (k - 1) // 2
        if heap[above].key <= one.key:
            break
        _set(heap + k, heap[above])
        k = above
    _set(heap + k, one)


cdef void _sink(frt_ranked *heap, uint32_t n, frt_ranked one) noexcept nogil:
    """Put a cell at the free first place of n, or as far below it as its key demands."""
    cdef uint32_t k = 0
    cdef uint32_t below = 1
    while below < n:
        if below + 1 < n and heap[below + 1].key < heap[below].key:
            below += 1
        if one.key <= heap[below].key:
            break
        _set(heap + k, heap[below])
        k = below
        below = 2 * k + 1
    _set(heap + k, one)


cdef void ranked_put(frt_ctx *x, uint32_t t, uint64_t cell) noexcept nogil:
    """Under the queue's lock: add a READY task."""
    cdef uint32_t n = _count(x)
    cdef frt_ranked one
    if n == frt_most(&x.sb.ranked_cells, x.tasks_max):
        ranked_rebuild(x)  # drops stale cells and adds this task
        return
    one.key, one.cell = ranked_key(x, t), cell
    _rise(x.ranked, n, one)
    a32_store_sc(&x.sb.ranked, n + 1)


cdef int ranked_take(frt_ctx *x, bint any_priority) noexcept nogil:
    """Under the queue's lock: claim the first task; one with a priority below 0 only if `any_priority`.

    Returns:
        Its index, now CLAIMED(me); FRT_NOT_FOUND when there is none.
    """
    cdef uint32_t t, n = _count(x)
    cdef uint64_t cell, word
    cdef bint claimed
    while n and (any_priority or x.ranked[0].key >> NUMBER_BITS <= 127):
        cell = x.ranked[0].cell
        t = <uint32_t>cell
        if t >= x.tasks_max:
            return frt_broken(x, "the heap of ready tasks names an impossible task")
        word = a64_load_acq(x.task_words + t)
        claimed = frt_word_state(word) == FRT_TASK_READY and frt_word_gen(word) == <uint32_t>(cell >> 32) and \
            a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(word)))
        n -= 1
        _sink(x.ranked, n, x.ranked[n])
        a32_store_sc(&x.sb.ranked, n)
        if claimed:
            return <int>t
    return FRT_NOT_FOUND


cdef void ranked_rebuild(frt_ctx *x) noexcept nogil:
    """Under the queue's lock: rebuild the heap from the task records."""
    cdef uint32_t t, n = 0
    cdef uint64_t word
    cdef frt_ranked one
    for t in range(frt_most(&x.sb.ranked_cells, frt_tasks(x))):
        word = a64_load_acq(x.task_words + t)
        # If the record changes hands after its word was read, the result is one stale cell more, or none.
        if frt_word_state(word) == FRT_TASK_READY and x.tasks[t].flags & FRT_TASK_RANKED:
            one.key, one.cell = ranked_key(x, t), <uint64_t>frt_word_gen(word) << 32 | t
            _rise(x.ranked, n, one)
            n += 1
    a32_store_sc(&x.sb.ranked, n)
