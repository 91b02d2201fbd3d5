# cython: language_level=3, freethreading_compatible=True
"""Links between objects and tasks: counts of contained and argument refs, and lists of waiting tasks.

One robust lock (the links lock) protects two derived structures:
  counted    how many containers and unfinished tasks name an entry. A record whose refs are counted carries a
             COUNTED flag, set in the same critical section; after a death inside it, all counts are rebuilt
             from the flagged records.
  waiters    per unsealed entry the list of tasks that wait for it, the one that waits longest first. A task waits for
             one argument at a time: when that is sealed, its arguments are read again, and it either waits for the
             next unsealed one or becomes READY by one compare-and-swap. So there is no counter of missing arguments
             that could be wrong. A task's LINKED flag says that it is in a list, so several processes may ask for the
             linking. A list is linked both ways, and the first task's `before` is the last: a task is added at the
             end and taken from any place in constant time.
A task that demands resources and has its arguments enters one more list, `held`, instead of the queue. The process
that admits it queues it.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from fastrt._core.memory.clients cimport client_stops
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.queue cimport queue_push
from fastrt._core.objects.stream_items cimport stream_pop, stream_push, stream_rebuild

cdef enum:
    BIAS = 0x80000000  # added to every count during a rebuild: deleters read the counts without the lock

cdef int task_result(frt_ctx *x, uint32_t t, uint32_t k) noexcept nogil:
    """The entry of result k if it is not sealed yet; else FRT_NOT_FOUND (it may hold another object by now)."""
    cdef frt_body body
    cdef frt_refslot slot
    if not frt_task_body(x, t, &body) or k >= body.nreturns:
        return FRT_NOT_FOUND
    slot = body.results[k]
    if not links_names(x, &slot) or a32_load_rlx(&x.entries[slot.index].task) != t + 1 or \
            frt_word_state(a64_load_acq(frt_state(x, slot.index))) != FRT_OBJ_PENDING:
        return FRT_NOT_FOUND
    return <int>slot.index


cdef bint task_is_mine(frt_ctx *x, uint32_t t) noexcept nogil:
    """Whether task t exists and this client runs or ends it."""
    cdef uint64_t word
    if t >= frt_tasks(x):
        return False
    word = a64_load_acq(x.task_words + t)
    return frt_word_state(word) >= FRT_TASK_CLAIMED and frt_word_client(word) == x.me


cdef int _lock(frt_ctx *x) noexcept nogil:
    cdef int rc
    frt_threads_take(x)  # first, because tasks become ready under this lock, and each is an intent of this client's
    rc = frt_lock_take(x.locks + FRT_LOCK_LINKS)
    if rc == FRT_LOCK_ORPHANED:
        _rebuild(x)
        frt_lock_mend(x.locks + FRT_LOCK_LINKS)
        return FRT_OK
    if rc != FRT_OK:
        frt_threads_give(x)
    return rc


cdef void _lock_surely(frt_ctx *x) noexcept nogil:
    """Take the lock for a notification that must not fail; wait without limit, also for a stopped process."""
    while _lock(x) != FRT_OK:
        pass


cdef inline void _unlock(frt_ctx *x) noexcept nogil:
    frt_lock_give(x.locks + FRT_LOCK_LINKS)
    frt_threads_give(x)


cdef int links_touch(frt_ctx *x) noexcept nogil:
    """Take the lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        _unlock(x)
    return rc


cdef void links_recount(frt_ctx *x) noexcept nogil:
    """Rebuild everything after a death outside this lock that may have left counts without a record, or the reverse."""
    _lock_surely(x)
    _rebuild(x)
    _unlock(x)


cdef bint links_names(frt_ctx *x, const frt_refslot *slot) noexcept nogil:
    """Whether a slot names an existing object. The slot is a private copy, which no other process can change."""
    return slot.index < x.objects_max and a64_load_rlx(&x.entries[slot.index].objref) == slot.objref


cdef int links_count(frt_ctx *x, const frt_refslot *slots, uint32_t n, uint8_t *flags, uint8_t flag) noexcept nogil:
    """Count the n refs of the record to which `flags` belongs. The caller holds each of the objects."""
    cdef frt_refslot slot
    cdef uint32_t k
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    for k in range(n):
        slot = slots[k]
        if slot.index < x.objects_max:
            a32_add_sc(&x.entries[slot.index].counted, 1)
    flags[0] |= flag
    _unlock(x)
    return FRT_OK


cdef int links_uncount(frt_ctx *x, const frt_refslot *slots, uint32_t n, uint8_t *flags, uint8_t flag) noexcept nogil:
    """Undo `links_count`. The caller then deletes the objects that have no hold any more."""
    cdef frt_refslot slot
    cdef uint32_t k
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    if flags[0] & flag:
        for k in range(n):
            # If a process died half-way, some objects may be gone, and their entries may hold other objects.
            slot = slots[k]
            if links_names(x, &slot):
                a32_sub_sc(&x.entries[slot.index].counted, 1)
        flags[0] &= ~flag
    _unlock(x)
    return FRT_OK


cdef bint links_unheld(frt_ctx *x, const frt_refslot *slot, uint32_t own) noexcept nogil:
    """Return whether an object is gone, or nothing has a hold of it but `own` records that count it.

    Counts do not change under the lock, and a hold that is no reference of a client is counted: none is missed while it
    moves from one to the other. False, too, when a stopped process holds the lock.
    """
    cdef bint unheld
    if _lock(x) != FRT_OK:
        return False
    unheld = not links_names(x, slot) or \
        a32_load_sc(&x.entries[slot.index].counted) == own and not frt_any(x, slot.index, FRT_REFS)
    _unlock(x)
    return unheld


cdef int links_hold_function(frt_ctx *x, uint32_t i) noexcept nogil:
    """Count an entry once for the function table (a rebuild reads that table, too)."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        a32_add_sc(&x.entries[i].counted, 1)
        _unlock(x)
    return rc


cdef int links_add_item(frt_ctx *x, uint32_t s, uint32_t i) noexcept nogil:
    """Add entry i to stream s, under the lock; see stream_push."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        rc = stream_push(x, s, i)
        _unlock(x)
    return rc


cdef int links_take_item(frt_ctx *x, uint32_t s, uint64_t head) noexcept nogil:
    """Take the first item off stream s, under the lock; see stream_pop."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        rc = stream_pop(x, s, head)
        _unlock(x)
    return rc


cdef inline void _append(frt_ctx *x, uint32_t *list, uint32_t t) noexcept nogil:
    """Under the lock: add a task at the end of a list."""
    cdef frt_task *task = x.tasks + t
    cdef uint32_t head = list[0]
    task.waiter, task.before = 0, t + 1
    if 0 < head <= x.tasks_max and 0 < x.tasks[head - 1].before <= x.tasks_max:
        task.before = x.tasks[head - 1].before
        x.tasks[task.before - 1].waiter = t + 1
        x.tasks[head - 1].before = t + 1
    elif head:
        frt_broken(x, "a list of waiting tasks is damaged")
    else:
        head = t + 1
    task.flags |= FRT_TASK_LINKED
    a32_store_sc(list, head)


cdef bint _take(frt_ctx *x, uint32_t *list, uint32_t t) noexcept nogil:
    """Under the lock: take a task out of the list that it is in; whether it was there."""
    cdef frt_task *task = x.tasks + t
    cdef uint32_t head = list[0]
    cdef uint32_t before = task.before
    cdef uint32_t after = task.waiter
    task.flags &= ~FRT_TASK_LINKED
    if head == 0 or head > x.tasks_max or before == 0 or before > x.tasks_max or after > x.tasks_max or \
            head != t + 1 and x.tasks[before - 1].waiter != t + 1:
        frt_broken(x, "a list of waiting tasks is damaged")
        return False
    if head == t + 1:
        a32_store_sc(list, after)
    else:
        x.tasks[before - 1].waiter = after
    x.tasks[(after if after else head) - 1].before = before
    return True


cdef void _advance(frt_ctx *x, uint32_t t, bint first) noexcept nogil:
    """Under the lock: let a WAITING task wait for its next unsealed argument; if all are sealed, make it READY.

    first: as for `queue_push`.
    """
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef uint64_t word = a64_load_acq(x.task_words + t)
    cdef uint32_t i, dep
    if frt_word_state(word) != FRT_TASK_WAITING or task.flags & FRT_TASK_LINKED:
        return
    if not frt_task_body(x, t, &body):
        frt_broken(x, "a waiting task's body lies outside the arena")
        return
    dep = task.dep
    while dep < body.ndeps:
        i = body.refs[dep].index
        if i >= x.objects_max:
            frt_broken(x, "a waiting task names an impossible object")
            return
        if frt_word_state(a64_load_sc(frt_state(x, i))) == FRT_OBJ_PENDING:
            _append(x, &x.entries[i].waiter, t)
            # A sealer stores the state and then reads the waiters; here it is the other way round.
            if frt_word_state(a64_load_sc(frt_state(x, i))) == FRT_OBJ_PENDING:
                return
            _take(x, &x.entries[i].waiter, t)
        dep += 1
        task.dep = dep
    if task.flags & FRT_TASK_DEMAND:
        _append(x, &x.sb.held, t)
        links_tell_held(x)
        return
    a32_store_rel(&x.clients[x.me].pushing, t + 1)  # recovery queues it if this process dies before
    if a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_READY, x.me, frt_word_gen(word))):
        queue_push(x, t, first)
    a32_store_rel(&x.clients[x.me].pushing, 0)


cdef void links_wait(frt_ctx *x, uint32_t t) noexcept nogil:
    """Link a WAITING task to its first unsealed argument; if all are sealed it is queued at once.

    A rebuild, or the recovery of the submitter, may have done so already.
    """
    _lock_surely(x)
    if frt_word_state(a64_load_acq(x.task_words + t)) == FRT_TASK_WAITING and not x.tasks[t].flags & FRT_TASK_LINKED:
        x.tasks[t].dep = 0
        _advance(x, t, False)
    _unlock(x)


cdef void links_unwait(frt_ctx *x, uint32_t t) noexcept nogil:
    """Remove a task that is being cancelled from the list it waits in, if it is in one."""
    _lock_surely(x)
    _unlink(x, t)
    _unlock(x)


cdef void _unlink(frt_ctx *x, uint32_t t) noexcept nogil:
    """Under the lock: remove a task from the list that it is in, if it is in one."""
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef uint32_t i
    if task.flags & FRT_TASK_LINKED:
        i = body.refs[task.dep].index if frt_task_body(x, t, &body) and task.dep < body.ndeps else FRT_NONE
        if i < x.objects_max:
            _take(x, &x.entries[i].waiter, t)
        elif task.flags & FRT_TASK_DEMAND:
            _take(x, &x.sb.held, t)
        else:
            task.flags &= ~FRT_TASK_LINKED


cdef void links_tell_held(frt_ctx *x) noexcept nogil:
    """Wake the process that admits tasks, to check the held list again."""
    a32_add_sc(&x.sb.held_news, 1)
    frt_futex_wake(&x.sb.held_news)


cdef bint links_hold(frt_ctx *x, uint32_t t) noexcept nogil:
    """Make a task that demands resources, and that this client had claimed, wait for admission again. Returns True."""
    frt_threads_take(x)
    client_stops(x, t)
    a32_store_rel(&x.clients[x.me].pushing, t + 1)  # recovery does it if this process dies before
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_WAITING, x.me, frt_word_gen(x.task_words[t])))
    links_wait(x, t)
    a32_store_rel(&x.clients[x.me].pushing, 0)
    frt_threads_give(x)
    return True


cdef int links_take_held(frt_ctx *x) noexcept nogil:
    """Take the first task off the list of tasks that wait for admission: its index, or FRT_NOT_FOUND."""
    cdef uint32_t t
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    t = a32_load_rlx(&x.sb.held)
    if t > x.tasks_max:
        rc = frt_broken(x, "the list of tasks that wait for admission is damaged")
    elif t == 0:
        rc = FRT_NOT_FOUND
    else:
        rc = <int>t - 1 if _take(x, &x.sb.held, t - 1) else FRT_CORRUPT
    _unlock(x)
    return rc


cdef int links_take_waiting(frt_ctx *x, uint32_t t, uint64_t id, int state, uint32_t devices,
                            bint first) noexcept nogil:
    """Give a held task another state, stamped by this client; FRT_NOT_FOUND when it is not that task, or not held.

    A task that becomes READY is queued, at the front if it is to be `first`. `devices` are those that it is given, see
    FRT_TASK_DEMAND.
    """
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef uint64_t word
    cdef int rc = _lock(x)
    if rc != FRT_OK:
        return rc
    word = a64_load_acq(x.task_words + t)
    rc = FRT_NOT_FOUND
    if frt_word_state(word) == FRT_TASK_WAITING and task.id == id and task.flags & FRT_TASK_DEMAND and \
            task.dep == task.ndeps and frt_task_body(x, t, &body) and body.ndeps:
        a32_store_rel(&body.refs[body.ndeps - 1].extra, devices)
        _unlink(x, t)  # a rebuild, or the recovery of another client, may have linked it again
        a32_store_rel(&x.clients[x.me].pushing, t + 1)
        if a64_cas_sc(x.task_words + t, word, frt_word(state, x.me, frt_word_gen(word))):
            rc = FRT_OK
            if state == FRT_TASK_READY:
                queue_push(x, t, first)
        a32_store_rel(&x.clients[x.me].pushing, 0)
    _unlock(x)
    return rc


cdef void links_relist(frt_ctx *x) noexcept nogil:
    """Put held tasks back on the list after the process that had taken them off it has died."""
    cdef uint32_t t
    _lock_surely(x)
    for t in range(frt_tasks(x)):
        if x.tasks[t].flags & FRT_TASK_DEMAND and frt_word_state(a64_load_acq(x.task_words + t)) == FRT_TASK_WAITING:
            x.tasks[t].dep = 0 if not x.tasks[t].flags & FRT_TASK_LINKED else x.tasks[t].dep
            _advance(x, t, False)
    _unlock(x)


cdef void links_sealed(frt_ctx *x, uint32_t i) noexcept nogil:
    """Advance the tasks that wait for entry i, which was just sealed."""
    cdef uint32_t t, waiters
    cdef uint32_t left = x.tasks_max
    cdef bint first
    if a32_load_sc(&x.entries[i].waiter) == 0:
        return
    # A task that takes a large value runs before those that make more of them, once a quarter of the memory is in use.
    first = a64_load_rlx(&x.entries[i].bytes) >= FRT_SPILL_BYTES_MIN and x.sb.used_pages > x.pages_max // 4
    _lock_surely(x)
    # Detach the list first: the entry may have been freed and reused meanwhile, and then a task of the old list
    # that also waits for the new object links itself again.
    waiters = a32_load_rlx(&x.entries[i].waiter)
    a32_store_sc(&x.entries[i].waiter, 0)
    while 0 < waiters <= x.tasks_max and left:
        left -= 1
        t = (x.tasks[waiters - 1].before if first else waiters) - 1  # in turn; those that go to the front end with it
        if t >= x.tasks_max or not _take(x, &waiters, t):
            break
        _advance(x, t, first)
    if waiters:
        frt_broken(x, "a list of waiting tasks is damaged")
    _unlock(x)


cdef void _count(frt_ctx *x, const frt_refslot *slots, uint32_t n) noexcept nogil:
    cdef frt_refslot slot
    cdef uint32_t k
    for k in range(n):
        slot = slots[k]
        if links_names(x, &slot):
            a32_add_sc(&x.entries[slot.index].counted, 1)


cdef void _rebuild(frt_ctx *x) noexcept nogil:
    """Rebuild all counts and waiter lists from the records. Under the lock, after a death inside it.

    Other clients cannot delete objects while the bias is on; the recovery that follows the death finds those objects.
    """
    cdef uint32_t i, t, k, n
    cdef uint32_t objects = frt_objects(x)
    cdef uint32_t tasks = frt_tasks(x)
    cdef const frt_refslot *slots
    cdef frt_body body
    a32_store_sc(&x.sb.held, 0)
    for i in range(objects):
        a32_store_sc(&x.entries[i].counted, BIAS)
        a32_store_sc(&x.entries[i].waiter, 0)
    for i in range(objects):
        if x.entries[i].flags & FRT_ENTRY_COUNTED and \
                frt_word_state(a64_load_acq(frt_state(x, i))) != FRT_OBJ_EMPTY:
            slots = frt_entry_refs(x, i, &n)
            _count(x, slots, n)
        if x.entries[i].flags & FRT_ENTRY_STREAM and \
                frt_word_state(a64_load_acq(frt_state(x, i))) != FRT_OBJ_EMPTY and stream_rebuild(x, i) != FRT_OK:
            break
    for k in range(frt_functions(x)):
        i = x.functions[k].index
        if x.functions[k].objref and i < objects and x.entries[i].objref == x.functions[k].objref:
            a32_add_sc(&x.entries[i].counted, 1)
    for k in range(frt_actors(x)):
        i = x.actors[k].index
        if x.actors[k].flags & FRT_ACTOR_COUNTED and i < objects and x.entries[i].objref == x.actors[k].objref and \
                frt_word_state(a64_load_acq(&x.actors[k].word)) != FRT_ACTOR_EMPTY:
            a32_add_sc(&x.entries[i].counted, 1)
    for t in range(tasks):
        if x.tasks[t].flags & FRT_TASK_LINKED:
            x.tasks[t].flags &= ~FRT_TASK_LINKED
        if x.tasks[t].flags & FRT_TASK_COUNTED and \
                frt_word_state(a64_load_acq(x.task_words + t)) != FRT_TASK_EMPTY:
            frt_task_body(x, t, &body)
            _count(x, body.refs, body.nrefs)
    for i in range(objects):
        a32_sub_sc(&x.entries[i].counted, BIAS)
    for t in range(tasks):
        if frt_word_state(a64_load_acq(x.task_words + t)) == FRT_TASK_WAITING:
            x.tasks[t].dep = 0
            _advance(x, t, False)
