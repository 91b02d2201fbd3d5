/* THE MAP: every struct that lives in the shared segment, and each process's view of it.
 *
 * Ideas that hold everywhere (and why a process may die between any two instructions):
 *  1. One 8-byte state word per record says what the record is and who is changing it: {state, client, gen}.
 *     A change becomes visible by one aligned store or compare-and-swap of that word.
 *  2. Everything else (free stacks, bitmaps, lists, rings, counters) is derived and rebuilt from those words.
 *  3. Positions are indexes and offsets from the segment's start, never pointers.
 *  4. Memory beyond a region's committed mark is never touched: fallocate has not promised it yet.
 *
 * Locks, in the order in which they may be nested:
 *     janitor > slots > actors > functions > links > queue > objects/tasks pool > size class > extent
 * `grow` is taken with nothing else held, or inside of `slots` or `actors`; it takes `extent` inside.
 */
#ifndef FRT_LAYOUT_H
#define FRT_LAYOUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "atomic.h"
#include "lock.h"

#define FRT_MAGIC 0x3130547274736166ULL /* "fastrT01" */
#define FRT_LAYOUT_VERSION 3

/* Error codes of the core; errors.py turns them into exceptions. */
enum {
    FRT_OK = 0,
    FRT_FULL = -1,
    FRT_STALE = -2,
    FRT_TIMEOUT = -3,
    FRT_CORRUPT = -4,
    FRT_STUCK = FRT_LOCK_TIMEOUT,
    FRT_TOO_LARGE = -6,
    FRT_TABLE_FULL = -7,
    FRT_CLOSED = -8,
    FRT_INTERRUPTED = -9,
    FRT_CLIENTS_FULL = -10,
    FRT_NOT_FOUND = -11,
    FRT_SPILLED = -13, /* internal: the bytes are in a file; have them restored */
    FRT_GROW = -12 /* internal: no free run; grow the arena and try again */
};

/* ---- state words: {state:8 | client:16 | state before:8 | gen:32} --------------------------------------------- */
enum { /* objects */
    FRT_OBJ_EMPTY = 0,
    FRT_OBJ_RESERVED = 1, /* client: in its private magazine, or being filled */
    FRT_OBJ_PENDING = 2,  /* a task will seal it; entry.task names the task */
    FRT_OBJ_SEALED = 3,
    FRT_OBJ_DELETING = 4, /* client, before: sealed or spilled, will go unless a holder shows up, who puts it back */
    FRT_OBJ_FREEING = 5,  /* client: no way back; whoever comes is too late */
    FRT_OBJ_SPILLING = 6, /* client: sealed, being copied to a file; whoever pins it puts it back */
    FRT_OBJ_SPILLED = 7,  /* client that freed the block: the bytes are in a file only */
    FRT_OBJ_RESTORING = 8 /* client: the bytes go, or are being read back; nobody else touches it */
};
enum { /* tasks */
    FRT_TASK_EMPTY = 0,
    FRT_TASK_RESERVED = 1, /* client */
    FRT_TASK_WAITING = 2,  /* for an argument */
    FRT_TASK_READY = 3,
    FRT_TASK_CLAIMED = 4, /* client: popped, user code not entered */
    FRT_TASK_RUNNING = 5, /* client */
    FRT_TASK_BLOCKED = 6, /* client: running, and asleep in a get or wait */
    FRT_TASK_ENDING = 7   /* client: results are being sealed with an error outside a worker (cancel, death) */
};
enum { /* actors */
    FRT_ACTOR_EMPTY = 0,
    FRT_ACTOR_WANTED = 1,   /* the daemon shall start a process for it */
    FRT_ACTOR_STARTING = 2, /* client: its process builds the instance */
    FRT_ACTOR_LIVE = 3,     /* client: its process takes calls */
    FRT_ACTOR_DOWN = 4,     /* its process has died; the daemon decides whether it gets another */
    FRT_ACTOR_DEAD = 5,     /* for good: whoever makes a call ends it, see frt_actor */
    FRT_ACTOR_AWAY = 6      /* client: stands here for its process, which is on another node, and passes its calls on */
};
enum { /* clients */
    FRT_CLIENT_FREE = 0,
    FRT_CLIENT_JOINING = 1,
    FRT_CLIENT_LIVE = 2,
    FRT_CLIENT_DYING = 3
};
enum { FRT_KIND_DAEMON = 1, FRT_KIND_DRIVER = 2, FRT_KIND_WORKER = 3, FRT_KIND_TOOL = 4, FRT_KIND_ACTOR = 5 };
enum { FRT_SEG_INIT = 0, FRT_SEG_READY = 1, FRT_SEG_POISONED = 2, FRT_SEG_CLOSED = 3 };
enum { FRT_PAGE_INNER = 0, FRT_PAGE_FREE = 1, FRT_PAGE_RUN = 2, FRT_PAGE_SLAB = 3 };

static inline uint64_t frt_word(unsigned state, unsigned client, uint32_t gen) {
    return ((uint64_t)state << 56) | ((uint64_t)client << 40) | gen;
}
static inline uint64_t frt_word_deleting(unsigned client, uint64_t w) {
    return frt_word(FRT_OBJ_DELETING, client, (uint32_t)w) | (w >> 56) << 32;
}
static inline uint64_t frt_word_undeleted(uint64_t w) { return frt_word((w >> 32) & 255, 0, (uint32_t)w); }
static inline unsigned frt_word_state(uint64_t w) { return (unsigned)(w >> 56); }
static inline unsigned frt_word_client(uint64_t w) { return (unsigned)(w >> 40) & 0xffff; }
static inline uint32_t frt_word_gen(uint64_t w) { return (uint32_t)w; }

/* Page words: {state:8 | class:8 | zero:16 | pages:32}; only the first page of a run has one. */
static inline uint64_t frt_page_word(unsigned state, unsigned cls, uint32_t pages) {
    return ((uint64_t)state << 56) | ((uint64_t)cls << 48) | pages;
}

/* ---- geometry --------------------------------------------------------------------------------------------- */
#define FRT_NONE 0xffffffffu
#define FRT_PAGE_SHIFT 14 /* 16 KiB: a slab page of the smallest class has 64 blocks, one bitmap word */
#define FRT_PAGE_BYTES (1u << FRT_PAGE_SHIFT)
#define FRT_CLASSES 6 /* 256 bytes << class, up to 8 KiB; larger blocks are page runs */
#define FRT_CLASS_BYTES(c) (256u << (c))
#define FRT_BLOCKS_PER_PAGE 64
#define FRT_BINS 32              /* free runs by the logarithm of their length */
#define FRT_OWNER_TASK 0x80000000u /* owner words: entry index + 1, or this | task index + 1 */
#define FRT_INLINE_BYTES 72      /* values up to here live in the entry itself */
#define FRT_PATH_STEP 0x9E3779B97F4A7C15ULL /* odd: sums of its powers with small factors all differ */
#define FRT_TASK_INLINE_BYTES 168
#ifdef FRT_FAILPOINTS /* small steps, so that the small workloads of a kill test take many of them */
#define FRT_COMMIT_RECORDS 64
#define FRT_COMMIT_BYTES (1u << 18)
#define FRT_FUNCTIONS 64 /* slots of the function table at first */
#define FRT_FUNCTION_PROBES 4
#define FRT_ACTORS 32
#define FRT_ACTORS_STEP 16
#define FRT_RING_CELLS 16
#else
#define FRT_COMMIT_RECORDS 8192 /* records whose memory is committed in one step; about 1.5 MiB */
#define FRT_COMMIT_BYTES (64u << 20)
#define FRT_FUNCTIONS 16384
#define FRT_FUNCTION_PROBES 64 /* slots where a function may stand; that full, the next table is used */
#define FRT_ACTORS 8192 /* records at most; those of dead actors count while a handle exists */
#define FRT_ACTORS_STEP 1024 /* records whose memory is committed in one step */
#define FRT_RING_CELLS 16384 /* of the ready queue at first; it doubles up to ring_max */
#endif
#define FRT_CLIENTS_MOST 8192
#define FRT_CLIENTS_DENSE 256 /* at most so many clients have their bits beside each object's state word */
#define FRT_SLOTS_BEYOND 4    /* slots above the limit, for drivers and tools that come when the table is full */
#define FRT_PLANE_WORDS 4
#define FRT_PLANE_CLIENTS (64 * FRT_PLANE_WORDS)
#define FRT_PLANE_BYTES (3 * 8 * FRT_PLANE_WORDS) /* of each entry */
#define FRT_SLOTS_MOST (FRT_CLIENTS_MOST + FRT_PLANE_CLIENTS)
enum { FRT_CALLER_WORDS = FRT_SLOTS_MOST / 64 }; /* of a set of clients */
#define FRT_CELL_BYTES 8
#define FRT_PRIORITY_MAX 100 /* and -100; it has a signed byte in the task's record */
#define FRT_TRACE_RECORDS 16384 /* of each client; half a MiB, committed when something is recorded */
#define FRT_SPILL_BYTES_MIN 16384u /* smaller values stay: a file each would cost more than it frees */
#define FRT_MAGAZINE 128 /* records a client may keep in reserve */

enum { /* locks[] */
    FRT_LOCK_JANITOR = 0,
    FRT_LOCK_SLOTS,
    FRT_LOCK_ACTORS,
    FRT_LOCK_FUNCTIONS,
    FRT_LOCK_LINKS, /* counts of contained and argument refs; waiter lists */
    FRT_LOCK_QUEUE,
    FRT_LOCK_OBJECTS,
    FRT_LOCK_TASKS,
    FRT_LOCK_CLASS0,
    FRT_LOCK_EXTENT = FRT_LOCK_CLASS0 + FRT_CLASSES,
    FRT_LOCK_GROW,
    FRT_LOCKS
};

/* A table of records with one state word each. Truth: the state words. `free` is a derived stack.
 * Records at `fresh` and beyond have never been used. Changed under the pool's lock only. */
typedef struct {
    uint32_t max;
    uint32_t committed;
    uint32_t fresh;
    uint32_t free_count;
    uint64_t free_offset; /* uint32_t[max] */
    char pad[40];
} frt_pool;

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t abi; /* hash of every struct's size: refuses another build's idea of this page */
    uint64_t total_bytes;
    uint32_t clients_max, clients_limit; /* slots there can be (see bits.h); those that workers and actors may take */
    uint32_t words, planes_max; /* 64 clients each, beside every object's state word; planes for the others */
    uint32_t objects_max, tasks_max, ring_max, pages_max;
    uint64_t locks_offset, clients_offset, ctl_offset, entries_offset, task_words_offset, tasks_offset,
        free_objects_offset, free_tasks_offset, ring_offset, functions_offset, pages_offset, links_offset,
        owners_offset, bits_offset, trace_offset, payload_offset, actors_offset, ranked_offset, planes_offset;
    uint64_t session[2]; /* 128 random bits */
    uint64_t boot_hash, pid_namespace;
    uint32_t uid, node;
    uint64_t static_end; /* ---- fixed at creation up to here, covered by static_crc ---- */
    uint32_t static_crc;
    uint32_t state; /* FRT_SEG_*; committed last */
    int32_t daemon_pid;
    uint32_t trace_on; /* 0, or by which clock the clients record: frt_superblock.trace_clock */
    uint64_t daemon_start;
    char poison[128];

    uint64_t next_objref __attribute__((aligned(64))); /* clients take ranges of 2^16 */
    uint32_t death_epoch;                              /* bumped after each recovery, so that sleepers look again */
    uint32_t janitor_victim;                           /* client + 1 while a recovery is under way */
    uint32_t planes, planes_opened; /* in use, and ever in use; committed before a client of one is admitted */
    uint32_t actors_committed;      /* actor records that have memory */
    frt_pool objects __attribute__((aligned(64)));
    frt_pool tasks __attribute__((aligned(64)));

    uint64_t ring_head __attribute__((aligned(64))); /* of the ready queue; changed under its lock */
    uint32_t ranked;       /* tasks in the heap of those with a priority; derived, under the ready queue's lock */
    uint32_t ranked_cells; /* how many it has memory for; committed before a task of a higher index may be there */
    uint64_t ring_tail __attribute__((aligned(64)));
    uint64_t idle[FRT_CALLER_WORDS] __attribute__((aligned(64))); /* bit c: client c sleeps for want of a task */
    uint32_t spinner;                              /* client + 1 of the one idle worker that spins */
    uint32_t ring_cells;                           /* a power of two; committed after the cells are moved */
    uint32_t wanted_workers;                       /* how many workers should be able to run now */
    uint32_t actors_fresh;                         /* actor records at this index and beyond were never used */
    uint32_t function_slots;                       /* that there is memory for; committed before one is used */
    uint32_t load_watcher;                         /* client + 1 that the next change of the load wakes; 0: none */

    uint32_t pages_committed __attribute__((aligned(64)));
    uint32_t bin_head[FRT_BINS];      /* free runs, derived */
    uint32_t slab_head[FRT_CLASSES];  /* slab pages with a free block, derived */
    uint64_t used_pages;              /* statistics, repairable */

    uint32_t clock; /* counted up by the daemon now and then: how long ago a value was used */
    uint32_t spill_rounds; /* rounds of spilling that have ended; a client that waits for room watches it */
    uint64_t spill_freed;  /* bytes that the last round freed */
    uint64_t spilled_objects, spilled_bytes, restored_objects, restored_bytes; /* totals */
    char spill_error[128];
    char spill_dir[256]; /* where the files are, each named by its objref in hex */
    uint32_t held;      /* first task that waits to be admitted, index + 1; derived, under the links lock */
    uint32_t held_news; /* futex: bumped when a task is put there, and when one that had been there has ended */
    uint32_t trace_clock; /* FRT_CLOCK_*: of all records of the session */
    int64_t trace_ticks, trace_ns; /* one moment by that clock and by the monotonic one */
} frt_superblock;

/* One per client. Written by its owner, the daemon (join, leave) and whoever wakes it. */
typedef struct {
    uint64_t word; /* {FRT_CLIENT_*, -, gen} */
    int32_t pid;
    uint32_t kind;
    uint64_t starttime;
    /* Intents: what this client was about to tell others; recovery tells them. Index + 1, or 0. */
    uint32_t sealing; /* object: sealed or about to be, its waiters not yet told */
    uint32_t pushing; /* task: ready or about to be, perhaps not yet in the ring */
    uint32_t task;    /* the task this worker runs, index + 1: a hint for status and cancel */
    uint32_t blocked; /* depth of gets that sleep inside a task */
    uint64_t job;     /* of the driver on whose behalf it works now */
    uint64_t tasks_done;
    char pad0[56];
    uint32_t wake __attribute__((aligned(64))); /* futex: bumped by whoever has news for this client */
    uint32_t sleepers;                          /* its threads in the futex */
    char pad1[56];
    char name[64];
} frt_client;

/* Beside each entry, in a dense array that recovery scans, lies its control block of 1 + 3 * words words:
 *   state | ref bits | pin bits | wait bits      one bit per client in each
 * ref: the client holds a reference. pin: it has the bytes mapped. wait: wake it when this is sealed. The bits of
 * clients from 64 * words on lie elsewhere, see bits.h. */
typedef struct {
    uint64_t objref;
    uint64_t bytes;
    uint64_t offset;  /* of the payload from the segment's start; 0: the value is in `inlined` */
    uint32_t counted; /* contained-in and argument-of holds; derived, under the links lock */
    uint32_t task;    /* index + 1 of the task that will seal it; when FREEING: of the next one to free */
    uint32_t waiter;  /* first task that waits for it, index + 1; derived, under the links lock */
    uint32_t nrefs;   /* contained refs: frt_refslot[nrefs] at the end of the payload */
    uint16_t kind;    /* how the value is written; the store's business */
    uint8_t flags;
    uint8_t pad0;
    union { /* an actor's own object is never an item */
        uint32_t actor; /* with FRT_ENTRY_ACTOR: index + 1 of the actor that lives as long as this object */
        uint32_t next;  /* of an unread item of a stream: the one after it, index + 1; under the links lock */
    };
    uint32_t site;  /* the line of code that made it, by a number for people who look; 0: nobody wrote it down */
    uint32_t used; /* the superblock's clock when it was last read: what has not been used for long is spilled first */
    char inlined[FRT_INLINE_BYTES];
} frt_entry;

enum {
    FRT_ENTRY_COUNTED = 1, /* its contained refs are in their `counted` words */
    FRT_ENTRY_ERROR = 2,   /* get raises the value */
    FRT_ENTRY_FILE = 4,    /* there may be a file of its bytes */
    FRT_ENTRY_ACTOR = 8,   /* an actor ends with it */
    FRT_ENTRY_STREAM = 16, /* its value is a frt_stream */
    FRT_ENTRY_READ = 32    /* an error that was read; of an actor's object: its calls have said why it is dead */
};

/* A stream: what a generator has produced and nobody has read. It is the value of an object of its own, in the entry;
 * readers have references to that object, and the generator's task names it as the last of its refs.
 *
 * The items are sealed objects, in a list from `head` through their entries' `next`. Under the links lock they are
 * added at the end by the task and taken from the front by any reader, each by one store: of `next` (or of `head`, when
 * there was no item) and of `head`. The list counts its items, like a container, and the rest is derived from it. How
 * many were ever produced is therefore what was taken and what is in the list: an attempt that runs the task again
 * from its beginning leaves out so many. The end of the stream is that of the task: its only result is sealed, with an
 * error if that ended it; whoever sees this and then no item has read everything.
 * Whoever waits, readers for items or the task for room, is among the waiters of the stream's object.
 * Where the readers are on another node, one process takes the items for them, and alone writes how many of those it
 * took they have not read (`away`, unread like those in the list) and what they want (`elsewhere`). When it dies its
 * hold of the object is gone, too, and both mean nothing. */
typedef struct {
    uint64_t head;     /* {items taken:32 | first item, index + 1:32}; read without the lock, too */
    uint64_t produced; /* items ever added; derived */
    uint32_t last;     /* newest item, index + 1; derived */
    uint32_t limit;    /* unread items from which on the task waits; 0: it never does */
    uint32_t away;
    uint32_t elsewhere; /* 1 + what they want at most: nothing, the end, items; 0: what those here want */
} frt_stream;

typedef struct {
    uint64_t objref;
    uint32_t index;
    uint32_t pad;
} frt_refslot;

/* Life of an entry: EMPTY -> RESERVED -> (PENDING ->) SEALED -> DELETING -> (back to SEALED, or) FREEING -> RESERVED.
 * A holder sets its bit first and looks at the state second; a deleter sets DELETING first and looks at refs,
 * pins and `counted` second, in this order. So one of the two always sees the other, and a hold that moves from
 * one kind to the next (ref -> counted when a task takes it, counted -> ref when a worker reads it) is never
 * missed: whoever takes a bit and sees DELETING swaps it back to SEALED, and the deleter's swap to FREEING fails. */

/* A task. body: results[nreturns], then refs[nrefs] (the first ndeps must be sealed before it runs), then
 * the arguments' bytes; in `inlined` or in a block of the arena. Immutable from READY/WAITING on, but for the
 * fields marked *, which change under the links lock or by the client that the state word names. */
typedef struct {
    uint64_t id; /* an objref of its own: unique, and grows with submission */
    uint64_t function; /* objref of the function's object */
    uint64_t job;      /* {gen, client} of the driver it belongs to */
    uint64_t cancelled; /* * frt_cancel_word; swapped: one too late must neither hit nor spare the next tenant */
    uint64_t offset;   /* of the body; 0: inlined */
    uint64_t path;     /* what the program knows it by: FRT_PATH_STEP times its parent's, 0 for a driver, and its number
                        * among those that the parent submitted. The same in every run of the same program. Within
                        * a job it also says who is whose child */
    uint32_t function_index;
    uint32_t bytes; /* of the arguments */
    uint32_t nreturns, nrefs, ndeps;
    uint32_t waiter;  /* * next in the waiter list of the object it waits for, index + 1 */
    uint32_t dep;     /* * the dependency that it waits for */
    uint32_t actor;   /* index + 1: this is a call of an actor's method number `function_index`, and `waiter` (index
                       * + 1) with `dep` (generation) names the call before it in the mailbox; 0: a plain task */
    uint16_t kind;    /* how the arguments are written */
    uint8_t flags;    /* * FRT_TASK_COUNTED, FRT_TASK_LINKED */
    uint8_t attempts; /* * runs started */
    uint8_t retries;  /* runs allowed beyond the first */
    uint8_t signal;   /* * that ended the last attempt */
    /* Of a call: the client that made it, for their order; of a task: how often nodes have lent it. */
    union {
        uint16_t caller;
        struct { uint8_t hops; int8_t priority; }; /* priority: of a RANKED task, which is no call */
    };
    char inlined[FRT_TASK_INLINE_BYTES];
} frt_task;

/* A task that DEMANDs resources: the last of its ndeps names the object that says which. It has READY only from the
 * daemon, once its arguments are sealed and what it demands is free; until then it is WAITING with dep == ndeps. What
 * is in use is therefore never counted anywhere: it is what the tasks beyond WAITING that have this flag demand. */
enum {
    FRT_TASK_COUNTED = 1,
    FRT_TASK_RETRY_ERRORS = 2,
    FRT_TASK_LINKED = 4, /* in a waiter list */
    FRT_TASK_DEMAND = 8,
    FRT_TASK_STREAM = 16, /* the last of its refs is the stream of what it yields */
    FRT_TASK_POLICY = 32, /* the last of its refs but that names the object that says how it is run */
    FRT_TASK_LATE = 64,   /* it ran for too long: its worker ends for it, and it is not run again */
    FRT_TASK_RANKED = 128 /* it has a priority: when READY it is in the heap beside the ready queue */
};

/* frt_task.cancelled: {the task's id without its two highest bits, the same in all of a node:62 | FRT_CANCEL_*:2}.
 * FORCE: the process that runs it shall end for it, if it can; ALONE: what it has submitted is spared. */
enum { FRT_CANCEL_FORCE = 1, FRT_CANCEL_ALONE = 2 };
static inline uint64_t frt_cancel_word(uint64_t id, unsigned how) { return id << 2 | how; }
static inline int frt_cancels(uint64_t cancelled, uint64_t id) { return (cancelled ^ id << 2) < 4; }

/* A cell of that heap: the smallest key is taken first. `cell` is as in the ring. */
typedef struct {
    uint64_t key; /* {127 - priority:8 | the task's id without its node:48} */
    uint64_t cell;
} frt_ranked;

typedef struct {
    uint64_t hash[2];
    uint64_t objref; /* committed last; 0: free; all ones: swept */
    uint32_t index;
    uint32_t pad; /* marks, see functions.pyx: may be swept, is being swept */
    char name[64]; /* for people: messages must not need the function's own modules */
} frt_function;

/* An actor: an object that its handles refer to, a process of its own, and a mailbox.
 *
 * The calls are task records, and those are the truth; the mailbox is a hint: a list of them, newest first, that any
 * caller pushes to by one swap and that only the actor's process takes, all at once. A call is pushed before its word
 * says READY, so a READY call has been pushed, and a record is never linked twice in one life. Links carry
 * generations: one that does not fit its record (cancelled, ended) breaks the list, and the calls are looked up in
 * the table of tasks instead, as they are by each new process of the actor.
 * `word` changes by its process (STARTING, LIVE), by recovery (DOWN) and by the daemon (the rest). Whoever makes a
 * call stores READY and then looks for DEAD; the daemon stores DEAD and then looks for READY calls: one of them ends
 * a late call. The record counts its object (COUNTED) until the instance is built, because how to build it stands
 * there, and for good when it is DETACHED. It is freed when it is swept and its object is gone, by whoever sees
 * that last. */
typedef struct {
    uint64_t word;     /* {FRT_ACTOR_*, client, -, gen} */
    uint64_t mailbox;  /* {gen:32 | task + 1:32} of the newest call; 0: nothing new */
    uint32_t asleep;   /* its process sleeps or is about to: wake it */
    uint32_t rescan;   /* there may be READY calls outside of the mailbox */
    uint32_t released; /* its object is gone, so nobody can make another call */
    uint32_t ended;    /* why it shall not be started again; 0: it may be */
    uint32_t swept;    /* it is DEAD, and the calls that were there have been taken to be ended */
    char pad[28];
    uint64_t function __attribute__((aligned(64))); /* objref of its class */
    uint64_t objref;
    uint32_t index; /* of its object */
    int32_t max_restarts; /* -1: any number */
    uint32_t restarts;
    uint8_t flags;
    uint8_t pad1[3];
    uint64_t demand; /* objref of what it takes while it lives; its object keeps that, or the functions; 0: nothing */
    uint32_t demand_index;
    uint32_t order;        /* of one that is AWAY: FRT_ORDER_*, for the client that stands for its process */
    uint8_t pad2[12];
    char name[64];
    char reason[448]; /* why it is DEAD, or will be */
    char how[256];    /* its last process ended; written before the word says DOWN, and empty while it is WANTED */
} frt_actor;

/* BARE: there is no process. It only holds what it demands, and nobody calls it; the client of the word is the daemon.
 * What is reserved for a placement group is such a record, so that it lives, moves and ends as an actor does. */
enum { FRT_ACTOR_COUNTED = 1, FRT_ACTOR_DETACHED = 2, FRT_ACTOR_BARE = 4 };
enum { FRT_ORDER_NONE = 0, FRT_ORDER_KILL = 1 };
enum { FRT_END_KILLED = 1, FRT_END_FAILED = 2, FRT_END_EXITED = 3 }; /* frt_actor.ended */

/* Per page, derived, under the lock of whoever owns the page: neighbours in a bin or slab list. */
typedef struct {
    uint32_t next, prev; /* page index, or FRT_NONE */
    uint32_t back;       /* on the last page of a free run: its first page */
    uint32_t listed;
} frt_page_link;

enum { FRT_CLOCK_MONOTONIC = 1, FRT_CLOCK_TSC = 2 };

/* What a client did, from when to when. Written by it alone, with the interpreter's lock held; read by anybody without
 * a lock. A death leaves what it was doing without an end. */
typedef struct {
    int64_t start, end; /* by the session's trace_clock; end is 0 while it lasts */
    uint64_t id;              /* of the task, the object, the process */
    uint32_t what;            /* the function's entry or a method's number; of a value, its size in KiB */
    uint16_t kind;
    uint16_t actor; /* index + 1 */
} frt_trace_record;

typedef struct {
    uint64_t count; /* records ever begun; the last FRT_TRACE_RECORDS are there */
    char pad[56];
    frt_trace_record records[FRT_TRACE_RECORDS];
} frt_trace_ring;

_Static_assert(sizeof(frt_pool) == 64, "frt_pool");
_Static_assert(sizeof(frt_trace_record) == 32, "frt_trace_record");
_Static_assert(sizeof(frt_client) == 256, "frt_client");
_Static_assert(sizeof(frt_entry) == 128, "frt_entry");
_Static_assert(offsetof(frt_entry, inlined) == 56, "an entry and its small value are two cache lines");
_Static_assert(sizeof(frt_stream) <= FRT_INLINE_BYTES, "a stream lies in its entry");
_Static_assert(sizeof(frt_task) == 256, "frt_task");
_Static_assert(sizeof(frt_function) == 96, "frt_function");
_Static_assert(sizeof(frt_ranked) == 16, "frt_ranked");
_Static_assert(sizeof(frt_actor) == 896, "frt_actor");
_Static_assert(sizeof(frt_superblock) <= 4096, "the superblock is one page");

/* ---- one process's view ----------------------------------------------------------------------------------- */
/* Geometry is copied here once, at attach, and never read from the segment again. */
typedef struct {
    char *base;       /* read-write mapping */
    const char *view; /* read-only mapping: what users get to see */
    uint64_t total_bytes;
    int fd;
    frt_superblock *sb;
    frt_lock *locks;
    frt_client *clients;
    uint64_t *ctl;
    uint64_t *planes;
    frt_entry *entries;
    uint64_t *task_words;
    frt_task *tasks;
    uint64_t *ring; /* {gen:32 | task:32} */
    frt_ranked *ranked;
    frt_function *functions;
    frt_actor *actors;
    uint64_t *pages;
    frt_page_link *links;
    uint32_t *owners;
    uint64_t *bits;
    frt_trace_ring *traces;
    uint64_t payload_offset;
    uint32_t words, stride; /* stride: 1 + 3 * words */
    uint32_t clients_max, clients_limit, planes_max;
    uint32_t objects_max, tasks_max, pages_max, ring_max, functions_max, node;
    uint32_t *free_objects, *free_tasks;

    uint32_t me; /* client index */
    uint32_t gen;
    uint32_t me_word;
    uint64_t me_bit;
    uint64_t *mine;                    /* the word of entry 0 that has this client's ref bit */
    uint32_t mine_stride, mine_kinds;  /* words from there to the next entry's, and to the next kind of bits */
    uint64_t next_objref, end_objref;
    uint32_t trace_ready; /* 1: there is memory for this process's ring; 2: there was none */
    uint32_t objects_kept, tasks_kept;
    uint64_t path; /* of the last task that was submitted; where none was yet, what theirs count up from */
    uint32_t objects[FRT_MAGAZINE], tasks_free[FRT_MAGAZINE];
    uint32_t *refs_held, *pins_held; /* per entry: this process's own counts behind its bits */
} frt_ctx;

static inline uint64_t *frt_state(const frt_ctx *x, uint32_t i) { return x->ctl + (size_t)i * x->stride; }

#include "bits.h"

/* ---- what others wrote ----------------------------------------------------------------------------------------
 * A process with a stray pointer leaves any number anywhere. So every index, offset and count from the segment is
 * copied once, held against this process's own geometry, and then used. Whoever reads without a lock or a hold may
 * see another tenant's numbers: to him a wrong one only means that what he looked for is gone. */

/* Something impossible stands under a lock or in a record: from here on each call of a client raises ArenaCorrupt. */
static inline int frt_broken(const frt_ctx *x, const char *why) {
    uint32_t ready = FRT_SEG_READY;
    if (a32_load_acq(&x->sb->state) == FRT_SEG_READY) {
        for (size_t i = 0; i < sizeof x->sb->poison; i++) {
            x->sb->poison[i] = *why;
            if (*why) why++;
        }
        __atomic_compare_exchange_n(&x->sb->state, &ready, FRT_SEG_POISONED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    return FRT_CORRUPT;
}

static inline uint32_t frt_most(const uint32_t *word, uint32_t most) {
    uint32_t n = a32_load_acq(word);
    return n < most ? n : most;
}
/* How many records of each table and pages of the payload there are to look at. */
static inline uint32_t frt_objects(const frt_ctx *x) { return frt_most(&x->sb->objects.fresh, x->objects_max); }
static inline uint32_t frt_tasks(const frt_ctx *x) { return frt_most(&x->sb->tasks.fresh, x->tasks_max); }
static inline uint32_t frt_pages(const frt_ctx *x) { return frt_most(&x->sb->pages_committed, x->pages_max); }
static inline uint32_t frt_functions(const frt_ctx *x) { return frt_most(&x->sb->function_slots, x->functions_max); }
static inline uint32_t frt_actors(const frt_ctx *x) { return frt_most(&x->sb->actors_fresh, FRT_ACTORS); }

/* The memory at an offset if so many bytes of a block fit there, else NULL. */
static inline char *frt_inside(const frt_ctx *x, uint64_t offset, uint64_t nbytes) {
    if (offset < x->payload_offset || offset > x->total_bytes || offset & 63) return NULL;
    if (nbytes > x->total_bytes - offset) return NULL;
    return x->base + offset;
}

/* How many of a task's refs, the last ones, are no argument's. */
static inline uint32_t frt_task_extras(uint8_t flags) {
    return (flags & FRT_TASK_STREAM ? 1 : 0) + (flags & FRT_TASK_POLICY ? 1 : 0);
}

/* A task's body as one reader sees it; see frt_task. */
typedef struct {
    frt_refslot *results, *refs;
    const char *args;
    uint32_t nreturns, nrefs, ndeps, bytes;
} frt_body;

/* 1 when all of the body lies where it may; else 0, and the body is empty. */
static inline int frt_task_body(const frt_ctx *x, uint32_t t, frt_body *b) {
    frt_task *task = x->tasks + t;
    uint64_t offset = a64_load_rlx(&task->offset), room;
    b->nreturns = a32_load_rlx(&task->nreturns);
    b->nrefs = a32_load_rlx(&task->nrefs);
    b->ndeps = a32_load_rlx(&task->ndeps);
    b->bytes = a32_load_rlx(&task->bytes);
    room = ((uint64_t)b->nreturns + b->nrefs) * sizeof(frt_refslot) + b->bytes;
    char *at = offset ? frt_inside(x, offset, room) : room <= FRT_TASK_INLINE_BYTES ? task->inlined : NULL;
    if (!at || b->ndeps > b->nrefs) {
        memset(b, 0, sizeof *b);
        return 0;
    }
    b->results = (frt_refslot *)at;
    b->refs = b->results + b->nreturns;
    b->args = (const char *)(b->refs + b->nrefs);
    return 1;
}

/* The refs that a value contains, after its bytes, at the next multiple of 8; n of them, 0 when they lie wrong. */
static inline frt_refslot *frt_entry_refs(const frt_ctx *x, uint32_t i, uint32_t *n) {
    frt_entry *entry = x->entries + i;
    uint64_t offset = a64_load_rlx(&entry->offset), nbytes = a64_load_rlx(&entry->bytes);
    uint64_t start = (nbytes + 7) & ~(uint64_t)7, room;
    char *at = NULL;
    *n = a32_load_rlx(&entry->nrefs);
    if (*n && nbytes <= x->total_bytes) {
        room = start + *n * sizeof(frt_refslot);
        at = offset ? frt_inside(x, offset, room) : room <= FRT_INLINE_BYTES ? entry->inlined : NULL;
    }
    if (!at) *n = 0;
    return at ? (frt_refslot *)(at + start) : NULL;
}

/* The number of the lowest bit that is set; there is one. */
static inline int frt_lowest(uint64_t v) { return __builtin_ctzll(v); }

/* The stream that lies in entry i, which says so. */
static inline frt_stream *frt_stream_of(const frt_ctx *x, uint32_t i) { return (frt_stream *)x->entries[i].inlined; }

#endif
