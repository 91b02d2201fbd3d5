# cython: language_level=3, freethreading_compatible=True
"""Calls of actors: records of tasks that name an actor. `submission` makes them, `inbox` claims them in the actor."""
from libc.stdint cimport uint32_t

from fastrt._core.memory.clients cimport Client, client_stops
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_use
from fastrt._core.objects.objects cimport object_is_sealed
from fastrt._core.objects.references cimport task_is_mine
from fastrt._core.tasks.records cimport task_is_cancelled
from fastrt.errors import FastrtError

cdef frt_actor *actor_of(Client client, Ref ref) except NULL:
    """Return the actor that lives as long as the object of a reference."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t a
    ref_use(client, ref)
    a = x.entries[ref.index].actor - 1
    if not x.entries[ref.index].flags & FRT_ENTRY_ACTOR or a >= frt_actors(x):
        raise FastrtError(f"{ref!r} is no actor's")
    return x.actors + a


def put_back(Client client, uint32_t t, bint ran):
    """Leave a claimed call to the next process of its actor.

    Args:
        ran: whether it was begun; if not, it does not count as an attempt.
    Returns:
        False when its attempts are used up or it was cancelled: this client must end it.
    Raises:
        FastrtError: this client has not claimed it.
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
    client_stops(x, t)
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, frt_word_gen(x.task_words[t])))  # commit
    a32_store_sc(&x.actors[a].rescan, 1)
    return True


def is_call(Client client, Ref ref):
    """Return whether an actor's call makes the value of `ref`, and has not ended."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    client.ensure()
    ref_use(client, ref)
    t = a32_load_rlx(&x.entries[ref.index].task)
    return not object_is_sealed(x, ref.index) and 0 < t <= frt_tasks(x) and x.tasks[t - 1].actor != 0
