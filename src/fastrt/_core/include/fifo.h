/* A queue of values stored in the bytes of objects, for fastrt.util.Queue.
 *
 * The root object has the lock, the counts and the positions. The values lie in segments; each segment is a ring in a
 * separate object, and usually there is one. When it is full, a putter makes a larger one, writes its name into the
 * full one (`next`) and makes it the root's `tail`; getters drain the full one up to its `end` and follow `next`. Each
 * process that uses the queue pins these objects. They are sealed although their bytes change: only this code reads
 * them.
 *
 * The root changes only under its lock, in two steps. First a value's bytes are written where no getter looks yet.
 * Then the new positions and counts are written into `plan`, committed by `valid`, and copied into `state`. A process
 * that takes the lock of a dead owner copies a valid plan again; nothing else can be half done. So a process killed
 * before the commit has put or taken nothing, and one killed after it has put or taken everything.
 *
 * `puts` and `gets` are futexes: they change under the lock with every put and get, and are woken if a thread sleeps.
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
    frt_fifo_name head_in, tail_in; /* the segment that is drained, and the one that is filled */
    uint64_t head, tail;            /* positions in them; they only grow, and are used modulo the capacity */
    uint64_t nput, ngot;            /* values ever put and taken */
} frt_fifo_state;

typedef struct {
    uint64_t magic;
    uint64_t most; /* capacity in values; 0: no limit */
    frt_lock lock;
    frt_fifo_state state;
    frt_fifo_state plan;
    uint32_t valid; /* 1: `plan` is committed */
    uint32_t closed;
    uint32_t puts __attribute__((aligned(64)));
    uint32_t getters; /* threads asleep until a put. A killed one stays counted: each put then makes a useless wake */
    uint32_t gets __attribute__((aligned(64)));
    uint32_t putters;
} frt_fifo;

typedef struct {
    uint64_t magic;
    uint64_t capacity; /* bytes of the ring, which follows this header */
    frt_fifo_name next;
    uint64_t end; /* the position up to which it was filled when `next` replaced it */
    char pad[24];
} frt_fifo_segment;

typedef struct { /* before each value; both together a multiple of 8 bytes */
    uint32_t bytes;
    uint32_t kind;
} frt_fifo_head;

_Static_assert(sizeof(frt_fifo_segment) == 64, "the ring begins at a cache line");

static inline void frt_futex_wake_one(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0); }

/* Finish the change that a dead owner committed. This process holds the lock. */
static inline void frt_fifo_redo(frt_fifo *q) {
    if (a32_load_acq(&q->valid)) {
        q->state = q->plan;
        a32_store_rel(&q->valid, 0);
        a32_add_sc(&q->puts, 1); /* the dead owner may not have woken any sleeper */
        a32_add_sc(&q->gets, 1);
    }
}

static inline void frt_fifo_commit(frt_fifo *q) {
    a32_store_rel(&q->valid, 1); /* commit */
    q->state = q->plan;
    a32_store_rel(&q->valid, 0);
}

#endif
