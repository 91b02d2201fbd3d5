/* Write records into a client's trace ring. Inline, because a whole task costs about a microsecond.
 *
 * Each ring has one writer at a time: the thread that has the lock of threads.h. While the session does not record, a
 * call costs one read of a word beside the superblock's state, which every core call has just read.
 */
#ifndef FRT_TRACE_H
#define FRT_TRACE_H

#include <errno.h>
#include <fcntl.h>

#include "futex.h"
#include "layout.h"

enum { /* frt_trace_record.kind */
    FRT_TRACE_PROCESS = 1, /* a client joined: its pid, and its kind in `what` */
    FRT_TRACE_TASK = 2,
    FRT_TRACE_SUBMIT = 3,
    FRT_TRACE_PUT = 4,
    FRT_TRACE_GET = 5,
    FRT_TRACE_WAIT = 6, /* asleep in a get or wait */
    FRT_TRACE_SPILL = 7,
    FRT_TRACE_RESTORE = 8,
    FRT_TRACE_FETCH = 9 /* a value is fetched from another node */
};
#define FRT_TRACE_BYTES_MIN 65536u /* puts and gets of smaller values are not recorded */

/* The time by a clock of FRT_CLOCK_*. Reading the processor's counter takes 18 ns, the system's clock 48. The counter
 * is used only if the kernel keeps time by it, which means that it runs evenly and in step on all processors. */
static inline int64_t frt_trace_ticks(uint32_t clock) {
#ifdef __x86_64__
    if (clock == FRT_CLOCK_TSC) return (int64_t)__builtin_ia32_rdtsc();
#endif
    (void)clock;
    return frt_now_ns();
}

/* Commit memory for this process's ring, once. 0 when there is none; the process then records nothing. */
static inline int frt_trace_commit(frt_ctx *x) {
    frt_trace_ring *ring = x->traces + x->me;
    int rc;
    do rc = posix_fallocate(x->fd, (char *)ring - x->base, sizeof *ring);
    while (rc == EINTR);
    x->trace_ready = rc == 0 ? 1 : 2;
    return rc == 0;
}

/* Begin a record: its number + 1, or 0 when the session does not record. */
static inline uint64_t frt_trace_begin(frt_ctx *x, unsigned kind, uint64_t id, uint32_t what, uint32_t actor) {
    frt_trace_ring *ring = x->traces + x->me;
    frt_trace_record *r;
    uint64_t n;
    uint32_t on = x->sb->trace_on;
    if (__builtin_expect(!on, 1)) return 0;
    frt_threads_take(x);
    if (x->trace_ready != 1 && (x->trace_ready || !frt_trace_commit(x))) {
        frt_threads_give(x);
        return 0;
    }
    n = ring->count;
    r = ring->records + n % FRT_TRACE_RECORDS;
    a_fence_rel(); /* a reader that finds any of the following finds this `count`, and drops the record before it */
    r->start = frt_trace_ticks(on);
    r->end = 0;
    r->id = id, r->what = what, r->kind = (uint16_t)kind, r->actor = (uint16_t)actor;
    a64_store_rel(&ring->count, n + 1);
    frt_threads_give(x);
    return n + 1;
}

/* Store the end of record number `n` - 1, unless a later record has taken its place. */
static inline void frt_trace_end(frt_ctx *x, uint64_t n) {
    frt_trace_ring *ring;
    if (n == 0) return;
    ring = x->traces + x->me;
    frt_threads_take(x);
    if (ring->count - n < FRT_TRACE_RECORDS)
        a64_store_rel((uint64_t *)&ring->records[(n - 1) % FRT_TRACE_RECORDS].end,
                      (uint64_t)frt_trace_ticks(x->sb->trace_clock));
    frt_threads_give(x);
}

/* Record an event without a duration. */
static inline void frt_trace_point(frt_ctx *x, unsigned kind, uint64_t id, uint32_t what, uint32_t actor) {
    uint64_t n = frt_trace_begin(x, kind, id, what, actor);
    frt_trace_record *r;
    if (n == 0) return;
    r = x->traces[x->me].records + (n - 1) % FRT_TRACE_RECORDS;
    a64_store_rel((uint64_t *)&r->end, (uint64_t)r->start);
}

#endif
