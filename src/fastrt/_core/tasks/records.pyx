# cython: language_level=3, freethreading_compatible=True
"""Records of tasks: take one, fill it in, announce its results, give it back. Other modules change its state.

A record names its results before they turn PENDING, so recovery finds the results of a submission that died half-way.
It stops naming refs and results before their slots are freed, so recovery never reads slots that were used again.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastrt._core.memory.arena cimport arena_alloc, arena_free
from fastrt._core.memory.clients cimport Client, client_wake
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.pool cimport pool_keep_task, pool_take_task
from fastrt._core.memory.trace cimport FRT_TRACE_SUBMIT, frt_trace_point
from fastrt._core.objects.handles cimport Ref, ref_use
from fastrt._core.objects.objects cimport *
from fastrt._core.objects.references cimport links_names, links_tell_held, links_uncount, task_result


cdef frt_refslot *task_slots(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return the slots of a record that this client is filling; records of others are read by frt_task_body."""
    return <frt_refslot *>(x.base + x.tasks[t].offset if x.tasks[t].offset else x.tasks[t].inlined)


cdef int task_record(frt_ctx *x, uint32_t nreturns, uint32_t nrefs, uint32_t nbytes) noexcept nogil:
    """Take a task record with room for its body, and name its result entries; its index, or a negative code."""
    cdef int t = pool_take_task(x)
    cdef uint64_t room = (<uint64_t>nreturns + nrefs) * sizeof(frt_refslot) + nbytes
    cdef frt_task *task
    cdef frt_refslot *slots
    cdef uint32_t k
    cdef int i
    cdef int rc = FRT_OK
    if t < 0:
        return t
    task = x.tasks + t
    task.offset, task.nreturns, task.nrefs, task.bytes, task.actor = 0, 0, nrefs, nbytes, 0
    task.flags, task.attempts, task.signal, task.dep, task.ndeps = 0, 0, 0, 0, 0
    a32_store_rlx(&task.submitter, x.me + 1)
    if room > FRT_TASK_INLINE_BYTES:
        rc = arena_alloc(x, room, FRT_OWNER_TASK | (<uint32_t>t + 1), &task.offset)
    slots = task_slots(x, t)
    for k in range(nreturns):
        if rc < 0:
            break
        i = object_new(x)
        if i < 0:
            rc = i
            break
        slots[k].objref, slots[k].index, slots[k].extra = x.entries[i].objref, i, 0
        a32_store_rlx(&x.entries[i].task, t + 1)
        task.nreturns = k + 1
    if rc < 0:
        task_forget(x, t)
        return rc
    return t


cdef void task_forget(frt_ctx *x, uint32_t t) noexcept nogil:
    """Undo task_record."""
    cdef frt_task *task = x.tasks + t
    for k in range(task.nreturns):
        object_discard(x, task_slots(x, t)[k].index)
    task.nreturns, task.actor = 0, 0  # before the slots go: recovery reads as many as this says
    if task.offset:
        arena_free(x, FRT_OWNER_TASK | (t + 1), &task.offset)
    pool_keep_task(x, t)


cdef void task_announce(frt_ctx *x, uint32_t t) noexcept nogil:
    """Make the results of a record that is about to become a task PENDING, with a hold of this client's."""
    cdef frt_refslot *slots = task_slots(x, t)
    cdef uint32_t k, i
    cdef uint64_t *state
    for k in range(x.tasks[t].nreturns):
        i = slots[k].index
        state = frt_state(x, i)
        object_hold_new(x, i, False)
        a64_store_rel(state, frt_word(FRT_OBJ_PENDING, 0, frt_word_gen(a64_load_rlx(state))))


cdef int task_fill(Client client, uint64_t id, uint64_t function, uint32_t function_index, uint16_t kind,
                   const char *args, uint32_t nbytes, list refs, uint32_t nreturns, uint8_t retries,
                   uint8_t flags) except -1:
    """Take a record and fill in everything that the task `id` needs, still RESERVED; its index."""
    cdef frt_ctx *x = &client.x
    cdef frt_task *task
    cdef frt_refslot *slots
    cdef Ref ref
    cdef uint32_t t, nrefs = <uint32_t>len(refs)
    for ref in refs:
        ref_use(client, ref)
    t = check(task_record(x, nreturns, nrefs, nbytes))
    task = x.tasks + t
    task.id = id
    frt_threads_take(x)
    task.path = a64_load_rlx(&x.path) + 1
    a64_store_rlx(&x.path, task.path)
    frt_threads_give(x)
    task.function, task.function_index = function, function_index
    task.job = a64_load_rlx(&x.clients[x.me].job)
    task.cancelled = 0
    task.kind, task.retries, task.flags = kind, retries, flags
    slots = task_slots(x, t) + nreturns
    for ref in refs:
        slots[0].objref, slots[0].index, slots[0].extra = ref.objref, ref.index, 0
        slots += 1
    memcpy(slots, args, nbytes)
    frt_trace_point(x, FRT_TRACE_SUBMIT, task.id, function_index, 0)
    return <int>t


cdef int task_let_go(frt_ctx *x, uint32_t t) noexcept nogil:
    """Drop the counts of the objects that the task names, and delete those that only it kept alive."""
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t k
    cdef int rc = FRT_OK
    if task.flags & FRT_TASK_COUNTED:
        frt_task_body(x, t, &body)
        rc = links_uncount(x, body.refs, body.nrefs, &task.flags, FRT_TASK_COUNTED)
        for k in range(body.nrefs if rc == FRT_OK else 0):
            slot = body.refs[k]
            if links_names(x, &slot):
                object_maybe_delete(x, slot.index)
        if task.flags & FRT_TASK_DEMAND:
            links_tell_held(x)  # its resources are free
    return rc


cdef int task_done(frt_ctx *x, uint32_t t) noexcept nogil:
    """Give the record of a task whose results are sealed back.

    The task's word must name this client, or a dead one that it recovers: another process completes what it leaves.
    """
    cdef frt_task *task = x.tasks + t
    cdef int rc = FRT_OK
    if task.nrefs:
        rc = task_let_go(x, t)
    if rc == FRT_OK and task.offset:
        task.nreturns, task.nrefs = 0, 0  # before the slots go: recovery reads as many as these say
        rc = arena_free(x, FRT_OWNER_TASK | (t + 1), &task.offset)
    if rc == FRT_OK:
        task.actor = 0  # a RESERVED record that says so is a call in the making
        a64_store_rel(x.task_words + t, frt_word(FRT_TASK_RESERVED, x.me, frt_word_gen(x.task_words[t]) + 1))
        pool_keep_task(x, t)
    return rc


cdef bint task_results_sealed(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return whether all results are sealed."""
    cdef frt_body body
    frt_task_body(x, t, &body)
    for k in range(body.nreturns):
        if task_result(x, t, k) >= 0:
            return False
    return True


cdef int task_priority(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return the priority that the task was submitted with; 0 by default."""
    return x.tasks[t].priority if x.tasks[t].flags & FRT_TASK_RANKED else 0


cdef bint task_is_cancelled(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return whether the task that the record is used for now was cancelled."""
    return frt_cancels(a64_load_sc(&x.tasks[t].cancelled), x.tasks[t].id)


cdef int task_mark_cancelled(frt_ctx *x, uint32_t t, uint64_t word, uint32_t how) noexcept nogil:
    """Mark a task that a client was running when its word said `word`.

    With several cancellers, one is enough to force its end, or to include the tasks that it has submitted.

    Args:
        how: FRT_CANCEL_*.
    Returns:
        The pid of that client; 0 when the word has changed; FRT_CORRUPT when there is no such client.
    """
    cdef uint32_t w = frt_word_client(word)
    cdef uint64_t id = a64_load_acq(&x.tasks[t].id)
    cdef uint64_t seen, mark
    cdef int pid
    pid = x.clients[w].pid if w < frt_clients(x) else 0
    while True:
        seen = a64_load_sc(&x.tasks[t].cancelled)
        # The id, the pid and the mark belong to the task and its worker if the word is still the same.
        if a64_load_sc(x.task_words + t) != word:
            return 0
        if pid <= 0:
            return FRT_CORRUPT  # -1 would be every process there is
        mark = frt_cancel_word(id, how)
        if frt_cancels(seen, id):
            mark = frt_cancel_word(id, ((seen | how) & FRT_CANCEL_FORCE) | (seen & how & FRT_CANCEL_ALONE))
        if mark == seen or a64_cas_sc(&x.tasks[t].cancelled, seen, mark):
            client_wake(x, w)
            return pid
