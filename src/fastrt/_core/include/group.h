/* The shared memory of a collective group: the ranks of one node write and read it without a lock.
 *
 * It is a memfd: it has no name, needs no room in /dev/shm, and disappears with the last process that maps it, however
 * that process ends. Its size is fixed and sealed; the kernel gives each page memory at its first touch.
 *
 *   frt_group | frt_rank of each | frt_channel of each pair | staging of each | ring of each pair | heap of each
 *
 * Everything has one writer: a rank writes only its own posts, staging buffers, rings and heap, and reads those of all.
 * There are two exceptions: `dead`, set once by the rank that notices a death, and `abandoned`, which only grows. So a
 * rank that is late, or is killed at any instruction, can make others wait or read old bytes, but cannot damage their
 * data.
 *
 * Operation `seq` uses the posts and staging buffers of its parity. It cannot overwrite those of operation seq - 2
 * before all ranks have posted seq - 1, hence have ended seq - 2. Within an operation, step s uses buffer s & 1 in the
 * same way. A rank that gives up breaks that chain. It first raises `abandoned`; a rank that is still inside an
 * operation up to that one reads `abandoned` as its last action, and fails, too. (A sequence lock.)
 */
#ifndef FRT_GROUP_H
#define FRT_GROUP_H

#include <stddef.h>
#include <stdint.h>

#define FRT_GROUP_MAGIC 0x3170756f72677466ull
#define FRT_GROUP_VERSION 1u
#define FRT_GROUP_RANKS_MAX 256
#define FRT_STEP_BITS 24 /* of a stamp: seq << 24 | step */

/* A rank's part in one operation, and its progress. `stamp` is stored last (the commit point). */
typedef struct {
    uint64_t stamp;
    uint64_t what;   /* kind, reduction, dtype, root: must be equal on all ranks */
    uint64_t count;  /* elements of a part: must be equal on all ranks */
    uint64_t source; /* offset of the input if other ranks may read it in place, or 0 */
    uint64_t target; /* offset of the output if other ranks may read it in place, or 0 */
    uint64_t flags;
    uint64_t unused[2];
} __attribute__((aligned(64))) frt_post;

typedef struct {
    frt_post posts[2];
    /* Sleep: a rank that changes a word for which others may wait reads frt_group.sleepers, then these. */
    uint32_t wake __attribute__((aligned(64))); /* the futex; grows with each wake-up */
    uint32_t sleepers;                          /* threads of this rank that sleep, or are about to */
    uint32_t processor;                         /* 1 + the processor it was on at its last long wait; a hint */
    uint32_t pid __attribute__((aligned(64)));
    uint32_t state; /* FRT_RANK_* */
    uint64_t start; /* start time of the process: pids are reused */
} frt_rank;

/* A ring of bytes from one rank to another, with one writer and one reader. */
typedef struct {
    uint64_t head;                              /* bytes ever written; the sender writes it */
    uint64_t tail __attribute__((aligned(64))); /* bytes ever read; the receiver writes it */
    uint32_t broken __attribute__((aligned(64))); /* one side gave up inside a message */
} frt_channel;

typedef struct {
    uint64_t magic;
    uint32_t version, world_size;
    uint64_t total_bytes, chunk_bytes, ring_bytes, heap_bytes;
    uint64_t ranks, channels, staging, rings, heaps; /* offsets */
    uint64_t abandoned __attribute__((aligned(64))); /* the last operation that some rank gave up; rarely written */
    uint32_t dead;                                   /* 1 + the rank that was found dead or gone, or 0 */
    uint32_t sleepers __attribute__((aligned(64)));  /* sum of the ranks' sleepers, never too low */
} __attribute__((aligned(64))) frt_group;

enum { FRT_RANK_ABSENT, FRT_RANK_HERE, FRT_RANK_LEFT };

#define FRT_HERE 4096 /* a shared result begins this far into its block; before it: which ranks still use the result */

_Static_assert(sizeof(frt_post) == 64 && sizeof(frt_rank) == 256 && sizeof(frt_channel) == 192, "lines");
_Static_assert(sizeof(frt_group) <= 4096, "the first page");

#endif
