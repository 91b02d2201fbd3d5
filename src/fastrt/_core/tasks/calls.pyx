# cython: language_level=3
"""The caller's side of actors: a call is a task record that goes into the mailbox of one actor.

Straight from the caller to the actor's process: nobody is between. Commit point: the store of READY, after the call
was pushed. Then the caller looks whether the actor is dead by now; if so, and nobody else has done it, the call is the
caller's to end. What a call needs is counted until it ends, as with any task; the actor itself is not: when its last
handle goes, it still takes the calls that were made before.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.mailbox cimport mailbox_push, mailbox_wake
from fastrt._core.objects.objects cimport object_is_sealed
from fastrt._core.objects.references cimport links_count, task_is_mine
from fastrt._core.objects.scalar cimport args_write
from fastrt._core.tasks.records cimport task_announce, task_fill, task_forget, task_is_cancelled, task_slots
from fastrt._core.tasks.tasks cimport ARGS_SCALARS
from fastrt.errors import FastrtError

cdef enum:
    SCALAR_ROOM = 2048  # larger argument tuples go through the store's serializer


class CallOfDead(Exception):
    """The actor is dead, and the call is this client's to end: (task, its results as the call returns them)."""


cdef frt_actor *actor_of(Client client, Ref ref) except NULL:
    """The actor that lives as long as the object of a reference."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t a
    ref_use(client, ref)
    a = x.entries[ref.index].actor - 1
    if not x.entries[ref.index].flags & FRT_ENTRY_ACTOR or a >= frt_actors(x):
        raise FastrtError(f"{ref!r} is no actor's")
    return x.actors + a


cdef int _commit(frt_ctx *x, frt_actor *actor, uint32_t t, uint32_t ndeps) noexcept nogil:
    """Make a filled record a call of the actor: FRT_OK; FRT_CLOSED when it is this client's to end."""
    cdef frt_task *task = x.tasks + t
    cdef uint32_t gen = frt_word_gen(x.task_words[t])
    cdef int rc
    if task.nrefs:
        rc = links_count(x, task_slots(x, t) + task.nreturns, task.nrefs, &task.flags, FRT_TASK_COUNTED)
        if rc != FRT_OK:
            task_forget(x, t)
            return rc
    task_announce(x, t)
    task.ndeps = ndeps
    mailbox_push(x, actor, t)
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, gen))  # commit
    # The daemon stores DEAD and then looks for READY calls; we do it the other way round.
    if frt_word_state(a64_load_sc(&actor.word)) == FRT_ACTOR_DEAD:
        if a64_cas_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, gen), frt_word(FRT_TASK_ENDING, x.me, gen)):
            return FRT_CLOSED
        return FRT_OK
    mailbox_wake(x, actor)
    return FRT_OK


cdef object call_make(Client client, Ref ref, uint32_t method, uint16_t kind, const char *args, uint32_t nbytes,
                      list refs, uint32_t ndeps, uint32_t nreturns, uint8_t retries, uint8_t flags):
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor
    cdef frt_refslot *slots
    cdef uint32_t t, k
    cdef int rc
    cdef object made
    client.ensure()
    actor = actor_of(client, ref)
    t = task_fill(client, actor.function, method, kind, args, nbytes, refs, nreturns, retries, flags)
    x.tasks[t].caller = <uint16_t>x.me
    a32_store_rel(&x.tasks[t].actor, <uint32_t>(actor - x.actors) + 1)
    slots = task_slots(x, t)
    # The results' indexes are read before the commit: a fast actor may end the call before we look again.
    if nreturns == 1:
        k = slots[0].index
        rc = _commit(x, actor, t, ndeps)
        if rc != FRT_OK and rc != FRT_CLOSED:
            check(rc)
        made = ref_wrap(client, k)
    else:
        indexes = [slots[k].index for k in range(nreturns)]
        rc = _commit(x, actor, t, ndeps)
        if rc != FRT_OK and rc != FRT_CLOSED:
            check(rc)
        made = [ref_wrap(client, k) for k in indexes]
    if rc == FRT_CLOSED:
        raise CallOfDead(t, made)
    return made


def call_scalars(Client client, Ref actor, uint32_t method, tuple args, uint32_t nreturns, uint8_t retries):
    """Call a method whose arguments are scalars and references, the common case.

    Args:
        actor: reference to the actor's object.
        method: its number.
        args: positional arguments; references among them are resolved before the method runs.
        nreturns: number of results; 1 gives one Ref, anything else a list.
        retries: runs allowed beyond the first; 255: any number.
    Returns:
        The result's Ref or a list of them; None when an argument is of another kind (nothing happened).
    Raises:
        CallOfDead: the actor is dead; seal the results with an error and finish the task.
        ObjectStoreFullError: no room for the call or its results.
        StaleReferenceError: a reference of an ended session.
    """
    cdef char room[SCALAR_ROOM]
    cdef list refs = []
    cdef Py_ssize_t n = args_write(args, Ref, room, SCALAR_ROOM, refs)
    if n < 0:
        return None
    return call_make(client, actor, method, ARGS_SCALARS, room, <uint32_t>n, refs, <uint32_t>len(refs), nreturns,
                     retries, 0)


def call(Client client, Ref actor, uint32_t method, uint16_t kind, bytes args, list refs, uint32_t ndeps,
         uint32_t nreturns, uint8_t retries):
    """Call a method with serialized arguments.

    Args:
        actor, method, nreturns, retries: as for `call_scalars`.
        kind, args, refs, ndeps: as for `tasks.submit`.
    Returns:
        The result's Ref or a list of them.
    Raises:
        CallOfDead, ObjectStoreFullError, StaleReferenceError: as for `call_scalars`.
    """
    if ndeps > len(refs):
        raise ValueError(f"{ndeps} dependencies among {len(refs)} references")
    if len(args) >= 1 << 32:
        raise ValueError(f"the arguments have {len(args)} bytes; put large ones first and pass their references")
    return call_make(client, actor, method, kind, args, <uint32_t>len(args), refs, ndeps, nreturns, retries, 0)


def put_back(Client client, uint32_t t, bint ran):
    """Leave a call that this client had claimed to the next process of its actor.

    Args:
        ran: whether it was begun; one that was not is no attempt.
    Returns:
        False when its attempts are used up or it was cancelled: it is this client's to end.
    Raises:
        FastrtError: it is not this client's.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_task *task
    cdef uint32_t a
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    task = x.tasks + t
    a = task.actor - 1
    if a >= frt_actors(x):
        raise FastrtError(f"task {t} is no call of an actor")
    if task_is_cancelled(x, t) or ran and task.attempts > task.retries:
        return False
    if not ran and task.attempts:
        task.attempts -= 1
    if x.clients[x.me].task == t + 1:
        x.clients[x.me].task = 0
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, frt_word_gen(x.task_words[t])))  # commit
    a32_store_sc(&x.actors[a].rescan, 1)
    return True


def is_call(Client client, Ref ref):
    """Whether the value of `ref` is still to come, from a call of an actor."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    client.ensure()
    ref_use(client, ref)
    t = a32_load_rlx(&x.entries[ref.index].task)
    return not object_is_sealed(x, ref.index) and 0 < t <= frt_tasks(x) and x.tasks[t - 1].actor != 0
