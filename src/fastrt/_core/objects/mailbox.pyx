# cython: language_level=3
"""The mailbox of an actor: a list of its calls that any caller pushes to by one swap, newest first.

It holds hints; the task records are the truth, as with the ready queue. The links lie in the records, so pushing takes
no lock and cannot fail. A call is pushed while its record is still the caller's own (RESERVED), and becomes READY
afterwards: nobody else can have ended the record and reused it before it is linked in. Only the actor's process takes
from the list, and always all of it, so a swap that succeeds has linked to what is the newest call now, whatever
happened in between.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport client_wake
from fastrt._core.memory.layout cimport *


cdef void mailbox_push(frt_ctx *x, frt_actor *actor, uint32_t t) noexcept nogil:
    """Link a call in whose record is RESERVED(me)."""
    cdef uint64_t cell = <uint64_t>frt_word_gen(a64_load_rlx(x.task_words + t)) << 32 | (t + 1)
    cdef uint64_t before
    while True:
        before = a64_load_sc(&actor.mailbox)
        a32_store_rlx(&x.tasks[t].waiter, <uint32_t>before)
        a32_store_rlx(&x.tasks[t].dep, <uint32_t>(before >> 32))
        if a64_cas_sc(&actor.mailbox, before, cell):  # commit of the hint; the call's is its word
            return


cdef void mailbox_wake(frt_ctx *x, frt_actor *actor) noexcept nogil:
    """Wake the actor's process if it sleeps: there is news for it."""
    cdef uint32_t w
    if a32_load_sc(&actor.asleep):
        w = frt_word_client(a64_load_sc(&actor.word))
        if w < frt_clients(x):
            client_wake(x, w)


cdef uint64_t mailbox_take(frt_actor *actor) noexcept nogil:
    """The newest call, with all that are linked to it; 0 when there is nothing new."""
    return a64_and_sc(&actor.mailbox, 0) if a64_load_sc(&actor.mailbox) else 0


cdef uint64_t mailbox_before(frt_ctx *x, uint64_t cell) noexcept nogil:
    """The cell that a call's record links to; it is true if the call's word still fits afterwards."""
    cdef uint32_t t = <uint32_t>cell - 1
    cdef uint64_t before = a32_load_acq(&x.tasks[t].waiter)
    return <uint64_t>a32_load_acq(&x.tasks[t].dep) << 32 | before


cdef void mailbox_release(frt_ctx *x, uint32_t i) noexcept nogil:
    """The object that an actor lives by, entry i, is about to be freed: tell the actor. Safe to repeat."""
    cdef uint32_t a = x.entries[i].actor - 1
    cdef frt_actor *actor = x.actors + a
    if a < FRT_ACTORS and actor.objref == a64_load_rlx(&x.entries[i].objref):
        a32_store_sc(&actor.released, 1)
        mailbox_wake(x, actor)
        mailbox_forget(actor)


cdef void mailbox_forget(frt_actor *actor) noexcept nogil:
    """Free the record of an actor that is dead, whose calls have been swept, and that nobody has a handle of."""
    cdef uint64_t word
    if a32_load_sc(&actor.swept) and a32_load_sc(&actor.released):
        word = a64_load_sc(&actor.word)
        if frt_word_state(word) == FRT_ACTOR_DEAD:
            a64_cas_sc(&actor.word, word, frt_word(FRT_ACTOR_EMPTY, 0, frt_word_gen(word) + 1))
