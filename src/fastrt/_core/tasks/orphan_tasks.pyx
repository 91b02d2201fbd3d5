# cython: language_level=3, freethreading_compatible=True
"""Tasks whose process was killed: recovery marks them, and the daemon ends those to whose results nothing refers.

    submitter: a driver, a worker or an actor's process -> ORPHAN, when recovery finds it dead; -> 0, if it had departed

An orphan goes on while any process has a reference to a result of it, so the daemon looks again until none is left. A
call of an actor goes on while the actor has a handle, too: other calls may rely on what it does there.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.references cimport links_unheld
from fastrt._core.tasks.records cimport task_is_cancelled
from fastrt._core.tasks.tasks import children
from fastrt._core.tasks.unheld_actors cimport actor_unheld


cdef void orphans_mark(frt_ctx *x, uint32_t v) noexcept nogil:
    """Mark the tasks that the dead client v has submitted. Safe to repeat.

    A record that is used for another client's task meanwhile is left alone, because the swap fails. Tools are never
    said to be killed: a child that a task has forked ends without a word.
    """
    cdef uint32_t t, mark = FRT_ORPHAN, kind = x.clients[v].kind
    if a32_load_acq(&x.clients[v].departed) or kind not in (FRT_KIND_DRIVER, FRT_KIND_WORKER, FRT_KIND_ACTOR):
        mark = 0
    for t in range(frt_tasks(x)):
        if frt_word_state(a64_load_acq(x.task_words + t)) > FRT_TASK_RESERVED and \
                a32_load_acq(&x.tasks[t].submitter) == v + 1:
            a32_cas_sc(&x.tasks[t].submitter, v + 1, mark)


cdef bint _is_orphan(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return whether a task is an orphan that may have to be ended. A promise, which has no function, is none."""
    cdef int state = frt_word_state(a64_load_acq(x.task_words + t))
    return FRT_TASK_WAITING <= state <= FRT_TASK_BLOCKED and a32_load_acq(&x.tasks[t].submitter) == FRT_ORPHAN and \
        x.tasks[t].function != 0 and not task_is_cancelled(x, t)


cdef bint _is_unused(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return whether nothing refers to a result of a task, and no reader is left if it is a generator."""
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t k, actor = x.tasks[t].actor
    if actor and (actor > frt_actors(x) or not actor_unheld(x, actor - 1)):
        return False
    if not frt_task_body(x, t, &body):
        return False
    for k in range(body.nreturns):
        slot = body.results[k]
        if not links_unheld(x, &slot, 0):
            return False
    if x.tasks[t].flags & FRT_TASK_STREAM and body.nrefs:
        slot = body.refs[body.nrefs - 1]
        return links_unheld(x, &slot, 1)
    return True


def orphans(Client client):
    """Find the tasks whose process was killed.

    Returns:
        (index, id) of those to whose results nothing refers, and whether there are others.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t id, word
    cdef uint32_t t
    cdef bint is_unused, has_others = False
    cdef list found = []
    client.ensure()
    for t in range(frt_tasks(x)):
        word = a64_load_acq(x.task_words + t)
        if not _is_orphan(x, t):
            continue
        id, is_unused = a64_load_acq(&x.tasks[t].id), _is_unused(x, t)
        # The record was the task's all the time if its generation is still the same.
        if is_unused and frt_word_gen(a64_load_acq(x.task_words + t)) == frt_word_gen(word):
            found.append((t, id))
        else:
            has_others = True
    return found, has_others


def orphan_children(Client client, uint32_t t, uint64_t id):
    """Mark what a running task has submitted as orphans, because it is cancelled.

    The process says whose they are: another attempt of the same task has children with the same paths.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t job, path, word
    cdef uint32_t c
    client.ensure()
    if t >= frt_tasks(x):
        return
    word = a64_load_acq(x.task_words + t)
    job, path = x.tasks[t].job, x.tasks[t].path
    if a64_load_acq(&x.tasks[t].id) == id and FRT_TASK_CLAIMED <= frt_word_state(word) <= FRT_TASK_BLOCKED:
        for c, _, _, _ in children(client, job, path):
            a32_cas_sc(&x.tasks[c].submitter, frt_word_client(word) + 1, FRT_ORPHAN)
