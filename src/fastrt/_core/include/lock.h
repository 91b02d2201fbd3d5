/* The lock type of the segment: a robust, process-shared mutex (9 ns uncontended, 2.4 ns of them for robustness).
 *
 * The kernel gives the lock of a dead thread to the next taker, which must first rebuild the data that the lock
 * protects from the state words. A holder that is only stopped keeps the lock: after FRT_LOCK_PATIENCE_NS the
 * taker gives up with FRT_STUCK.
 * Code inside a critical section does not block, allocate, touch Python or take the GIL.
 */
#ifndef FRT_LOCK_H
#define FRT_LOCK_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "atomic.h"
#include "futex.h"

#ifdef FRT_FAILPOINTS
#define FRT_LOCK_PATIENCE_NS 1000000000LL /* kill tests stop owners on purpose, and often wait this long */
#else
#define FRT_LOCK_PATIENCE_NS 5000000000LL
#endif
#define FRT_LOCK_SPINS 200 /* 3 to 9 us: beyond the longest ordinary critical section, cheaper than one sleep */
#define FRT_LOCK_PAUSES_MOST 16
#define FRT_LOCK_NAP_NS 100000000L

typedef struct {
    pthread_mutex_t mutex;
    char pad[64 - sizeof(pthread_mutex_t) % 64];
} frt_lock __attribute__((aligned(64)));

#define FRT_LOCKED 0
#define FRT_LOCK_ORPHANED 1 /* locked; the last owner died inside: repair, then frt_lock_mend */
#define FRT_LOCK_TIMEOUT (-5)

static inline int frt_lock_init(frt_lock *lock) {
    pthread_mutexattr_t attr;
    memset(lock, 0, sizeof *lock);
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    int rc = pthread_mutex_init(&lock->mutex, &attr);
    pthread_mutexattr_destroy(&attr);
    return -rc;
}

/* Wait for the lock until a moment of the monotonic clock. */
static inline int frt_lock_sleep(frt_lock *lock, int64_t until) {
    struct timespec t;
#ifdef __GLIBC__
    t.tv_sec = until / 1000000000, t.tv_nsec = until % 1000000000;
    return pthread_mutex_clocklock(&lock->mutex, CLOCK_MONOTONIC, &t);
#else /* musl waits by the clock of the day only; by short waits a change of that clock costs one of them */
    int rc = EBUSY;
    do {
        clock_gettime(CLOCK_REALTIME, &t);
        t.tv_nsec += FRT_LOCK_NAP_NS;
        if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
        rc = pthread_mutex_timedlock(&lock->mutex, &t);
    } while (rc == ETIMEDOUT && frt_now_ns() < until);
    return rc;
#endif
}

/* Whether a process holds the lock, by a plain load. An attempt to take it moves its cache line to the processor that
 * tries. When 14 processes tried without a pause, the holder waited for that line: 80 % of all time went into attempts.
 */
static inline int frt_lock_is_held(const frt_lock *lock) {
#ifdef __GLIBC__
    return (__atomic_load_n(&lock->mutex.__data.__lock, __ATOMIC_RELAXED) & FUTEX_TID_MASK) != 0;
#else /* musl's trylock loads first */
    (void)lock;
    return 0;
#endif
}

static inline int frt_lock_take(frt_lock *lock) {
    int rc = pthread_mutex_trylock(&lock->mutex);
    for (int spun = 0, pauses = 1; rc == EBUSY && spun < FRT_LOCK_SPINS; spun += pauses) {
        for (int i = 0; i < pauses; i++) a_relax();
        if (frt_lock_is_held(lock)) continue;
        rc = pthread_mutex_trylock(&lock->mutex);
        if (pauses < FRT_LOCK_PAUSES_MOST) pauses *= 2; /* others wait, too: they take turns by looking less often */
    }
#ifdef __SANITIZE_THREAD__ /* ThreadSanitizer does not know clocklock: it would not see that this thread has the lock */
    for (int64_t until = frt_now_ns() + FRT_LOCK_PATIENCE_NS; rc == EBUSY && frt_now_ns() < until; sched_yield())
        rc = pthread_mutex_trylock(&lock->mutex);
#endif
    if (rc == EBUSY) rc = frt_lock_sleep(lock, frt_now_ns() + FRT_LOCK_PATIENCE_NS);
    if (rc == 0) return FRT_LOCKED;
    if (rc == EOWNERDEAD) return FRT_LOCK_ORPHANED;
    return FRT_LOCK_TIMEOUT;
}

static inline void frt_lock_mend(frt_lock *lock) { pthread_mutex_consistent(&lock->mutex); }

static inline void frt_lock_give(frt_lock *lock) { pthread_mutex_unlock(&lock->mutex); }

/* See threads.h. */
typedef struct frt_threads {
#ifdef Py_GIL_DISABLED
    PyMutex mutex;
    uint64_t thread; /* that has it; 0: none */
    uint32_t depth, left;
    struct frt_threads *of; /* the one in use: of the first attachment, whose counts of pins the later ones share */
#endif
} frt_threads;

#ifdef FRT_FAILPOINTS
#define frt_lock_take(lock) FRT_AROUND("take", frt_lock_take(lock))
#define frt_lock_mend(lock) FRT_AROUND_VOID("mend", frt_lock_mend(lock))
#define frt_lock_give(lock) FRT_AROUND_VOID("give", frt_lock_give(lock))
#endif

#endif
