# cython: language_level=3, freethreading_compatible=True
"""The mailbox of an actor: a list of its calls, newest first, to which any caller pushes by one swap.

As in the ready queue, the list holds hints and the task words decide. The links lie in the task records, so a push
takes no lock and cannot fail. A call is pushed while its record is RESERVED by the caller, and becomes READY
afterwards: no other process can end and reuse the record before it is linked. Only the actor's process takes calls,
and always all of them, so a successful swap has linked to the call that is the newest at that moment.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport client_wake
from fastrt._core.memory.layout cimport *


cdef void mailbox_push(frt_ctx *x, frt_actor *actor, uint32_t t) noexcept nogil:
    """Push a call whose record is RESERVED(me)."""
    cdef uint64_t cell = <uint64_t>frt_word_gen(a64_load_rlx(x.task_words + t)) << 32 | (t + 1)
    cdef uint64_t before
    while True:
        before = a64_load_sc(&actor.mailbox)
        a32_store_rlx(&x.tasks[t].waiter, <uint32_t>before)
        a32_store_rlx(&x.tasks[t].dep, <uint32_t>(before >> 32))
        if a64_cas_sc(&actor.mailbox, before, cell):  # commits the hint; the call is committed by its word
            return


cdef void mailbox_wake(frt_ctx *x, frt_actor *actor) noexcept nogil:
    """Wake the actor's process if it sleeps: there is news for it."""
    cdef uint32_t w
    if a32_load_sc(&actor.asleep):
        w = frt_word_client(a64_load_sc(&actor.word))
        if w < frt_clients(x):
            client_wake(x, w)


cdef uint64_t mailbox_take(frt_actor *actor) noexcept nogil:
    """Take all calls: the cell of the newest, to which the others are linked; 0 when there is none."""
    return a64_and_sc(&actor.mailbox, 0) if a64_load_sc(&actor.mailbox) else 0


cdef uint64_t mailbox_before(frt_ctx *x, uint64_t cell) noexcept nogil:
    """The cell of the previous call, from a call's record; valid if the call's word still has its generation after."""
    cdef uint32_t t = <uint32_t>cell - 1
    cdef uint64_t before = a32_load_acq(&x.tasks[t].waiter)
    return <uint64_t>a32_load_acq(&x.tasks[t].dep) << 32 | before


cdef void mailbox_release(frt_ctx *x, uint32_t i) noexcept nogil:
    """Notify an actor that its object, entry i, is about to be freed. Safe to repeat."""
    cdef uint32_t a = x.entries[i].actor - 1
    cdef frt_actor *actor = x.actors + a
    if a < FRT_ACTORS and actor.objref == a64_load_rlx(&x.entries[i].objref):
        a32_store_sc(&actor.released, 1)
        mailbox_wake(x, actor)
        mailbox_forget(actor)


cdef void mailbox_forget(frt_actor *actor) noexcept nogil:
    """Free the record of an actor that is DEAD, swept and without a handle; otherwise do nothing."""
    cdef uint64_t word
    if a32_load_sc(&actor.swept) and a32_load_sc(&actor.released):
        word = a64_load_sc(&actor.word)
        if frt_word_state(word) == FRT_ACTOR_DEAD:
            a64_cas_sc(&actor.word, word, frt_word(FRT_ACTOR_EMPTY, 0, frt_word_gen(word) + 1))
