/* The map of a group's shared memory: what the ranks of one node write and read without a lock.
 *
 * A memfd, so it has no name, needs no room in /dev/shm, and is gone with the last process that maps it, however
 * that ends. Its size is fixed and sealed; memory comes with the first touch.
 *
 *   frt_group | frt_rank of each | frt_channel of each pair | staging of each | ring of each pair | heap of each
 *
 * Everything has one writer: a rank writes only its own posts, staging buffers, rings and heap, and reads those of all.
 * (Two exceptions: `dead`, set once by whoever notices, and `abandoned`, which only grows.) So whoever is late, or is
 * killed at any instruction, can make others wait or read old bytes, but never damages what is theirs.
 *
 * Operation `seq` uses the posts and the staging buffers of its parity. It cannot begin to overwrite what
 * operation seq - 2 left there before all ranks have posted seq - 1, hence have ended seq - 2. Within an operation step
 * s uses buffer s & 1 in the same way. A rank that gives up breaks that chain: it first raises `abandoned`, and
 * whoever is still inside an operation up to that one looks at it last of all, and fails too. (A sequence lock.)
 */
#ifndef FRT_GROUP_H
#define FRT_GROUP_H

#include <stddef.h>
#include <stdint.h>

#define FRT_GROUP_MAGIC 0x3170756f72677466ull
#define FRT_GROUP_VERSION 1u
#define FRT_GROUP_RANKS_MAX 256
#define FRT_STEP_BITS 24 /* of a stamp: seq << 24 | step */

/* What a rank does in one operation, and how far it is. `stamp` is stored last (the commit point). */
typedef struct {
    uint64_t stamp;
    uint64_t what;   /* kind, reduction, dtype, root: must be equal on all ranks */
    uint64_t count;  /* elements of a part: must be equal, too */
    uint64_t source; /* offset of the input if others may read it in place, or 0 */
    uint64_t target; /* offset of the output if others may read it in place, or 0 */
    uint64_t flags;
    uint64_t unused[2];
} __attribute__((aligned(64))) frt_post;

typedef struct {
    frt_post posts[2];
    /* Sleep: whoever changes a word that others may wait for looks at frt_group.sleepers, then here. */
    uint32_t wake __attribute__((aligned(64))); /* grows with each wake-up; the futex */
    uint32_t sleepers;                          /* threads of this rank that sleep, or are about to */
    uint32_t processor;                         /* 1 + where it was when it last had to wait for long; a hint */
    uint32_t pid __attribute__((aligned(64)));
    uint32_t state;
    uint64_t start; /* of the process: pids are used again */
} frt_rank;

/* Bytes from one rank to another: a ring with one writer and one reader. */
typedef struct {
    uint64_t head;                              /* bytes ever written; the sender's */
    uint64_t tail __attribute__((aligned(64))); /* bytes ever read; the receiver's */
    uint32_t broken __attribute__((aligned(64))); /* one side gave up inside a message */
} frt_channel;

typedef struct {
    uint64_t magic;
    uint32_t version, world_size;
    uint64_t total_bytes, chunk_bytes, ring_bytes, heap_bytes;
    uint64_t ranks, channels, staging, rings, heaps; /* offsets */
    uint64_t abandoned __attribute__((aligned(64))); /* the last operation that some rank gave up; seldom written */
    uint32_t dead;                                   /* 1 + the rank that was found dead or gone, or 0 */
    uint32_t sleepers __attribute__((aligned(64)));  /* sum of the ranks', never too low */
} __attribute__((aligned(64))) frt_group;

enum { FRT_RANK_ABSENT, FRT_RANK_HERE, FRT_RANK_LEFT };

#define FRT_HERE 4096 /* a shared result begins so far behind its block: before it, who still looks at it */

_Static_assert(sizeof(frt_post) == 64 && sizeof(frt_rank) == 256 && sizeof(frt_channel) == 192, "lines");
_Static_assert(sizeof(frt_group) <= 4096, "the first page");

#endif
