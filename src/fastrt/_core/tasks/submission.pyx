# cython: language_level=3
"""Tasks and calls that are more than the common ones: that demand something, are run by a policy, fill a stream.

What they are more is named by further refs of the record, so the common ones pay nothing for it: a record without
such refs, and without dependencies, is all that the fast path of a worker runs. A priority is a byte of the record.
"""
from libc.stdint cimport int8_t, uint8_t, uint16_t, uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_wrap
from fastrt._core.objects.objects cimport object_acquire
from fastrt._core.objects.references cimport task_is_mine
from fastrt._core.objects.scalar cimport args_write
from fastrt._core.tasks.calls cimport call_make
from fastrt._core.tasks.records cimport task_is_cancelled
from fastrt._core.tasks.tasks cimport ARGS_SCALARS, task_submit
from fastrt.errors import FastrtError

POLICY = FRT_TASK_POLICY
PRIORITY_MAX = <int>FRT_PRIORITY_MAX

cdef enum:
    SCALAR_ROOM = 2048  # larger argument tuples go through the store's serializer


cdef uint8_t _extend(list refs, Ref policy, Ref stream) except? 255:
    """Add what is no argument; the flags that say so."""
    cdef uint8_t flags = 0
    if policy is not None:
        refs.append(policy)
        flags |= FRT_TASK_POLICY
    if stream is not None:
        refs.append(stream)
        flags |= FRT_TASK_STREAM
    return flags


cdef int _check_args(bytes args, list refs, uint32_t ndeps) except -1:
    if ndeps > len(refs):
        raise ValueError(f"{ndeps} dependencies among {len(refs)} references")
    if len(args) >= 1 << 32:
        raise ValueError(f"the arguments have {len(args)} bytes; put large ones first and pass their references")
    return 0


cdef object _submit(Client client, Ref function, uint16_t kind, const char *args, uint32_t nbytes, list refs,
                    uint32_t ndeps, uint32_t nreturns, uint8_t retries, uint8_t flags, int priority, uint8_t hops):
    """As `task_submit`. The id of a task with a priority says its turn, so it is not from a range of this client's."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t next_objref = x.next_objref
    cdef uint64_t end_objref = x.end_objref
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise ValueError(f"priority is {priority}; it must be from {-PRIORITY_MAX} to {PRIORITY_MAX}")
    if priority == 0:
        return task_submit(client, function, kind, args, nbytes, refs, ndeps, nreturns, retries, flags, 0, hops)
    x.next_objref = a64_add_rlx(&x.sb.next_objref, <uint64_t>nreturns + 1)  # its results take theirs first
    x.end_objref = x.next_objref + nreturns + 1
    try:
        return task_submit(client, function, kind, args, nbytes, refs, ndeps, nreturns, retries, flags,
                           <int8_t>priority, hops)
    finally:
        x.next_objref, x.end_objref = next_objref, end_objref


def submit_scalars(Client client, Ref function, tuple args, uint32_t nreturns, uint8_t retries, uint8_t flags,
                   Ref demand=None, Ref policy=None, Ref stream=None, int priority=0):
    """As `tasks.submit_scalars`.

    Args:
        demand: names the sealed object that says what the task demands; see `demands`.
        policy: names the sealed object that says how it is run, for whoever runs it.
        stream: where what the function yields goes to; see `generators`.
        priority: the higher, the sooner it is run once it is ready; from -PRIORITY_MAX to PRIORITY_MAX.
    """
    cdef char room[SCALAR_ROOM]
    cdef list refs = []
    cdef uint32_t ndeps
    cdef Py_ssize_t n = args_write(args, Ref, room, SCALAR_ROOM, refs)
    if n < 0:
        return None
    client.ensure()
    flags &= FRT_TASK_RETRY_ERRORS
    if demand is not None:
        refs.append(demand)
        flags |= FRT_TASK_DEMAND
    ndeps = <uint32_t>len(refs)
    flags |= _extend(refs, policy, stream)
    return _submit(client, function, ARGS_SCALARS, room, <uint32_t>n, refs, ndeps, nreturns, retries, flags, priority,
                   0)


def submit(Client client, Ref function, uint16_t kind, bytes args, list refs, uint32_t ndeps, uint32_t nreturns,
           uint8_t retries, uint8_t flags, Ref demand=None, Ref policy=None, Ref stream=None, int priority=0,
           uint8_t hops=0):
    """As `tasks.submit`, with what `submit_scalars` takes; and `hops`: how often nodes have lent it before."""
    client.ensure()
    _check_args(args, refs, ndeps)
    flags &= FRT_TASK_RETRY_ERRORS
    refs = refs[:]
    if demand is not None:
        refs.insert(ndeps, demand)
        ndeps += 1
        flags |= FRT_TASK_DEMAND
    flags |= _extend(refs, policy, stream)
    return _submit(client, function, kind, args, <uint32_t>len(args), refs, ndeps, nreturns, retries, flags, priority,
                   hops)


def call_scalars(Client client, Ref actor, uint32_t method, tuple args, uint32_t nreturns, uint8_t retries,
                 uint8_t flags, Ref policy=None, Ref stream=None):
    """As `calls.call_scalars`, with what `submit_scalars` takes."""
    cdef char room[SCALAR_ROOM]
    cdef list refs = []
    cdef uint32_t ndeps
    cdef Py_ssize_t n = args_write(args, Ref, room, SCALAR_ROOM, refs)
    if n < 0:
        return None
    ndeps = <uint32_t>len(refs)
    flags = flags & FRT_TASK_RETRY_ERRORS | _extend(refs, policy, stream)
    return call_make(client, actor, method, ARGS_SCALARS, room, <uint32_t>n, refs, ndeps, nreturns, retries, flags)


def call(Client client, Ref actor, uint32_t method, uint16_t kind, bytes args, list refs, uint32_t ndeps,
         uint32_t nreturns, uint8_t retries, uint8_t flags, Ref policy=None, Ref stream=None):
    """As `calls.call`, with what `submit_scalars` takes."""
    _check_args(args, refs, ndeps)
    refs = refs[:]
    flags = flags & FRT_TASK_RETRY_ERRORS | _extend(refs, policy, stream)
    return call_make(client, actor, method, kind, args, <uint32_t>len(args), refs, ndeps, nreturns, retries, flags)


def flags_of(Client client, uint32_t t):
    """Flags of a task that this client has claimed: POLICY, DEMAND and `generators.STREAM`; 0 for a common task."""
    client.ensure()
    if not task_is_mine(&client.x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    return client.x.tasks[t].flags & (FRT_TASK_POLICY | FRT_TASK_STREAM | FRT_TASK_DEMAND)


def again(Client client, uint32_t t):
    """Begin another attempt of a task that this client runs, here and now; False if it has none left, or must end."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run")
    if x.tasks[t].attempts > x.tasks[t].retries or task_is_cancelled(x, t):
        return False
    if x.tasks[t].attempts < 255:
        x.tasks[t].attempts += 1
    return True


def park(Client client, uint32_t t):
    """Keep a task whose attempt has failed, until it is queued by `tasks.retry`; if this client dies, it is at once.

    What it demands stays its own meanwhile.
    """
    cdef frt_ctx *x = &client.x
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run")
    if x.clients[x.me].task == t + 1:
        x.clients[x.me].task = 0
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(x.task_words[t])))


def policy_of(Client client, uint32_t t):
    """A reference to the object that says how a task that this client has claimed is run; None when it has none."""
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
