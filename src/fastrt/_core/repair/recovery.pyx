# cython: language_level=3, freethreading_compatible=True
"""Recovery: release the holds and finish the work of a dead client. Any client may do it; normally the daemon does.

For a client that leaves: it drops its references itself (`leave`), and the daemon ends its tasks (`end_job`).

Every step is idempotent and the slot is freed last, so the recovering process may be killed, too: the next one sees
the slot DYING and starts again. Only the pidfd proves that a process is gone; an orphaned lock does not.
The scans read one dense word array each (32 bytes per object for up to 64 clients). They keep the GIL, where there is
one: threads of this process share the client's magazines and its stamp.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.arena cimport arena_free, arena_touch
from fastrt._core.memory.clients cimport FRT_JOB_BITS, Client, client_wake, clients_ever
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.pool cimport pool_flush, pool_return, pool_touch
from fastrt._core.memory.queue cimport queue_push, queue_touch
from fastrt._core.memory.segment cimport spill_remove
from fastrt._core.memory.trace cimport trace_settle
from fastrt._core.objects.functions cimport functions_touch
from fastrt._core.objects.objects cimport object_empty, object_free, object_maybe_delete, object_release, object_tell
from fastrt._core.objects.references cimport links_hold, links_names, links_touch, links_unwait, links_wait, task_result
from fastrt._core.tasks.actors cimport actors_of_dead, actors_touch
from fastrt._core.tasks.orphan_tasks cimport orphans_mark
from fastrt._core.tasks.failures cimport failure_crashed, failures_mend, failures_of_dead
from fastrt._core.tasks.tally cimport tally_outcome, tally_retried, tally_settle
from fastrt._core.tasks.records cimport (
    task_done, task_is_cancelled, task_let_go, task_mark_cancelled, task_results_sealed)
from fastrt._core.memory.segment import start_time


cdef int _repair_locks(frt_ctx *x) noexcept nogil:
    """Take every lock once, so that deaths inside them are repaired now and not in a user's call."""
    cdef int rc = actors_touch(x)
    rc = rc or functions_touch(x)
    rc = rc or links_touch(x)
    rc = rc or queue_touch(x)
    rc = rc or pool_touch(x, False)
    rc = rc or pool_touch(x, True)
    return rc or arena_touch(x)


cdef void _intents(frt_ctx *x, uint32_t v) noexcept nogil:
    """Make the notifications that the dead client was about to make.

    The record may have been reused by now: a superfluous notification is harmless.
    """
    cdef frt_client *slot = x.clients + v
    cdef uint32_t t
    cdef int state
    if a32_cas_sc(&x.sb.spinner, v + 1, 0):
        pass
    a64_and_sc(&x.sb.idle[v >> 6], ~(<uint64_t>1 << (v & 63)))
    t = slot.sealing
    if t:
        if t <= x.objects_max:
            object_tell(x, t - 1)
        slot.sealing = 0
    t = slot.pushing
    if t > x.tasks_max:
        slot.pushing = 0
    elif t:
        t -= 1
        state = frt_word_state(a64_load_sc(x.task_words + t))
        if state == FRT_TASK_READY:
            queue_push(x, t, False)
        elif state == FRT_TASK_WAITING:
            links_wait(x, t)
        slot.pushing = 0


cdef int _unsubmit(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return a task record that the dead client had RESERVED, perhaps with a half-made task in it."""
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t k, i
    cdef uint64_t word
    cdef int rc = task_let_go(x, t)
    frt_task_body(x, t, &body)
    for k in range(body.nreturns):
        slot = body.results[k]
        i = slot.index
        if links_names(x, &slot) and x.entries[i].task == t + 1:
            word = a64_load_sc(frt_state(x, i))
            if frt_word_state(word) == FRT_OBJ_PENDING:
                # Only the dead client ever knew this result: the object scan returns it.
                a64_store_sc(frt_state(x, i), frt_word(FRT_OBJ_RESERVED, frt_word_client(x.task_words[t]),
                                                       frt_word_gen(word)))
    task.nreturns = 0
    if task.offset:
        rc = rc or arena_free(x, FRT_OWNER_TASK | (t + 1), &task.offset)
    if task.actor:  # the mailbox may link to it: a new generation makes that link invalid for the record's next task
        task.actor = 0
        a64_store_sc(x.task_words + t, frt_word(FRT_TASK_RESERVED, x.me, frt_word_gen(x.task_words[t]) + 1))
    return rc or pool_return(x, True, &t, 1)


cdef int _requeue(frt_ctx *x, uint32_t t, uint64_t word) noexcept nogil:
    """Make a task of the dead client READY again; results that its last attempt had written are dropped."""
    cdef int i, rc
    cdef frt_body body
    frt_task_body(x, t, &body)
    for k in range(body.nreturns):
        i = task_result(x, t, k)
        if i >= 0:
            rc = object_empty(x, i)
            if rc != FRT_OK:
                return rc
    if x.tasks[t].flags & FRT_TASK_DEMAND:
        links_hold(x, t)
        return FRT_OK
    if x.tasks[t].actor:  # the actor's next process searches the task table for it
        a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, frt_word_gen(word)))
        return FRT_OK
    frt_threads_take(x)
    a32_store_rel(&x.clients[x.me].pushing, t + 1)  # this process may die, too
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, frt_word_gen(word)))
    queue_push(x, t, False)
    a32_store_rel(&x.clients[x.me].pushing, 0)
    frt_threads_give(x)
    return FRT_OK


cdef struct death:
    const char *type     # the exception's class for the tasks that it ended
    const char *message
    int signal           # 0: none


cdef void _keep_failure(frt_ctx *x, uint32_t v, uint32_t t, const death *how, bint retried) noexcept nogil:
    """Keep that an attempt has ended with its process."""
    cdef const char *type = how.type
    if x.tasks[t].flags & FRT_TASK_LATE:
        type = "TaskTimeoutError"
    elif x.tasks[t].actor:
        type = "ActorDiedError"
    failure_crashed(x, v, t, type, how.message, how.signal, retried)


cdef int _end_here(frt_ctx *x, uint32_t v, uint32_t t, uint64_t word, const death *how) noexcept nogil:
    """Take a task of client v over to end it. Returns 1 when its results still have to be sealed with an error."""
    cdef bint ended = task_results_sealed(x, t)
    tally_settle(x, v, t, ended)
    if ended and x.tasks[t].attempts > 1 and tally_outcome(x, v, t) == FRT_SUCCEEDED:
        failures_mend(x, x.tasks[t].id)
    if not ended and frt_word_state(word) in (FRT_TASK_RUNNING, FRT_TASK_BLOCKED) and not task_is_cancelled(x, t):
        _keep_failure(x, v, t, how, False)
    # A task that ends is counted in the slot of its client: after a death here, its count is looked for there again.
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_ENDING, v if ended else x.me, frt_word_gen(word)))
    links_unwait(x, t)  # a canceller may have taken it while it was waiting, and died before it came to this
    return task_done(x, t) if ended else 1


cdef int _task_of_dead(frt_ctx *x, uint32_t v, uint32_t t, uint64_t word, const death *how) noexcept nogil:
    """Recover a task record stamped by the dead client. Returns 1 when the caller must end the task with an error."""
    cdef frt_task *task = x.tasks + t
    cdef int state = frt_word_state(word)
    if state == FRT_TASK_RESERVED:
        return _unsubmit(x, t)
    if state == FRT_TASK_READY and 0 < task.actor <= frt_actors(x) and \
            frt_word_state(a64_load_sc(&x.actors[task.actor - 1].word)) == FRT_ACTOR_DEAD:
        # A call made when the actor was DEAD already: its caller died before it could end the call.
        return 1 if a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_ENDING, x.me, frt_word_gen(word))) else FRT_OK
    if state == FRT_TASK_ENDING or state >= FRT_TASK_CLAIMED and task_is_cancelled(x, t):
        return _end_here(x, v, t, word, how)
    if state == FRT_TASK_CLAIMED:
        return _requeue(x, t, word)
    if state == FRT_TASK_RUNNING or state == FRT_TASK_BLOCKED:
        if task_results_sealed(x, t) or task.attempts > task.retries or task.flags & FRT_TASK_LATE:
            return _end_here(x, v, t, word, how)
        tally_settle(x, v, t, False)
        tally_retried(x, v, t)
        _keep_failure(x, v, t, how, True)
        return _requeue(x, t, word)
    return FRT_OK


cdef bint _take_waiting(frt_ctx *x, uint32_t t, uint64_t *word) noexcept nogil:
    """Take a task that has not started to end it. False if another process took it; `word` is then its new word."""
    cdef uint32_t gen = frt_word_gen(word[0])
    while frt_word_gen(word[0]) == gen and frt_word_state(word[0]) in (FRT_TASK_WAITING, FRT_TASK_READY):
        if a64_cas_sc(x.task_words + t, word[0], frt_word(FRT_TASK_ENDING, x.me, gen)):
            return True
        word[0] = a64_load_acq(x.task_words + t)  # it may have gone from WAITING to READY: try again
    return False


cdef object _scan_tasks(frt_ctx *x, uint32_t v, uint64_t job, list running, const death *how, bint nested):
    """End the tasks of a job, if one is given; if client v is dead also recover its task records.

    `how` says how it died; NULL: it lives. Without `nested`, only those end that have come from other nodes, and not
    what these have submitted here.
    """
    cdef uint32_t t, gen
    cdef uint64_t word
    cdef int state, rc, pid
    cdef list ending = []
    cdef bint dead = how != NULL
    for t in range(frt_tasks(x)):
        word = a64_load_acq(x.task_words + t)
        state, gen = frt_word_state(word), frt_word_gen(word)
        if state == FRT_TASK_EMPTY:
            continue
        rc = FRT_OK
        if job and x.tasks[t].job & (((<uint64_t>1) << FRT_JOB_BITS) - 1) == job and \
                state != FRT_TASK_RESERVED and state != FRT_TASK_ENDING and \
                (nested or (x.tasks[t].actor == 0 and x.tasks[t].hops != 0)):
            pid = 0
            while pid == 0:  # until it is taken or marked, or may run on
                if _take_waiting(x, t, &word):
                    links_unwait(x, t)
                    ending.append(t)
                    break
                pid = FRT_NOT_FOUND
                # A running call goes on: its actor may also serve other jobs.
                if FRT_TASK_CLAIMED <= frt_word_state(word) <= FRT_TASK_BLOCKED and frt_word_gen(word) == gen and \
                        x.tasks[t].actor == 0:
                    pid = task_mark_cancelled(x, t, word, FRT_CANCEL_FORCE)
                    word = word if pid else a64_load_acq(x.task_words + t)
            if pid == 0:
                continue
            if pid > 0 and (not dead or frt_word_client(word) != v):
                if start_time(pid) == x.clients[frt_word_client(word)].starttime:
                    running.append(pid)
                continue
        if dead and frt_word_client(word) == v:
            rc = check(_task_of_dead(x, v, t, word, how))
            if rc == 1:
                ending.append(t)
    return ending


cdef int _scan_objects(frt_ctx *x, uint32_t v) noexcept:
    """Finish or undo the changes that the dead client was making to entries, and clear its bits at all entries."""
    cdef uint64_t bit = <uint64_t>1 << (v & 63)
    cdef uint32_t w = v >> 6
    cdef uint32_t i
    cdef uint64_t word
    cdef uint64_t *state
    cdef uint64_t *refs
    cdef uint64_t *pins
    cdef uint64_t *waits
    cdef int what
    cdef int rc = FRT_OK
    for i in range(frt_objects(x)):
        refs, pins = frt_bits(x, i, FRT_REFS, w), frt_bits(x, i, FRT_PINS, w)
        waits = frt_bits(x, i, FRT_WAITS, w)
        state = frt_state(x, i)
        word = a64_load_acq(state)
        what = frt_word_state(word)
        if what == FRT_OBJ_EMPTY:
            # The dead client may have come too late for an object and died before it cleared its bit. By now the entry
            # may hold another object, which was not deleted because of that bit: decide again below.
            if not refs[0] & bit:
                continue
        elif frt_word_client(word) == v and what != FRT_OBJ_PENDING and what != FRT_OBJ_SEALED:
            if what == FRT_OBJ_RESERVED:
                a64_and_sc(refs, ~bit)
                a64_and_sc(pins, ~bit)  # a value is sealed in place with both bits
                rc = rc or object_empty(x, i)
                x.entries[i].objref = 0
                rc = rc or pool_return(x, False, &i, 1)
                continue
            if what == FRT_OBJ_FREEING:
                a64_store_sc(state, frt_word(FRT_OBJ_FREEING, x.me, frt_word_gen(word)))
                object_free(x, i)
                continue
            if what == FRT_OBJ_SPILLED or what == FRT_OBJ_RESTORING:
                # The file is complete; if there is a block, it was about to be freed or is half read back. Take a
                # SPILLED entry first: another client may be deleting it. The block of one with refs has only those.
                if a64_cas_sc(state, word, frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word))):
                    if what == FRT_OBJ_RESTORING and not a8_load_sc(&x.entries[i].flags) & FRT_ENTRY_FILE:
                        spill_remove(x, x.entries[i].objref)  # half of a remote value's bytes
                    if x.entries[i].nrefs == 0:
                        rc = rc or arena_free(x, i + 1, &x.entries[i].offset)
                    a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(word)))
            elif what == FRT_OBJ_SPILLING:
                a64_cas_sc(state, word, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))
            else:
                # Undecided: decide again below. A holder may have put it back already.
                a64_cas_sc(state, word, frt_word_undeleted(word))
        if refs[0] & bit:
            a64_and_sc(refs, ~bit)
        if pins[0] & bit:
            a64_and_sc(pins, ~bit)
        if waits[0] & bit:
            a64_and_sc(waits, ~bit)
        # Checked here: a call for each of a million values that are held only by other values takes twice as long.
        if not frt_any(x, i, FRT_REFS) and a32_load_sc(&x.entries[i].counted) == 0:
            object_maybe_delete(x, i)
    return rc


def leave(Client client):
    """Leave as `Client.close` does, and drop all references; this process keeps its slot.

    So views that still exist keep their values in place, and the process may attach through the slot again.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t i
    cdef bint held
    client.ensure()
    a32_store_rel(&client.has_left, 1)  # first, or a view that is dropped now would keep its pin
    a32_store_rel(&client.has_closed, 1)
    frt_set_left(x)
    for i in range(frt_objects(x)):
        frt_threads_take(x)
        held = x.refs_held[i] != 0
        if held:
            x.refs_held[i] = 1
        frt_threads_give(x)
        if held:
            object_release(x, i, False)
    x.clients[x.me].recordings = 0
    trace_settle(x)
    pool_flush(x)
    a32_store_rel(&x.clients[x.me].departed, 1)
    client_wake(x, x.me)  # waiting threads check again, and raise


cdef uint64_t _job_of(frt_ctx *x, uint32_t v) noexcept nogil:
    """The number of client v's job; see `Client.job`."""
    return (<uint64_t>frt_word_gen(x.clients[v].word) << 16) | (v + 1)


def end_job(Client client, uint32_t v):
    """End the tasks of a driver that leaves while its process goes on.

    Args:
        client: the caller's attachment.
        v: the driver's slot.
    Returns:
        As `recover`.
    Raises:
        LockStuck: a live process has held a lock for 5 s; call again.
    """
    client.ensure()
    if v >= client.x.clients_max:
        raise ValueError(f"there is no client {v}")
    running = []
    return {"ending": _scan_tasks(&client.x, v, _job_of(&client.x, v), running, NULL, True), "running": running}


cdef void _close_planes(frt_ctx *x) noexcept nogil:
    """Close the highest planes if they have no client: every release reads each plane in use. They keep their memory,
    so a client that has just read the old number may still read them."""
    cdef uint32_t c, n
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_SLOTS)
    if rc == FRT_LOCK_ORPHANED:
        frt_lock_mend(x.locks + FRT_LOCK_SLOTS)
    elif rc != FRT_OK:
        return
    n = frt_planes(x)
    c = 64 * x.words + FRT_PLANE_CLIENTS * n
    while c > 64 * x.words and frt_word_state(a64_load_acq(&x.clients[c - 1].word)) == FRT_CLIENT_FREE:
        c -= 1
    c = (c - 64 * x.words + FRT_PLANE_CLIENTS - 1) // FRT_PLANE_CLIENTS
    if c != n:
        a32_store_sc(&x.sb.planes, c)
    frt_lock_give(x.locks + FRT_LOCK_SLOTS)


cdef void _spare_children(frt_ctx *x, uint32_t v) noexcept nogil:
    """Count a process as departed that ended because its task was cancelled by force: that ends nothing else."""
    cdef uint32_t t = x.clients[v].task - 1
    if t < frt_tasks(x) and frt_word_client(a64_load_acq(x.task_words + t)) == v and task_is_cancelled(x, t) and \
            a64_load_sc(&x.tasks[t].cancelled) & FRT_CANCEL_FORCE:
        a32_store_rel(&x.clients[v].departed, 1)


def recover(Client client, uint32_t v, bint wake=True, str kind="WorkerCrashedError", str words="ended", int signal=0):
    """Release all holds of a dead client, and free its slot.

    The caller has seen the process's pidfd become readable.

    Args:
        client: the caller's attachment.
        v: the dead client's slot.
        wake: whether to call `wake_all` at the end; to recover several clients, call it once after the last one.
        kind, words, signal: for the kept failures of its tasks: the exception's class, how the process ended, and the
            signal that ended it, or 0.
    Returns:
        {"ending": task indexes, "running": pids}: tasks that this client must now end by sealing an error
        (their attempts are used up, they were cancelled, or their driver or uplink is gone), and processes that
        still run tasks of the dead client's job.
    Raises:
        LockStuck: a live process has held a lock for 5 s; call again.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_client *slot
    cdef uint64_t job = 0
    cdef int rc
    cdef death how
    cdef bytes named, message
    client.ensure()
    if v >= clients_ever(x) or v == x.me:
        raise ValueError(f"client {v} cannot be recovered by client {x.me}")
    slot = x.clients + v
    named, message = kind.encode(), f"process {slot.pid} {words}".encode("utf-8", "replace")
    how.type, how.message, how.signal = named, message, signal
    rc = frt_lock_take(x.locks + FRT_LOCK_JANITOR)
    if rc == FRT_LOCK_ORPHANED:
        frt_lock_mend(x.locks + FRT_LOCK_JANITOR)
    else:
        check(rc)
    try:
        if frt_word_state(slot.word) == FRT_CLIENT_FREE:
            return {"ending": [], "running": []}
        x.sb.janitor_victim = v + 1
        a64_store_sc(&slot.word, frt_word(FRT_CLIENT_DYING, 0, frt_word_gen(slot.word)))
        check(_repair_locks(x))
        _intents(x, v)
        failures_of_dead(x, v)
        # The job of an uplink is the tasks of other nodes, which run them again. What those tasks have submitted here
        # goes on: other nodes may hold its results.
        if slot.kind == <uint32_t>FRT_KIND_DRIVER or slot.kind == <uint32_t>FRT_KIND_TOOL:
            job = _job_of(x, v)
        running = []
        _spare_children(x, v)
        ending = _scan_tasks(x, v, job, running, &how, slot.kind == <uint32_t>FRT_KIND_DRIVER)
        check(_scan_objects(x, v))
        actors_of_dead(x, v)
        orphans_mark(x, v)
        a32_store_sc(&slot.recordings, 0)
        a32_store_sc(&slot.parked, 0)
        trace_settle(x)  # also if it had none: it may have died between the end of one and this
        a32_add_sc(&x.sb.death_epoch, 1)
        a64_store_sc(&slot.word, frt_word(FRT_CLIENT_FREE, 0, frt_word_gen(slot.word)))
        x.sb.janitor_victim = 0
        _close_planes(x)
    finally:
        frt_lock_give(x.locks + FRT_LOCK_JANITOR)
    if wake:
        wake_all(client)
    return {"ending": ending, "running": running}


def wake_all(Client client):
    """Wake every client to check its waits again: a waker may have died between its store and its wake, or a sleeper
    after it took a wake meant for others."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t i
    client.ensure()
    for i in range(frt_clients(x)):
        if frt_word_state(x.clients[i].word) == FRT_CLIENT_LIVE:
            client_wake(x, i)
