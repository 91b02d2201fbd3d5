/* A queue of values in the bytes of objects: what fastrt.util.Queue is made of.
 *
 * The root object has the lock, the counts and the positions; the values lie in segments, each a ring in an object
 * of its own. There is one segment as a rule. When it is full, a putter makes a larger one, writes its name into the
 * full one (`next`) and makes it the root's `tail`; getters drain the full one up to its `end` and follow. The
 * objects are sealed and pinned by whoever uses them; that their bytes change is these objects' own affair.
 *
 * Everything in the root changes under its lock, and in one of two ways: a value's bytes are written where no getter
 * looks yet; then the new positions and counts are noted in `plan`, whose `valid` is the commit point, and copied.
 * Whoever takes the lock of a dead owner copies a valid plan again and is done: nothing else can be half done.
 * A process killed before the commit has put or taken nothing; after it, all.
 *
 * `puts` and `gets` are futexes: changed under the lock with every put and get, and woken when somebody sleeps.
 */
#ifndef FRT_FIFO_H
#define FRT_FIFO_H

#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "atomic.h"
#include "lock.h"

#define FRT_FIFO_MAGIC 0x6f666966747266ULL
#define FRT_FIFO_FILLER 0xffffffffu /* in place of a size: the rest of the ring is not used */

typedef struct {
    uint64_t objref;
    uint32_t index;
    uint32_t pad;
} frt_fifo_name;

typedef struct {
    frt_fifo_name head_in, tail_in; /* the segments that are drained and filled */
    uint64_t head, tail;            /* positions there; they only grow, and count modulo the capacity */
    uint64_t nput, ngot;            /* values ever */
} frt_fifo_state;

typedef struct {
    uint64_t magic;
    uint64_t most; /* values at once; 0: any number */
    frt_lock lock;
    frt_fifo_state state;
    frt_fifo_state plan;
    uint32_t valid; /* of the plan */
    uint32_t closed;
    uint32_t puts __attribute__((aligned(64)));
    uint32_t getters; /* asleep until a put; a killed one stays counted, and costs wakes that find nobody */
    uint32_t gets __attribute__((aligned(64)));
    uint32_t putters;
} frt_fifo;

typedef struct {
    uint64_t magic;
    uint64_t capacity; /* bytes of the ring, which follows */
    frt_fifo_name next;
    uint64_t end; /* the position up to which it was filled when `next` took its place */
    char pad[24];
} frt_fifo_segment;

typedef struct { /* before each value; both together a multiple of 8 bytes */
    uint32_t bytes;
    uint32_t kind;
} frt_fifo_head;

_Static_assert(sizeof(frt_fifo_segment) == 64, "the ring begins at a cache line");

static inline void frt_futex_wake_one(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0); }

/* The lock is ours: bring what a dead owner committed to its end. */
static inline void frt_fifo_redo(frt_fifo *q) {
    if (a32_load_acq(&q->valid)) {
        q->state = q->plan;
        a32_store_rel(&q->valid, 0);
        a32_add_sc(&q->puts, 1); /* the dead one has told nobody */
        a32_add_sc(&q->gets, 1);
    }
}

static inline void frt_fifo_commit(frt_fifo *q) {
    a32_store_rel(&q->valid, 1); /* commit */
    q->state = q->plan;
    a32_store_rel(&q->valid, 0);
}

#endif
