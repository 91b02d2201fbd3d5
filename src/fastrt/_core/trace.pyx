# cython: language_level=3
"""Per-client rings of what happened when: one writer, no lock, read by anybody at any time.

A ring has room for the last 4,096 records. The writer fills a record and then stores the count; a reader
copies, reads the count again, and drops what may have been overwritten meanwhile. A death leaves at most one
record unwritten. Off unless the segment was created with `trace`: then a record costs one clock reading.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.clients cimport Client
from fastrt._core.layout cimport *

TASK_START, TASK_END, PUT, GET = 1, 2, 3, 4
NAMES = {TASK_START: "start", TASK_END: "end", PUT: "put", GET: "get"}


def enabled(Client client):
    """Whether this session records."""
    client.ensure()
    return client.x.sb.trace_on != 0


def record(Client client, uint32_t kind, uint64_t id, uint32_t value=0):
    """Write one record into this client's ring; nothing happens when the session does not record."""
    cdef frt_trace_ring *ring
    cdef frt_trace_record *r
    client.ensure()
    if client.x.sb.trace_on == 0:
        return
    ring = client.x.traces + client.x.me
    r = ring.records + ring.count % FRT_TRACE_RECORDS
    r.time_ns, r.id, r.kind, r.value = frt_now_ns(), id, kind, value
    a64_store_rel(&ring.count, ring.count + 1)


def drain(Client client, uint32_t of, uint64_t since=0):
    """The records of client `of` from number `since` on, oldest first.

    Returns:
        (records, next): tuples (monotonic ns, kind, id, value), and the number to ask for next time. Records
        that were overwritten before they could be read are missing.
    """
    cdef frt_trace_ring *ring
    cdef frt_trace_record *r
    cdef uint64_t first, end, k
    client.ensure()
    if of >= client.x.clients_max or client.x.sb.trace_on == 0:
        return [], since
    ring = client.x.traces + of
    end = a64_load_acq(&ring.count)
    first = end - FRT_TRACE_RECORDS if end > FRT_TRACE_RECORDS else 0
    first = since if first < since < end else (end if since >= end else first)
    rows = []
    for k in range(first, end):
        r = ring.records + k % FRT_TRACE_RECORDS
        rows.append((r.time_ns, r.kind, r.id, r.value))
    # The writer may have gone round while we copied: what lies that far back is not what was asked for.
    a_fence_sc()
    overwritten = a64_load_acq(&ring.count) + 1
    if overwritten > first + FRT_TRACE_RECORDS:
        rows = rows[overwritten - FRT_TRACE_RECORDS - first:]
    return rows, end
