# cython: language_level=3, freethreading_compatible=True
"""Actors without a handle that have not started: the record of one keeps its object until then, so the daemon looks."""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.objects cimport object_acquire, object_release
from fastrt._core.objects.references cimport links_count, links_unheld
from fastrt._core.tasks.actors cimport actor_object, actor_uncount


cdef bint actor_unheld(frt_ctx *x, uint32_t a) noexcept nogil:
    """Return whether an actor has no handle, so that nothing can call it any more."""
    cdef frt_actor *actor = x.actors + a
    cdef frt_refslot slot = actor_object(actor)
    if a32_load_sc(&actor.released):
        return True
    return not actor.flags & FRT_ACTOR_DETACHED and \
        links_unheld(x, &slot, 1 if actor.flags & FRT_ACTOR_COUNTED else 0)


def let_go_unheld(Client client, dict some):
    """Drop the counts of the objects of actors that are WANTED and have no handle and no call: they are not started.

    A call that was made before the last handle went is in the table by then, so its actor is left alone.

    Args:
        some: generations by index of the actors to look at, which have no process that is about to join; None: that of
            the caller's last look, after which only the caller may have changed it.
    Returns:
        Indexes of those whose objects are gone: the caller ends them.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor
    cdef uint64_t word
    cdef uint32_t a, t
    cdef int state
    cdef set unheld = set()
    cdef object gen
    client.ensure()
    for a, gen in some.items():
        if a >= frt_actors(x):
            continue
        actor = x.actors + a
        word = a64_load_sc(&actor.word)
        if frt_word_state(word) == FRT_ACTOR_WANTED and (gen is None or gen == frt_word_gen(word)) and \
                not a32_load_sc(&actor.released) and actor_unheld(x, a):
            unheld.add(a)
    for t in range(frt_tasks(x) if unheld else 0):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state > FRT_TASK_RESERVED and state != FRT_TASK_ENDING and x.tasks[t].actor:
            unheld.discard(x.tasks[t].actor - 1)
    for a in unheld:
        check(actor_uncount(x, x.actors + a))
        _count_again(client, x.actors + a)
    return [a for a in unheld if a32_load_sc(&x.actors[a].released)]


cdef int _count_again(Client client, frt_actor *actor) except -1:
    """Count an actor's object again if it exists still: the actor was found by its name meanwhile."""
    cdef frt_refslot slot = actor_object(actor)
    cdef int rc
    if not a32_load_sc(&actor.released) and slot.index < client.x.objects_max and \
            object_acquire(&client.x, slot.index, slot.objref, False) == FRT_OK:
        rc = links_count(&client.x, &slot, 1, &actor.flags, FRT_ACTOR_COUNTED)
        object_release(&client.x, slot.index, False)
        check(rc)
    return 0
