# cython: language_level=3, freethreading_compatible=True
"""The ready queue: a ring of tasks under one robust lock (9 ns), and the set of idle workers that sleep.

The ring holds hints; the task words decide. A cell may name a task that is no longer READY (cancelled, or pushed
twice after a death), or an earlier task of the same record, which the generation shows: `queue_pop` skips such
cells. A push commits by storing the tail after the cell, a pop by storing the head after the task's word, so the
ring needs no repair after a death inside the lock. The ring's memory is committed together with the task records,
two cells per record, so that a push cannot fail.

Tasks with a priority are not in the ring but in a heap beside it (priority_queue.pyx), under the same lock: tasks
above 0 are taken before those of the ring, tasks below 0 after them.

While memory is short, a task whose last argument has just been sealed, and is large, goes to the ring's front: it runs
while the argument is in memory, and may be the last to need it. Queued tasks that make more values wait until then. No
more than AHEAD_MOST tasks in a row go before the front, so that every task's turn comes.

Waking: at most one idle worker spins, the others sleep with their bit set in `idle`. A push that finds a
spinner needs no system call. A worker that takes a task wakes the next idle one if more tasks are ready, so a burst
wakes as many workers as it needs, with one call each. A worker that the daemon has parked, because a task takes several
CPUs, finds no task and is not among the idle ones. A push that finds no idle worker reports the load: the uplink
watches it, and may forward tasks to other nodes.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport client_wake
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.priority_queue cimport ranked_put, ranked_rebuild, ranked_take


cdef enum:
    AHEAD_MOST = 64


cdef int _lock(frt_ctx *x) noexcept nogil:
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_QUEUE)
    if rc == FRT_LOCK_ORPHANED:
        ranked_rebuild(x)
        frt_lock_mend(x.locks + FRT_LOCK_QUEUE)
        return FRT_OK
    return rc


cdef int queue_touch(frt_ctx *x) noexcept nogil:
    """Take the lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        frt_lock_give(x.locks + FRT_LOCK_QUEUE)
    return rc


cdef uint32_t _cells(frt_ctx *x) noexcept nogil:
    """How many cells the ring has; 0 if the number, or the ring's ends, are damaged."""
    cdef uint32_t cells = a32_load_rlx(&x.sb.ring_cells)
    if cells == 0 or cells & (cells - 1) or cells > x.ring_max or x.sb.ring_tail - x.sb.ring_head > cells:
        frt_broken(x, "the ready queue's ends are damaged")
        return 0
    return cells


cdef void _drop_stale(frt_ctx *x) noexcept nogil:
    """Keep only the cells of READY tasks. That makes room: the ring has two cells per committed task record."""
    cdef uint64_t k, cell, h = x.sb.ring_tail
    cdef uint32_t mask = x.sb.ring_cells - 1
    # Move them towards the tail, from the newest to the oldest: a death in between leaves doubles, never losses.
    for k in range(x.sb.ring_tail - x.sb.ring_head):
        cell = x.ring[(x.sb.ring_tail - 1 - k) & mask]
        if <uint32_t>cell < x.tasks_max and queue_means(x, cell, a64_load_acq(x.task_words + <uint32_t>cell)):
            h -= 1
            x.ring[h & mask] = cell
    a64_store_rel(&x.sb.ring_head, h)


cdef bint queue_means(frt_ctx *x, uint64_t cell, uint64_t word) noexcept nogil:
    """Whether a cell names the READY task whose word is `word`, not an earlier task of its record."""
    return frt_word_state(word) == FRT_TASK_READY and frt_word_gen(word) == <uint32_t>(cell >> 32)


cdef uint64_t queue_cells(uint64_t tasks) noexcept nogil:
    """How many cells the ring may have, and has memory for, when `tasks` task records are committed."""
    cdef uint64_t cells = FRT_RING_CELLS
    while cells < 2 * tasks:
        cells *= 2
    return cells


cdef void _widen(frt_ctx *x) noexcept nogil:
    """Double the ring."""
    cdef uint32_t cells = x.sb.ring_cells
    cdef uint64_t k
    # Cells whose position changes are copied to the new half, the others stay: the old ring is whole until the commit.
    for k in range(x.sb.ring_head, x.sb.ring_tail):
        if k & cells:
            x.ring[k & (2 * cells - 1)] = x.ring[k & (cells - 1)]
    a32_store_rel(&x.sb.ring_cells, 2 * cells)  # commit


cdef void queue_push(frt_ctx *x, uint32_t t, bint first) noexcept nogil:
    """Queue a task whose word says READY, at the ring's front if it is to be `first`, and wake an idle worker.

    Recovery pushes what a dead client was about to push. If that task has ended, its record may be a call's, which only
    its actor takes. This does not give up while a stopped process holds the lock: the task is committed and would be
    forgotten.
    """
    cdef frt_superblock *sb = x.sb
    cdef uint64_t cell = <uint64_t>frt_word_gen(a64_load_acq(x.task_words + t)) << 32 | t
    cdef uint32_t cells
    if x.tasks[t].actor:  # read after the word: it belongs to that task, or the cell is stale
        return
    while _lock(x) != FRT_OK:
        pass
    cells = _cells(x)
    if x.tasks[t].flags & FRT_TASK_RANKED:
        ranked_put(x, t, cell)
    elif cells:
        if sb.ring_tail - sb.ring_head == cells:
            if cells < queue_cells(frt_most(&sb.tasks.committed, x.tasks_max)):
                _widen(x)
            else:
                _drop_stale(x)
        if first and sb.ring_head and sb.ahead_in_row < AHEAD_MOST:
            x.ring[(sb.ring_head - 1) & (sb.ring_cells - 1) & (x.ring_max - 1)] = cell
            a64_store_sc(&sb.ring_head, sb.ring_head - 1)  # commit
            sb.ahead += 1
            sb.ahead_in_row += 1
        else:
            x.ring[sb.ring_tail & (sb.ring_cells - 1) & (x.ring_max - 1)] = cell
            a64_store_sc(&sb.ring_tail, sb.ring_tail + 1)  # commit
    frt_lock_give(x.locks + FRT_LOCK_QUEUE)
    queue_wake_idle(x)


cdef int queue_pop(frt_ctx *x) noexcept nogil:
    """Claim the next ready task: its index, now CLAIMED(me); FRT_NOT_FOUND when there is none."""
    cdef frt_superblock *sb = x.sb
    cdef uint32_t cells, t = 0
    cdef uint64_t cell, word
    cdef bint claimed = False
    cdef int rc
    if not queue_any(x) or a32_load_rlx(&x.clients[x.me].parked):
        return FRT_NOT_FOUND
    rc = _lock(x)
    if rc != FRT_OK:
        return rc
    if sb.ranked:
        rc = ranked_take(x, sb.ring_head == sb.ring_tail)
        if rc != FRT_NOT_FOUND:
            frt_lock_give(x.locks + FRT_LOCK_QUEUE)
            return rc
    cells = _cells(x)
    while cells and not claimed and sb.ring_head != sb.ring_tail:
        cell = x.ring[sb.ring_head & (cells - 1)]
        t = <uint32_t>cell
        if t >= x.tasks_max:
            cells = 0
            frt_broken(x, "the ready queue names an impossible task")
            break
        word = a64_load_acq(x.task_words + t)
        claimed = queue_means(x, cell, word) and a64_cas_sc(
            x.task_words + t, word, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(word)))
        a64_store_rel(&sb.ring_head, sb.ring_head + 1)  # commit
        if sb.ahead:
            sb.ahead -= 1
        else:
            sb.ahead_in_row = 0
    if claimed:
        frt_lock_give(x.locks + FRT_LOCK_QUEUE)
        return <int>t
    rc = ranked_take(x, True) if cells else FRT_CORRUPT  # the ring had only stale cells
    frt_lock_give(x.locks + FRT_LOCK_QUEUE)
    return rc


cdef uint64_t queue_length(frt_ctx *x) noexcept nogil:
    """Cells in the queue: the ready tasks, and stale cells (of cancelled tasks, for example)."""
    cdef uint64_t head = a64_load_sc(&x.sb.ring_head)
    return a64_load_sc(&x.sb.ring_tail) - head + a32_load_sc(&x.sb.ranked)


cdef void queue_wake_idle(frt_ctx *x) noexcept nogil:
    """Wake one sleeping worker, unless a worker is spinning."""
    cdef uint64_t bits, bit
    cdef uint32_t w
    if a32_load_sc(&x.sb.spinner) != 0:
        return
    for w in range(frt_words(x)):
        bits = a64_load_sc(&x.sb.idle[w])
        while bits:
            bit = bits & (~bits + 1)
            if a64_and_sc(&x.sb.idle[w], ~bit) & bit:
                client_wake(x, w * 64 + frt_lowest(bit))
                return
            bits = a64_load_sc(&x.sb.idle[w])
    queue_report_load(x)  # every worker is busy


cdef void queue_report_load(frt_ctx *x) noexcept nogil:
    """Wake the client that watches the load, once for each time that it asks to be woken."""
    cdef uint32_t c = a32_load_sc(&x.sb.load_watcher)
    if c and c <= frt_clients(x) and a32_cas_sc(&x.sb.load_watcher, c, 0):
        client_wake(x, c - 1)
