from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx, frt_tally_add, frt_task, frt_threads_give, frt_threads_take

cdef extern from *:
    """
    #include "layout.h"
    static inline uint32_t frt_tally_mark(const frt_task *task) {
        return (uint32_t)(task->id + ((uint64_t)task->attempts << 16)) & FRT_TALLY_MARK;
    }
    /* Where the function of the last counted task is counted, if it is this task's, too. */
    static inline uint64_t *frt_tally_last(const frt_ctx *x, const frt_task *task) {
        return x->tally_function == task->function && x->tally_method == task->function_index ? x->tally_counts : NULL;
    }
    """
    uint32_t frt_tally_mark(const frt_task *task) noexcept nogil
    uint64_t *frt_tally_last(const frt_ctx *x, const frt_task *task) noexcept nogil

cdef uint64_t *tally_find(frt_ctx *x, uint32_t v, uint32_t t, bint make) noexcept nogil
cdef uint32_t tally_outcome(frt_ctx *x, uint32_t v, uint32_t t) noexcept nogil
cdef void tally_settle(frt_ctx *x, uint32_t v, uint32_t t, bint ended) noexcept nogil
cdef void tally_retried(frt_ctx *x, uint32_t v, uint32_t t) noexcept nogil

cdef inline void tally_one(frt_ctx *x, uint32_t t, uint32_t outcome) noexcept nogil:
    """Count how a task of this client has ended, or is about to."""
    cdef frt_task *task = x.tasks + t
    cdef uint64_t *counts
    frt_threads_take(x)
    counts = frt_tally_last(x, task)
    if counts == NULL:
        counts = tally_find(x, x.me, t, True)
    frt_tally_add(counts + outcome, frt_tally_mark(task))
    frt_threads_give(x)
