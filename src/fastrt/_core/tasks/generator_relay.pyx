# cython: language_level=3, freethreading_compatible=True
"""Generators between nodes: read streams for readers on another node, and fill streams with another node's items."""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.objects cimport object_acquire
from fastrt._core.objects.references cimport links_add_item
from fastrt._core.tasks.generators cimport Producer, generator_stream, generator_tell
from fastrt._core.tasks.generators import ELSEWHERE as _elsewhere, is_ready, take

cdef uint32_t _ELSEWHERE = _elsewhere


def pass_on(Client client, Ref stream, Ref end):
    """Take an item, without waiting, for readers on another node. To the task it counts as unread."""
    cdef frt_stream *s = generator_stream(client, stream)
    cdef object found
    a32_store_sc(&s.away, s.away + 1)  # first: the task must not see it read
    found = take(client, stream, end, 0, 0.0)
    if found is False or found is None or found is end:
        a32_store_sc(&s.away, s.away - 1)
    return found


def note_readers(Client client, Ref stream, uint32_t away, uint32_t wanted):
    """Note the state of the readers on another node, for which this process takes the items.

    Args:
        away: how many of the taken items they have not read.
        wanted: by them: NOTHING, END or ITEMS.
    """
    cdef frt_stream *s = generator_stream(client, stream)
    a32_store_sc(&s.away, away)
    a32_store_sc(&s.elsewhere, wanted + 1)
    generator_tell(&client.x, stream.index)


def end_of(Client client, Ref stream):
    """Return a reference to the end of a stream; None when its task has ended, or is another node's."""
    cdef frt_ctx *x = &client.x
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t t
    generator_stream(client, stream)
    for t in range(frt_tasks(x)):
        if frt_word_state(a64_load_acq(x.task_words + t)) <= FRT_TASK_RESERVED or \
                not x.tasks[t].flags & FRT_TASK_STREAM or not frt_task_body(x, t, &body) or \
                body.nrefs == 0 or body.nreturns == 0 or body.refs[body.nrefs - 1].objref != stream.objref:
            continue
        slot = body.results[0]
        if slot.index < frt_objects(x) and object_acquire(x, slot.index, slot.objref, False) == FRT_OK:
            return ref_wrap(client, slot.index)
    return None


def add_to(Client client, Ref stream, Ref item):
    """Add an item that another node has produced."""
    generator_stream(client, stream)
    ref_use(client, item)
    check(links_add_item(&client.x, stream.index, item.index))
    generator_tell(&client.x, stream.index)


def close(Client client, Ref stream):
    """Close a stream of another node's: its last item has been added."""
    a32_store_sc(&generator_stream(client, stream).limit, 0)
    generator_tell(&client.x, stream.index)


def mirrors(Client client):
    """List the streams on this node that are filled with another node's items and are not closed: a list of Refs."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t i
    cdef uint64_t objref
    client.ensure()
    found = []
    for i in range(frt_objects(x)):
        objref = a64_load_rlx(&x.entries[i].objref)
        if frt_word_state(a64_load_acq(frt_state(x, i))) <= FRT_OBJ_PENDING or \
                not x.entries[i].flags & FRT_ENTRY_STREAM or frt_stream_of(x, i).limit != _ELSEWHERE:
            continue
        if object_acquire(x, i, objref, False) == FRT_OK:
            found.append(ref_wrap(client, i))
    return found


def is_awaited(Client client, Ref stream):
    """Return whether a reader has found no item, and was not woken since."""
    generator_stream(client, stream)
    return frt_any(&client.x, stream.index, FRT_WAITS)


def arm_items(Client client, Ref stream, Ref end):
    """Make the next item of a stream, or its end, wake this client; return whether `take` has something already."""
    cdef frt_ctx *x = &client.x
    generator_stream(client, stream)
    ref_use(client, end)
    a64_or_sc(frt_mine(x, stream.index, FRT_WAITS), x.me_bit)
    a64_or_sc(frt_mine(x, end.index, FRT_WAITS), x.me_bit)
    return is_ready(client, stream, end)


def arm_taken(Client client, Ref stream, uint32_t taken):
    """Have the next reader of a stream wake this client; whether more items than `taken` have been taken already."""
    generator_stream(client, stream)
    a64_or_sc(frt_mine(&client.x, stream.index, FRT_WAITS), client.x.me_bit)
    return <uint32_t>(a64_load_sc(&generator_stream(client, stream).head) >> 32) != taken


def arm_produced(Client client, Producer producer, uint32_t taken):
    """The same for the stream that a task fills which this client has claimed."""
    client.ensure()
    a64_or_sc(frt_mine(&client.x, producer.index, FRT_WAITS), client.x.me_bit)
    return <uint32_t>(a64_load_sc(&producer.stream.head) >> 32) != taken
