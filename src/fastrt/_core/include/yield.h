/* Yields for a wait that spins: another process may need this processor to end the wait.
 *
 * If a program that computes is queued on that processor, too, the kernel gives it a whole time slice, some
 * milliseconds for each yield. A waiter that sleeps instead is put before that program when it wakes. So yields stop
 * for a while after one that came back late, and for longer if the next ones are late, too.
 */
#ifndef FRT_YIELD_H
#define FRT_YIELD_H

#include <sched.h>

#include "futex.h"

#define FRT_YIELD_LATE_NS 200000 /* processes of fastrt that yield to each other are back within some microseconds */
#define FRT_YIELD_LATE_MOST_NS 100000000 /* beyond a time slice: this process was stopped, say by SIGSTOP */
#define FRT_YIELD_REST_MOST 32

/* What the threads of a process know of their last yields. All zero at first. */
typedef struct {
    int64_t from_ns; /* no yields before this time */
    int64_t rests;   /* the next late yield, of t ns, stops yields for t * (rests + 1) */
} frt_yields;

/* Yield and set the time; or, while yields are late, do nothing and return 0. */
static inline int frt_yield(frt_yields *yields, int64_t *now_ns) {
    int64_t before = *now_ns, late, rests;
    if (before < __atomic_load_n(&yields->from_ns, __ATOMIC_RELAXED)) return 0;
    sched_yield();
    *now_ns = frt_now_ns();
    late = *now_ns - before;
    if (late > FRT_YIELD_LATE_MOST_NS) late = FRT_YIELD_LATE_MOST_NS;
    rests = __atomic_load_n(&yields->rests, __ATOMIC_RELAXED);
    if (late > FRT_YIELD_LATE_NS) {
        __atomic_store_n(&yields->from_ns, *now_ns + (rests + 1) * late, __ATOMIC_RELAXED);
        if (rests < FRT_YIELD_REST_MOST) __atomic_store_n(&yields->rests, 2 * rests + 1, __ATOMIC_RELAXED);
    } else if (rests) {
        __atomic_store_n(&yields->rests, rests / 2, __ATOMIC_RELAXED);
    }
    return 1;
}

#endif
