# cython: language_level=3, freethreading_compatible=True
"""Per-client trace rings of timed actions. A ring has one writer and no lock; any process reads it at any time.

A ring has room for the last 16,384 records. The writer fills a record and then stores the count; the end of an action
is stored into its record later. A reader copies the records, reads the count again, and drops those that may have been
overwritten meanwhile. A death loses at most the record that is being written; the action under way has no end.
The session records from its start to its end (`traced`), or while any process has a recording (`switch`): then a record
costs one or two readings of the clock. A recording ends with its process.
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


cdef bint trace_wanted(frt_ctx *x) noexcept nogil:
    """Whether any client has a recording, or the session is one."""
    cdef uint32_t c
    for c in range(clients_ever(x)):
        if a32_load_sc(&x.clients[c].recordings):
            return True
    return x.sb.traced != 0


cdef void trace_settle(frt_ctx *x) noexcept nogil:
    """Turn recording on or off, as the clients' recordings say.

    Each process that has changed its count calls this, and the repairer of a dead one. After the store it looks again:
    a count that was changed since the first look, whose process has stored before this one, would be overlooked.
    """
    cdef bint wanted = trace_wanted(x)
    while True:
        a32_store_sc(&x.sb.trace_on, x.sb.trace_clock if wanted else 0)
        if trace_wanted(x) == wanted:
            return
        wanted = not wanted


def switch(Client client, bint on):
    """Begin a recording of the session by this process, or end one.

    All processes of the session record while any has a recording. It ends with its process at the latest.
    """
    cdef frt_client *slot
    client.ensure()
    slot = client.x.clients + client.x.me
    if on or slot.recordings:
        a32_add_sc(&slot.recordings, 1 if on else <uint32_t>-1)
        trace_settle(&client.x)


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


cdef struct reading:
    uint64_t first, end  # numbers of the records that can be read
    int64_t ticks, ns    # now, by the session's clock and by the monotonic clock
    double pace          # nanoseconds a tick


cdef reading _begin_reading(frt_ctx *x, uint32_t of, uint64_t since) noexcept nogil:
    """The records of client `of` from number `since` on that are in its ring, and how their times are converted.

    Two moments are known by both clocks, the session's start and now; all records lie between them.
    """
    cdef reading r
    cdef frt_superblock *sb = x.sb
    r.end = a64_load_acq(&x.traces[of].count)
    r.first = r.end - FRT_TRACE_RECORDS if r.end > FRT_TRACE_RECORDS else 0
    r.first = since if r.first < since < r.end else (r.end if since >= r.end else r.first)
    r.ticks, r.ns = frt_trace_ticks(sb.trace_clock), frt_now_ns()
    r.pace = <double>(r.ns - sb.trace_ns) / <double>(r.ticks - sb.trace_ticks) if r.ticks > sb.trace_ticks else 1.0
    return r


cdef uint64_t _overwritten(frt_ctx *x, uint32_t of, const reading *r) noexcept nogil:
    """How many of the records the writer may have overwritten during the copy: it may have gone round the ring."""
    cdef uint64_t count
    a_fence_sc()
    count = a64_load_acq(&x.traces[of].count) + 1
    return count - FRT_TRACE_RECORDS - r.first if count > r.first + FRT_TRACE_RECORDS else 0


def drain(Client client, uint32_t of, uint64_t since=0):
    """The records of client `of` from number `since` on, oldest first.

    Returns:
        (records, next): tuples (number, start ns, end ns, kind, id, what, actor), and `since` for the next call. The
        end is 0 while the action lasts. Records that were overwritten before they could be read are missing.
    """
    cdef frt_trace_record *one
    cdef reading r
    cdef uint64_t k
    cdef int64_t finished
    client.ensure()
    if of >= clients_ever(&client.x):
        return [], since
    r = _begin_reading(&client.x, of, since)
    rows = []
    for k in range(r.first, r.end):
        one = client.x.traces[of].records + k % FRT_TRACE_RECORDS
        finished = one.end
        rows.append((k, r.ns + <int64_t>(<double>(one.start - r.ticks) * r.pace),
                     r.ns + <int64_t>(<double>(finished - r.ticks) * r.pace) if finished else 0,
                     one.kind, one.id, one.what, one.actor))
    del rows[:_overwritten(&client.x, of, &r)]
    return rows, r.end


def copied(Client client, uint32_t of, uint64_t since=0):
    """The records of client `of` from number `since` on as they are in memory, for many records: see `drain`.

    Returns:
        (first, data, next, clock): the number of the first record, the records' bytes (start, end, id as 8 bytes, what
        as 4, kind and actor as 2), `since` for the next call, and (ticks, ns, pace): a time t of a record is
        ns + (t - ticks) * pace nanoseconds of the monotonic clock.
    """
    cdef frt_trace_record *records
    cdef reading r
    cdef uint64_t k, n, tail
    cdef size_t size = sizeof(frt_trace_record)
    client.ensure()
    if of >= clients_ever(&client.x):
        return since, b"", since, (0, 0, 1.0)
    records = client.x.traces[of].records
    r = _begin_reading(&client.x, of, since)
    n = r.end - r.first
    k = r.first % FRT_TRACE_RECORDS
    tail = n if k + n <= FRT_TRACE_RECORDS else FRT_TRACE_RECORDS - k
    data = (<char *>(records + k))[:tail * size] + (<char *>records)[:(n - tail) * size]
    k = min(_overwritten(&client.x, of, &r), n)
    return r.first + k, data[k * size:], r.end, (r.ticks, r.ns, r.pace)
