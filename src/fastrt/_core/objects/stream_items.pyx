# cython: language_level=3, freethreading_compatible=True
"""The list of a stream's unread items; see frt_stream. All functions run under the links lock.

One store commits each change. The other fields (counts, `last`, `produced`) change before it or are derived from the
list: `stream_rebuild` restores them after a death inside the lock.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport *


cdef int stream_push(frt_ctx *x, uint32_t s, uint32_t i) noexcept nogil:
    """Append entry i: FRT_OK or FRT_CORRUPT.

    The entry is written and RESERVED by this client, or sealed and held by it. A RESERVED entry is sealed here, and the
    list is its only holder.
    """
    cdef frt_stream *stream = frt_stream_of(x, s)
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t head = a64_load_rlx(&stream.head)
    cdef uint32_t last = stream.last
    if <uint32_t>head and (last == 0 or last > x.objects_max):
        return frt_broken(x, "the list of a stream's items has no end")
    a32_add_sc(&x.entries[i].counted, 1)
    a32_store_rlx(&x.entries[i].next, 0)
    if frt_word_state(a64_load_rlx(state)) == FRT_OBJ_RESERVED:
        # If this process dies between here and the commit, the entry has no holder, and recovery deletes it.
        a64_store_rel(state, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(a64_load_rlx(state))))
    if <uint32_t>head:
        a32_store_rel(&x.entries[last - 1].next, i + 1)  # commit
    else:
        a64_store_sc(&stream.head, head | (i + 1))  # commit; waiters are read after it, readers set their bit before
    stream.last = i + 1
    stream.produced += 1
    return FRT_OK


cdef int stream_pop(frt_ctx *x, uint32_t s, uint64_t head) noexcept nogil:
    """Take the first item, which the caller holds, off the list: FRT_OK; FRT_NOT_FOUND if `head` is out of date."""
    cdef frt_stream *stream = frt_stream_of(x, s)
    cdef uint32_t i = <uint32_t>head - 1
    cdef uint32_t after
    if a64_load_rlx(&stream.head) != head or i >= x.objects_max:
        return FRT_NOT_FOUND
    after = a32_load_rlx(&x.entries[i].next)
    a64_store_sc(&stream.head, ((head >> 32) + 1) << 32 | after)  # commit
    if after == 0:
        stream.last = 0
    a32_sub_sc(&x.entries[i].counted, 1)
    return FRT_OK


cdef int stream_rebuild(frt_ctx *x, uint32_t s) noexcept nogil:
    """Count the items and derive the other fields from the list; FRT_CORRUPT if the list is damaged."""
    cdef frt_stream *stream = frt_stream_of(x, s)
    cdef uint64_t head = a64_load_acq(&stream.head)
    cdef uint32_t item = <uint32_t>head
    cdef uint32_t there = 0
    stream.last = 0
    while item:
        if item > x.objects_max or there == x.objects_max:
            return frt_broken(x, "the list of a stream's items is damaged")
        there += 1
        a32_add_sc(&x.entries[item - 1].counted, 1)
        stream.last = item
        item = a32_load_rlx(&x.entries[item - 1].next)
    # `produced` may be wrong by the one item that was being added.
    stream.produced += <uint64_t><int32_t>(<uint32_t>(head >> 32) + there - <uint32_t>stream.produced)
    return FRT_OK
