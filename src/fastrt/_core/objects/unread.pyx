# cython: language_level=3, freethreading_compatible=True
"""Unread errors: mark them as read, and report those that a leaving client still holds."""
from libc.stdint cimport uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_use
from fastrt._core.objects.unread_list cimport unread_keep, unread_read


def keep_held(Client client):
    """Add the unread errors that this client holds to the report, because it is about to leave."""
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef uint32_t i
    client.ensure()
    frt_threads_take(x)
    for i in range(frt_objects(x)):
        entry = x.entries + i
        if x.refs_held[i] and entry.flags & (FRT_ENTRY_ERROR | FRT_ENTRY_ACTOR) and \
                frt_word_state(a64_load_acq(frt_state(x, i))) == FRT_OBJ_SEALED:
            unread_keep(x, i)
            unread_read(x, i)
    frt_threads_give(x)


def mark(Client client, refs):
    """Mark objects as read: errors, results that may become errors, actors whose constructor raised."""
    cdef Ref ref
    client.ensure()
    for ref in refs:
        ref_use(client, ref)
        unread_read(&client.x, ref.index)
