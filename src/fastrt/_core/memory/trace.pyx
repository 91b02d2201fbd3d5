# cython: language_level=3
"""Per-client trace rings of timed actions. A ring has one writer and no lock; any process reads it at any time.

A ring has room for the last 16,384 records. The writer fills a record and then stores the count; the end of an action
is stored into its record later. A reader copies the records, reads the count again, and drops those that may have been
overwritten meanwhile. A death loses at most the record that is being written; the action under way has no end.
Recording is on from a session's start (`trace`) or from a call of `switch`: then a record costs one or two readings of
the clock.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client, clients_ever
from fastrt._core.memory.layout cimport *

PROCESS, TASK, SUBMIT, PUT, GET = (
    FRT_TRACE_PROCESS, FRT_TRACE_TASK, FRT_TRACE_SUBMIT, FRT_TRACE_PUT, FRT_TRACE_GET)
WAIT, SPILL, RESTORE, FETCH = FRT_TRACE_WAIT, FRT_TRACE_SPILL, FRT_TRACE_RESTORE, FRT_TRACE_FETCH
RECORDS = FRT_TRACE_RECORDS


def enabled(Client client):
    """Whether this session records."""
    client.ensure()
    return client.x.sb.trace_on != 0


def switch(Client client, bint on):
    """Turn recording on or off for all processes of the session."""
    client.ensure()
    a32_store_rel(&client.x.sb.trace_on, client.x.sb.trace_clock if on else 0)


def kib(nbytes):
    """A value's size in the unit of the records: KiB, rounded up."""
    return min((nbytes + 1023) >> 10, 0xffffffff)


def now():
    """The monotonic clock in nanoseconds, as in the rows that `drain` returns."""
    return frt_now_ns()


def begin(Client client, uint32_t kind, uint64_t id, uint32_t what=0, uint32_t actor=0):
    """Begin the record of an action.

    Args:
        client: this process's client.
        kind: one of the constants above.
        id, what, actor: as for `frt_trace_record`.
    Returns:
        The number to pass to `end`; 0 when the session does not record.
    """
    client.ensure()
    return frt_trace_begin(&client.x, kind, id, what, actor)


def begin_task(Client client, uint32_t t):
    """Begin the record of a task or call that this client has claimed; returns as `begin`."""
    cdef frt_task *task
    client.ensure()
    if client.x.sb.trace_on == 0 or t >= frt_tasks(&client.x):
        return 0
    task = client.x.tasks + t
    return frt_trace_begin(&client.x, FRT_TRACE_TASK, task.id, task.function_index, task.actor)


def end(Client client, uint64_t number):
    """Store the end of the action whose number `begin` returned; does nothing once the client is closed."""
    if number and client.usable() and number <= client.x.traces[client.x.me].count:
        frt_trace_end(&client.x, number)


def record(Client client, uint32_t kind, uint64_t id, uint32_t what=0, uint32_t actor=0):
    """Record an event without a duration; does nothing when the session does not record."""
    client.ensure()
    frt_trace_point(&client.x, kind, id, what, actor)


def drain(Client client, uint32_t of, uint64_t since=0):
    """The records of client `of` from number `since` on, oldest first.

    Returns:
        (records, next): tuples (number, start ns, end ns, kind, id, what, actor), and `since` for the next call. The
        end is 0 while the action lasts. Records that were overwritten before they could be read are missing.
    """
    cdef frt_trace_ring *ring
    cdef frt_trace_record *r
    cdef frt_superblock *sb = client.x.sb
    cdef uint64_t first, end, k
    cdef int64_t ticks, ns, finished
    cdef double pace
    client.ensure()
    if of >= clients_ever(&client.x):
        return [], since
    ring = client.x.traces + of
    end = a64_load_acq(&ring.count)
    first = end - FRT_TRACE_RECORDS if end > FRT_TRACE_RECORDS else 0
    first = since if first < since < end else (end if since >= end else first)
    rows = []
    # Two moments are known by both clocks, the session's start and now; all records lie between them.
    ticks, ns = frt_trace_ticks(sb.trace_clock), frt_now_ns()
    pace = <double>(ns - sb.trace_ns) / <double>(ticks - sb.trace_ticks) if ticks > sb.trace_ticks else 1.0
    for k in range(first, end):
        r = ring.records + k % FRT_TRACE_RECORDS
        finished = r.end
        rows.append((k, ns + <int64_t>(<double>(r.start - ticks) * pace),
                     ns + <int64_t>(<double>(finished - ticks) * pace) if finished else 0,
                     r.kind, r.id, r.what, r.actor))
    # The writer may have gone round the ring during the copy: drop the rows that it may have overwritten.
    a_fence_sc()
    overwritten = a64_load_acq(&ring.count) + 1
    if overwritten > first + FRT_TRACE_RECORDS:
        rows = rows[overwritten - FRT_TRACE_RECORDS - first:]
    return rows, end


def copied(Client client, uint32_t of, uint64_t since=0):
    """The records of client `of` from number `since` on as they are in memory, for many records: see `drain`.

    Returns:
        (first, data, next, clock): the number of the first record, the records' bytes (start, end, id as 8 bytes, what
        as 4, kind and actor as 2), `since` for the next call, and (ticks, ns, pace): a time t of a record is
        ns + (t - ticks) * pace nanoseconds of the monotonic clock.
    """
    cdef frt_trace_ring *ring
    cdef frt_superblock *sb = client.x.sb
    cdef uint64_t first, end, k, n, tail
    cdef int64_t ticks, ns
    cdef double pace
    cdef size_t size = sizeof(frt_trace_record)
    client.ensure()
    ticks, ns = frt_trace_ticks(sb.trace_clock), frt_now_ns()
    pace = <double>(ns - sb.trace_ns) / <double>(ticks - sb.trace_ticks) if ticks > sb.trace_ticks else 1.0
    clock = ticks, ns, pace
    if of >= clients_ever(&client.x):
        return since, b"", since, clock
    ring = client.x.traces + of
    end = a64_load_acq(&ring.count)
    first = end - FRT_TRACE_RECORDS if end > FRT_TRACE_RECORDS else 0
    first = since if first < since < end else (end if since >= end else first)
    n = end - first
    k = first % FRT_TRACE_RECORDS
    tail = n if k + n <= FRT_TRACE_RECORDS else FRT_TRACE_RECORDS - k
    data = (<char *>(ring.records + k))[:tail * size] + (<char *>ring.records)[:(n - tail) * size]
    # As in `drain`.
    a_fence_sc()
    overwritten = a64_load_acq(&ring.count) + 1
    if overwritten > first + FRT_TRACE_RECORDS:
        k = min(overwritten - FRT_TRACE_RECORDS - first, n)
        first, data = first + k, data[k * size:]
    return first, data, end, clock
