/* The turns of one process's threads at an object of the core that has no other lock.
 *
 * A thread that waits for its turn does not hold the GIL, and where Python has none, does not delay a garbage
 * collection: a thread that has the turn may have let go of the interpreter, and come back only after the collection.
 * Nothing that runs Python code may be called within a turn.
 */
#ifndef FRT_TURN_H
#define FRT_TURN_H

#include <Python.h>
#include <pthread.h>
#include <stdint.h>

/* A mutex of the C library: Python's lock reads the clock each time, and takes four times as long. */
static inline void frt_turn_take(pthread_mutex_t *turn) {
    if (pthread_mutex_trylock(turn) == 0) return;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(turn);
    Py_END_ALLOW_THREADS;
}

static inline void frt_turn_give(pthread_mutex_t *turn) { pthread_mutex_unlock(turn); }

#ifdef Py_GIL_DISABLED
/* For a few reads, which the GIL makes one step where there is one. */
#define frt_read_take(turn) frt_turn_take(turn)
#define frt_read_give(turn) frt_turn_give(turn)

/* Enter what only one thread at a time may be inside of: 0 if another one is. */
static inline int frt_turn_enter(uint32_t *inside) { return __atomic_exchange_n(inside, 1, __ATOMIC_SEQ_CST) == 0; }
static inline void frt_turn_leave(uint32_t *inside) { __atomic_store_n(inside, 0, __ATOMIC_SEQ_CST); }
#else
#define frt_read_take(turn) ((void)0)
#define frt_read_give(turn) ((void)0)
static inline int frt_turn_enter(uint32_t *inside) {
    if (*inside) return 0;
    *inside = 1;
    return 1;
}
static inline void frt_turn_leave(uint32_t *inside) { *inside = 0; }
#endif

#endif
