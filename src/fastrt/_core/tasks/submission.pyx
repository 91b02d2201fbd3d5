# cython: language_level=3, freethreading_compatible=True
"""Submit tasks and calls of actors: `TaskOptions`, made once for each function or method, and `submit`.

A task goes into the queue of ready tasks, or waits for its dependencies. A call goes from the caller straight into the
mailbox of its actor. Commit points: a task's word says WAITING or READY; a call's word says READY, after the call was
pushed into the mailbox. The record counts every object that it names from before the commit until its end, so the
submitter may drop its own references at once. A call does not count its actor: an actor whose last handle is gone
still takes the calls that were made before.

A demand, a policy and a stream are further references of the record. Common tasks have none of them and pay nothing:
a worker's fast path runs only records without such references and without dependencies.
"""
from libc.stdint cimport int8_t, uint8_t, uint16_t, uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client, client_new_objref, client_stops
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.priority_queue cimport ranked_mark
from fastrt._core.memory.queue cimport queue_push
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.mailbox cimport mailbox_push, mailbox_wake
from fastrt._core.objects.objects cimport object_acquire, object_is_sealed
from fastrt._core.objects.references cimport links_count, links_wait, task_is_mine
from fastrt._core.objects.scalar cimport args_write
from fastrt._core.tasks.calls cimport actor_of
from fastrt._core.tasks.tally cimport tally_retried
from fastrt._core.tasks.records cimport task_announce, task_fill, task_forget, task_is_cancelled, task_slots
from fastrt._core.tasks.tasks cimport ARGS_SCALARS
from fastrt.errors import FastrtError

POLICY = FRT_TASK_POLICY
PRIORITY_MAX = <int>FRT_PRIORITY_MAX

cdef enum:
    SCALAR_ROOM = 2048  # larger argument tuples go through the store's serializer


class CallOfDead(Exception):
    """The actor is dead, and its caller must end the call: (task, the call's results as `submit` returns them)."""


cdef class TaskOptions:
    """How the tasks of one function are submitted.

    Args:
        function: reference to the function's object.
        returns: number of results.
        retries: runs allowed beyond the first; 255: any number.
        flags: RETRY_ERRORS: errors of the function count as attempts, too; or 0.
        demand: reference to the sealed object with the resources that a task demands; see `admission`.
        policy: reference to the sealed object that describes to the worker how to run a task.
        priority: from -PRIORITY_MAX to PRIORITY_MAX; of the ready tasks the one with the highest runs first.
        hops: how often nodes have forwarded the task before.
        note: called with the results of each submission, before `submit` returns them.
    Raises:
        ValueError: the priority is out of range.
    """
    cdef readonly Ref target  # the function, or the actor
    cdef bint is_call
    cdef uint32_t method
    cdef readonly uint32_t returns
    cdef uint8_t retries
    cdef uint8_t flags
    cdef int8_t priority
    cdef uint8_t hops
    cdef Ref demand
    cdef Ref policy
    cdef object note

    def __init__(self, Ref function, uint32_t returns=1, uint8_t retries=0, uint8_t flags=0, *, Ref demand=None,
                 Ref policy=None, int priority=0, uint8_t hops=0, object note=None):
        if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
            raise ValueError(f"priority is {priority}; it must be from {-PRIORITY_MAX} to {PRIORITY_MAX}")
        self.target, self.returns, self.retries = function, returns, retries
        self.flags = flags & FRT_TASK_RETRY_ERRORS
        self.demand, self.policy, self.note = demand, policy, note
        self.priority, self.hops = <int8_t>priority, hops
        if demand is not None:
            self.flags |= FRT_TASK_DEMAND
        if policy is not None:
            self.flags |= FRT_TASK_POLICY


cdef class CallOptions(TaskOptions):
    """How the calls of one method of an actor are submitted.

    Args:
        actor: reference to the actor's object.
        method: the method's number.
        returns, retries, flags, policy, note: as for `TaskOptions`.
    """

    def __init__(self, Ref actor, uint32_t method, uint32_t returns=1, uint8_t retries=0, uint8_t flags=0, *,
                 Ref policy=None, object note=None):
        super().__init__(actor, returns, retries, flags, policy=policy, note=note)
        self.is_call, self.method = True, method


cdef class PackedArgs:
    """Serialized arguments of one task or call.

    Args:
        kind: how `data` is written, a number that the worker understands.
        data: the serialized arguments.
        refs: references that the arguments name; all stay alive until the task has ended.
        ndeps: how many of them, from the first on, must be sealed before the task runs.
    Raises:
        ValueError: more dependencies than references, or 4 GiB of data or more.
    """
    cdef readonly uint16_t kind
    cdef readonly bytes data
    cdef readonly list refs
    cdef readonly uint32_t ndeps

    def __init__(self, uint16_t kind, bytes data, list refs, uint32_t ndeps):
        if ndeps > len(refs):
            raise ValueError(f"{ndeps} dependencies among {len(refs)} references")
        if len(data) >= 1 << 32:
            raise ValueError(f"the arguments have {len(data)} bytes; put large ones first and pass their references")
        self.kind, self.data, self.refs, self.ndeps = kind, data, refs, ndeps


def pack_scalars(tuple args):
    """`PackedArgs` of scalars and references; None when an argument is of another kind, or they are too large."""
    cdef char room[SCALAR_ROOM]
    cdef list refs = []
    cdef Py_ssize_t n = args_write(args, Ref, room, SCALAR_ROOM, refs)
    return None if n < 0 else PackedArgs(ARGS_SCALARS, room[:n], refs, <uint32_t>len(refs))


def submit(Client client, TaskOptions options, object args, Ref stream=None):
    """Submit a task or a call.

    Args:
        options: `TaskOptions` for a task, `CallOptions` for a call.
        args: `PackedArgs`; or a tuple of scalars and references, the common case. References in it are resolved before
            the task runs.
        stream: the generator's stream that takes the items which the task yields; see `generators`.
    Returns:
        The Ref of the only result, or a list of Refs when the options say another number of results. None when `args`
        is a tuple with a value of another kind, or too large (nothing happened): pack it.
    Raises:
        CallOfDead: the actor is dead; seal the results with an error and finish the task.
        ObjectStoreFullError: no room for the task or its results.
        StaleReferenceError: a reference of an ended session.
    """
    cdef char room[SCALAR_ROOM]
    cdef list refs
    cdef Py_ssize_t n
    cdef PackedArgs packed
    if type(args) is tuple:
        refs = []
        n = args_write(<tuple>args, Ref, room, SCALAR_ROOM, refs)
        if n < 0:
            return None
        return _submit(client, options, ARGS_SCALARS, room, <uint32_t>n, refs, <uint32_t>len(refs), stream)
    packed = <PackedArgs?>args
    return _submit(client, options, packed.kind, packed.data, <uint32_t>len(packed.data), packed.refs, packed.ndeps,
                   stream)


cdef object _submit(Client client, TaskOptions options, uint16_t kind, const char *args, uint32_t nbytes, list refs,
                    uint32_t ndeps, Ref stream):
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor = NULL
    cdef frt_refslot *slots
    cdef uint32_t t, k = 0, nreturns = options.returns
    cdef uint8_t flags = options.flags
    cdef int rc
    cdef list indexes = None
    cdef object made
    client.ensure()
    if options.is_call:
        actor = actor_of(client, options.target)
    else:
        ref_use(client, options.target)
    if flags & (FRT_TASK_DEMAND | FRT_TASK_POLICY) or stream is not None:
        refs = refs[:]
        if flags & FRT_TASK_DEMAND:
            refs.insert(ndeps, options.demand)
            ndeps += 1
        if flags & FRT_TASK_POLICY:
            refs.append(options.policy)
        if stream is not None:
            refs.append(stream)
            flags |= FRT_TASK_STREAM
    frt_threads_take(x)  # the numbers of a task and of its results follow each other: a failure need not name them
    try:
        if x.end_objref - x.next_objref <= nreturns:
            x.next_objref = x.end_objref  # they all come from the next range
        if actor != NULL:
            t = task_fill(client, client_new_objref(x), actor.function, options.method, kind, args, nbytes, refs,
                          nreturns, options.retries, flags)
        elif options.priority:
            t = _fill_ranked(client, options, kind, args, nbytes, refs, flags)
        else:
            t = task_fill(client, client_new_objref(x), options.target.objref, options.target.index, kind, args, nbytes,
                          refs, nreturns, options.retries, flags)
    finally:
        frt_threads_give(x)
    if actor != NULL:
        x.tasks[t].caller = <uint16_t>x.me
        a32_store_rel(&x.tasks[t].actor, <uint32_t>(actor - x.actors) + 1)
    else:
        x.tasks[t].hops = options.hops
    slots = task_slots(x, t)
    # The results' indexes are read before the commit: a fast worker may end the task before we look again.
    if nreturns == 1:
        k = slots[0].index
    else:
        indexes = [slots[k].index for k in range(nreturns)]
    rc = _commit_task(x, t, ndeps) if actor == NULL else _commit_call(x, actor, t, ndeps)
    if rc != FRT_OK and rc != FRT_CLOSED:
        check(rc)
    made = ref_wrap(client, k) if nreturns == 1 else [ref_wrap(client, k) for k in indexes]
    if options.note is not None:
        options.note(made)
    if rc == FRT_CLOSED:
        raise CallOfDead(t, made)
    return made


cdef int _fill_ranked(Client client, TaskOptions options, uint16_t kind, const char *args, uint32_t nbytes, list refs,
                      uint8_t flags) except -1:
    """`task_fill` for a task with a priority: its id says its turn, so it is not from a range of this client's."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t next_objref, end_objref
    cdef uint32_t t
    cdef int rc
    frt_threads_take(x)
    next_objref, end_objref = x.next_objref, x.end_objref
    x.next_objref = a64_add_rlx(&x.sb.next_objref, <uint64_t>options.returns + 1)  # its own, then those of its results
    x.end_objref = x.next_objref + options.returns + 1
    try:
        t = task_fill(client, client_new_objref(x), options.target.objref, options.target.index, kind, args, nbytes,
                      refs, options.returns, options.retries, flags)
    finally:
        x.next_objref, x.end_objref = next_objref, end_objref
        frt_threads_give(x)
    rc = ranked_mark(x, t, options.priority)
    if rc != FRT_OK:
        task_forget(x, t)
        check(rc)
    return <int>t


cdef int _count(frt_ctx *x, uint32_t t) noexcept nogil:
    """Count the objects that a filled record names; without room for that, forget the record."""
    cdef frt_task *task = x.tasks + t
    cdef int rc = FRT_OK
    if task.nrefs:
        rc = links_count(x, task_slots(x, t) + task.nreturns, task.nrefs, &task.flags, FRT_TASK_COUNTED)
        if rc != FRT_OK:
            task_forget(x, t)
    return rc


cdef int _commit_task(frt_ctx *x, uint32_t t, uint32_t ndeps) noexcept nogil:
    """Make a filled record a task."""
    cdef int rc = _count(x, t)
    if rc != FRT_OK:
        return rc
    task_announce(x, t)
    x.tasks[t].ndeps = ndeps
    frt_threads_take(x)
    a32_store_rel(&x.clients[x.me].pushing, t + 1)  # recovery links or queues it if we do not come that far
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_WAITING if ndeps else FRT_TASK_READY, x.me,
                                            frt_word_gen(x.task_words[t])))  # commit
    if ndeps:
        links_wait(x, t)
    else:
        queue_push(x, t, False)
    a32_store_rel(&x.clients[x.me].pushing, 0)
    frt_threads_give(x)
    return FRT_OK


cdef int _commit_call(frt_ctx *x, frt_actor *actor, uint32_t t, uint32_t ndeps) noexcept nogil:
    """Make a filled record a call of the actor: FRT_OK; FRT_CLOSED when this client must end it."""
    cdef uint32_t gen = frt_word_gen(x.task_words[t])
    cdef int rc = _count(x, t)
    if rc != FRT_OK:
        return rc
    task_announce(x, t)
    x.tasks[t].ndeps = ndeps
    mailbox_push(x, actor, t)
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, gen))  # commit
    # The daemon stores DEAD and then looks for READY calls; the caller stores READY and then looks for DEAD. One of the
    # two ends the call.
    if frt_word_state(a64_load_sc(&actor.word)) == FRT_ACTOR_DEAD:
        if a64_cas_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, gen), frt_word(FRT_TASK_ENDING, x.me, gen)):
            return FRT_CLOSED
        return FRT_OK
    mailbox_wake(x, actor)
    return FRT_OK


# ---- whether a call has ended ----

def record_of(Client client, Ref ref):
    """Return (index, id) of the record of the task that will make `ref`, for `has_ended`; None: it is sealed."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    cdef uint64_t id
    client.ensure()
    ref_use(client, ref)
    t = a32_load_rlx(&x.entries[ref.index].task)
    if t == 0 or t > frt_tasks(x):
        return None
    id = a64_load_acq(&x.tasks[t - 1].id)
    return None if object_is_sealed(x, ref.index) else (t - 1, id)  # while it is not, the record is its task's


def has_ended(Client client, uint32_t t, uint64_t id):
    """Return whether the task of that id, which was in record `t`, has ended. It needs no reference to a result."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    if t >= frt_tasks(x):
        raise IndexError(f"there is no task {t}")
    return a64_load_acq(&x.tasks[t].id) != id or \
        frt_word_state(a64_load_acq(x.task_words + t)) <= FRT_TASK_RESERVED


# ---- a claimed task's policy and attempts ----

def flags_of(Client client, uint32_t t):
    """Return the flags of a task that this client has claimed: POLICY, DEMAND and `generators.STREAM`; 0: none."""
    client.ensure()
    if not task_is_mine(&client.x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    return client.x.tasks[t].flags & (FRT_TASK_POLICY | FRT_TASK_STREAM | FRT_TASK_DEMAND)


def again(Client client, uint32_t t):
    """Start another attempt of a task that this client runs; False if no attempt is left, or it was cancelled."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run")
    if x.tasks[t].attempts > x.tasks[t].retries or task_is_cancelled(x, t):
        return False
    tally_retried(x, x.me, t)
    if x.tasks[t].attempts < 255:
        x.tasks[t].attempts += 1
    return True


def park(Client client, uint32_t t):
    """Keep a task whose attempt has failed until `tasks.retry` queues it; if this client dies, it is queued at once.

    It keeps its resources meanwhile.
    """
    cdef frt_ctx *x = &client.x
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run")
    client_stops(x, t)
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(x.task_words[t])))


def policy_of(Client client, uint32_t t):
    """Return a reference to the policy of a task that this client has claimed; None when it has none."""
    cdef frt_ctx *x = &client.x
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t extras
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    if not x.tasks[t].flags & FRT_TASK_POLICY:
        return None
    extras = frt_task_extras(x.tasks[t].flags)
    if not frt_task_body(x, t, &body) or body.nrefs < extras:
        check(FRT_CORRUPT)
    slot = body.refs[body.nrefs - extras]
    check(object_acquire(x, slot.index, slot.objref, False))
    return ref_wrap(client, slot.index)
