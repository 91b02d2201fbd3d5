# cython: language_level=3, freethreading_compatible=True
"""Counts of ended tasks by function and outcome: one store for each task, into a row of the client's own slot.

A scalar result is counted just before it is sealed, so its reader finds it counted; other results just after. Of each
dead client's record, `tally_settle` compares whether the task has ended with the mark of its count.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

from fastrt._core.memory.clients cimport Client, clients_ever
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit
from fastrt._core.objects.functions cimport functions_name
from fastrt._core.tasks.records cimport task_is_cancelled

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef enum:
    HASHES = 64

SUCCEEDED, FAILED, CANCELLED, CRASHED, RETRIED, FORWARDED = (
    FRT_SUCCEEDED, FRT_FAILED, FRT_CANCELLED, FRT_CRASHED, FRT_RETRIED, FRT_FORWARDED)


cdef frt_tally *_new_row(frt_ctx *x, uint32_t v, uint32_t n, frt_task *task) noexcept nogil:
    """Make row n of slot v; NULL if there is no memory for it."""
    cdef frt_tally *row = x.tallies + <uint64_t>v * FRT_TALLIES + n
    cdef uint32_t more = FRT_TALLIES - n
    cdef const char *name = NULL
    if n % FRT_TALLIES_STEP == 0:
        more = FRT_TALLIES_STEP if FRT_TALLIES_STEP < more else more
        if segment_commit(x, <char *>row - x.base, more * sizeof(frt_tally)) != FRT_OK:
            return NULL
    memset(row, 0, sizeof(frt_tally))
    row.function, row.method, row.actor = task.function, task.function_index, task.actor
    if not task.actor:
        name = functions_name(x, task.function)
    elif v == x.me and task.function_index < x.method_names:
        name = x.methods + <size_t>task.function_index * FRT_NAME_BYTES
    if name != NULL:
        memcpy(row.name, name, FRT_NAME_BYTES)
    a32_store_rel(&x.clients[v].tallies, n + 1)  # commit
    return row


cdef uint64_t *tally_find(frt_ctx *x, uint32_t v, uint32_t t, bint make) noexcept nogil:
    """Where slot v counts the function of task t.

    Args:
        make: whether to make a row for it. Without one it is counted among the others.
    """
    cdef frt_client *slot = x.clients + v
    cdef frt_task *task = x.tasks + t
    cdef frt_tally *rows = x.tallies + <uint64_t>v * FRT_TALLIES
    cdef frt_tally *row = NULL
    cdef uint32_t n = frt_most(&slot.tallies, FRT_TALLIES)
    cdef uint32_t h = <uint32_t>(task.function + task.function_index) & (HASHES - 1)
    cdef uint32_t k = x.tally_rows[h]
    if v == x.me and 0 < k <= n and rows[k - 1].function == task.function and \
            rows[k - 1].method == task.function_index:
        row = rows + (k - 1)
    else:
        for k in range(n):
            if rows[k].function == task.function and rows[k].method == task.function_index:
                row = rows + k
                break
        if row == NULL and make and n < FRT_TALLIES:
            row = _new_row(x, v, n, task)
    if v == x.me:
        x.tally_function, x.tally_method = task.function, task.function_index
        x.tally_counts = &slot.other[0] if row == NULL else &row.counts[0]
        if row != NULL:
            x.tally_rows[h] = <uint8_t>(row - rows + 1) if row - rows < 255 else 0
    return &slot.other[0] if row == NULL else &row.counts[0]


cdef uint32_t tally_outcome(frt_ctx *x, uint32_t v, uint32_t t) noexcept nogil:
    """How a task of client v has ended, by its results, which are sealed."""
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t k
    cdef bint failed = False
    frt_task_body(x, t, &body)
    for k in range(body.nreturns):
        slot = body.results[k]
        if slot.index < frt_objects(x) and a64_load_rlx(&x.entries[slot.index].objref) == slot.objref:
            failed = failed or x.entries[slot.index].flags & FRT_ENTRY_ERROR
    if failed and task_is_cancelled(x, t):
        return FRT_CANCELLED
    if failed and frt_word_state(a64_load_acq(x.task_words + t)) == FRT_TASK_ENDING:
        return FRT_CRASHED if task.attempts else FRT_CANCELLED
    if x.clients[v].kind == <uint32_t>FRT_KIND_TOOL:
        return FRT_FORWARDED
    return FRT_FAILED if failed else FRT_SUCCEEDED


cdef void tally_settle(frt_ctx *x, uint32_t v, uint32_t t, bint ended) noexcept nogil:
    """Make the count of a dead client's task right: it counts if all its results are sealed, and else it does not.

    A task that died between its count and its seal is counted by its next attempt.
    """
    cdef frt_task *task = x.tasks + t
    cdef uint64_t *counts = tally_find(x, v, t, False)
    cdef uint32_t mark = frt_tally_mark(task)
    cdef uint32_t k
    cdef bint counted = False
    for k in range(FRT_OUTCOMES):
        if k != FRT_RETRIED and frt_tally_count(counts[k]) and (counts[k] & FRT_TALLY_MARK) == mark:
            counted = True
            if not ended:
                a64_store_rel(counts + k, counts[k] - (<uint64_t>1 << 24) ^ FRT_TALLY_MARK)
    if ended and not counted:
        frt_tally_add(tally_find(x, v, t, True) + tally_outcome(x, v, t), mark)


cdef void tally_retried(frt_ctx *x, uint32_t v, uint32_t t) noexcept nogil:
    """Count that another attempt of a task follows, once, in the slot of the client that ran the last one."""
    cdef uint64_t *count
    cdef uint32_t mark = frt_tally_mark(x.tasks + t)
    frt_threads_take(x)
    count = tally_find(x, v, t, True) + FRT_RETRIED
    if not frt_tally_count(count[0]) or (count[0] & FRT_TALLY_MARK) != mark:
        frt_tally_add(count, mark)
    frt_threads_give(x)


def outcomes(Client client):
    """The counts of all slots: how tasks have ended since the session began.

    Returns:
        Rows (function's objref, number of the method or index of the function's object, actor or None, name, counts
        in the order of SUCCEEDED, FAILED, CANCELLED, CRASHED, RETRIED, FORWARDED). The objref of functions that were
        counted together is None; the actor is one that had such a call, and may be gone; the name of a method is its
        own alone, and "" if it is not known.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_tally *row
    cdef frt_client *slot
    cdef uint32_t v, k, c
    cdef uint64_t n
    cdef dict found = {}
    client.ensure()
    for v in range(clients_ever(x)):
        slot = x.clients + v
        for k in range(frt_most(&slot.tallies, FRT_TALLIES)):
            row = x.tallies + <uint64_t>v * FRT_TALLIES + k
            key = row.function, row.method, row.actor != 0
            if key not in found:
                found[key] = [row.actor, b"", [0] * FRT_OUTCOMES]
            about = found[key]
            about[1] = about[1] or row.name[:strnlen(row.name, FRT_NAME_BYTES)]
            for c in range(FRT_OUTCOMES):
                about[2][c] += frt_tally_count(a64_load_acq(row.counts + c))
        for c in range(FRT_OUTCOMES):
            n = frt_tally_count(a64_load_acq(slot.other + c))
            if n:
                about = found.setdefault((None, 0, False), [0, b"", [0] * FRT_OUTCOMES])
                about[2][c] += n
    return [(function, method, actor - 1 if is_call else None, name.decode("utf-8", "replace"), counts)
            for (function, method, is_call), (actor, name, counts) in found.items()]
