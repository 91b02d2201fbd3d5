# cython: language_level=3
"""Per-client rings of what happened when: one writer, no lock, read by anybody at any time.

A ring has room for the last 16,384 records. The writer fills a record and then stores the count; the end of what takes
time is stored into it later. A reader copies, reads the count again, and drops what may have been overwritten
meanwhile. A death leaves at most one record unwritten, and without an end what was under way. Recording is on from a
session's start (`trace`) or from when somebody switches it on: then a record costs one or two readings of the clock.
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
    """Have all processes of the session record from now on, or not any more."""
    client.ensure()
    a32_store_rel(&client.x.sb.trace_on, client.x.sb.trace_clock if on else 0)


def kib(nbytes):
    """The size of a value as records have it: in KiB, rounded up."""
    return min((nbytes + 1023) >> 10, 0xffffffff)


def now():
    """The monotonic clock, in nanoseconds: that of the rows that `drain` returns."""
    return frt_now_ns()


def begin(Client client, uint32_t kind, uint64_t id, uint32_t what=0, uint32_t actor=0):
    """Write down that something begins.

    Args:
        client: this process's.
        kind: one of the constants above.
        id, what, actor: as for `frt_trace_record`.
    Returns:
        What to give to `end`; 0 when the session does not record.
    """
    client.ensure()
    return frt_trace_begin(&client.x, kind, id, what, actor)


def begin_task(Client client, uint32_t t):
    """`begin` of a task or call that this client has claimed."""
    cdef frt_task *task
    client.ensure()
    if client.x.sb.trace_on == 0 or t >= frt_tasks(&client.x):
        return 0
    task = client.x.tasks + t
    return frt_trace_begin(&client.x, FRT_TRACE_TASK, task.id, task.function_index, task.actor)


def end(Client client, uint64_t number):
    """Write down that what `begin` returned the number of has ended; nothing once the client is closed."""
    if number and client.usable() and number <= client.x.traces[client.x.me].count:
        frt_trace_end(&client.x, number)


def record(Client client, uint32_t kind, uint64_t id, uint32_t what=0, uint32_t actor=0):
    """Write down something that takes no time; nothing happens when the session does not record."""
    client.ensure()
    frt_trace_point(&client.x, kind, id, what, actor)


def drain(Client client, uint32_t of, uint64_t since=0):
    """The records of client `of` from number `since` on, oldest first.

    Returns:
        (records, next): tuples (number, start ns, end ns, kind, id, what, actor), and the number to ask for next time.
        The end is 0 while it is open. Records that were overwritten before they could be read are missing.
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
    # Two moments that are known by both clocks, the session's first and this one; all records lie between them.
    ticks, ns = frt_trace_ticks(sb.trace_clock), frt_now_ns()
    pace = <double>(ns - sb.trace_ns) / <double>(ticks - sb.trace_ticks) if ticks > sb.trace_ticks else 1.0
    for k in range(first, end):
        r = ring.records + k % FRT_TRACE_RECORDS
        finished = r.end
        rows.append((k, ns + <int64_t>(<double>(r.start - ticks) * pace),
                     ns + <int64_t>(<double>(finished - ticks) * pace) if finished else 0,
                     r.kind, r.id, r.what, r.actor))
    # The writer may have gone round while we copied: what lies that far back is not what was asked for.
    a_fence_sc()
    overwritten = a64_load_acq(&ring.count) + 1
    if overwritten > first + FRT_TRACE_RECORDS:
        rows = rows[overwritten - FRT_TRACE_RECORDS - first:]
    return rows, end
