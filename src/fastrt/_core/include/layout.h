/* Every struct in the shared segment, and each process's view of the segment.
 *
 * A process may die between any two instructions. Four rules keep the segment valid all the same:
 *  1. Each record has one 8-byte state word {state, client that changes it, generation: how often it was reused}. A
 *     change becomes visible, and is committed, by one aligned store or compare-and-swap of that word.
 *  2. Free stacks, bitmaps, lists, rings, counters and all else are derived: rebuilt from those words after a death.
 *  3. Positions are indexes, or offsets from the segment's start; never pointers.
 *  4. No process touches memory beyond a region's committed mark: fallocate has not reserved it yet.
 *
 * Locks, outermost first. A thread that holds one may take only those to its right:
 *     janitor > slots > actors > functions > (threads.h) > links > queue > objects/tasks pool > size class > extent
 * `grow` is taken while no other lock is held, or inside `slots` or `actors`; only `extent` is taken inside `grow`.
 * In fields that hold "index + 1", 0 means none. */
#ifndef FRT_LAYOUT_H
#define FRT_LAYOUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "atomic.h"
#include "lock.h"

#define FRT_MAGIC 0x3130547274736166ULL /* "fastrT01" */
#define FRT_LAYOUT_VERSION 11

/* Error codes of the core; memory/errors.pyx turns them into exceptions. */
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
    FRT_SPILLED = -13, /* internal: the bytes are in a file; restore them and try again */
    FRT_GROW = -12 /* internal: no free run of pages; grow the arena and try again */
};

/* ---- state words: {state:8 | client:16 | state before:8 | gen:32}; "client:" says which client a state names ---- */
enum { /* objects */
    FRT_OBJ_EMPTY = 0,
    FRT_OBJ_RESERVED = 1, /* client: keeps the entry in its private magazine, or is filling it */
    FRT_OBJ_PENDING = 2,  /* a task will seal it; entry.task names the task */
    FRT_OBJ_SEALED = 3,   /* the value is complete and no longer changes */
    FRT_OBJ_DELETING = 4, /* client: the deleter. A holder swaps the word back to the state before (SEALED, SPILLED) */
    FRT_OBJ_FREEING = 5,  /* client: the deleter, past the point of return; a holder that comes now is too late */
    FRT_OBJ_SPILLING = 6, /* client: is copying the value to a file; a client that pins it swaps back to SEALED */
    FRT_OBJ_SPILLED = 7,  /* client: freed the block; the bytes are only in a file, or on another node */
    FRT_OBJ_RESTORING = 8 /* client: is freeing the block or reading the bytes back; no other client touches them */
};
enum { /* tasks */
    FRT_TASK_EMPTY = 0,
    FRT_TASK_RESERVED = 1, /* client: keeps the record in its private magazine, or is filling it */
    FRT_TASK_WAITING = 2,  /* client: made it WAITING, for an argument or for resources */
    FRT_TASK_READY = 3,   /* client: made it READY */
    FRT_TASK_CLAIMED = 4, /* client: popped it and has not entered user code */
    FRT_TASK_RUNNING = 5, /* client: runs it */
    FRT_TASK_BLOCKED = 6, /* client: runs it, and sleeps in a get or wait */
    FRT_TASK_ENDING = 7   /* client: seals the results with an error outside a worker (cancel, death) */
};
enum { /* actors */
    FRT_ACTOR_EMPTY = 0,
    FRT_ACTOR_WANTED = 1,   /* the daemon is to start a process for it */
    FRT_ACTOR_STARTING = 2, /* client: its process, which builds the instance */
    FRT_ACTOR_LIVE = 3,     /* client: its process, which takes calls */
    FRT_ACTOR_DOWN = 4,     /* its process has died; the daemon decides whether it gets another */
    FRT_ACTOR_DEAD = 5,     /* finally: every caller ends its own calls with an error, see frt_actor */
    FRT_ACTOR_AWAY = 6      /* client: forwards its calls to another node, where its process runs */
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
/* The DELETING word keeps the state before it; frt_word_undeleted gives the word that undoes the deletion. */
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
#define FRT_BINS 32              /* lists of free runs, by the logarithm of the run's length */
#define FRT_OWNER_TASK 0x80000000u /* an owner word is entry index + 1, or this | task index + 1 */
#define FRT_INLINE_BYTES 72      /* values up to this size live in the entry itself */
#define FRT_PATH_STEP 0x9E3779B97F4A7C15ULL /* odd: sums of its powers with small factors all differ */
#define FRT_TASK_INLINE_BYTES 160
#ifdef FRT_FAILPOINTS /* small sizes, so that the small workloads of a kill test reach every growth step */
#define FRT_COMMIT_RECORDS 64
#define FRT_COMMIT_BYTES (1u << 18)
#define FRT_FUNCTIONS 64 /* initial slots of the function table */
#define FRT_FUNCTION_PROBES 4
#define FRT_ACTORS 32
#define FRT_ACTORS_STEP 16
#define FRT_RING_CELLS 16
#else
#define FRT_COMMIT_RECORDS 8192 /* records whose memory is committed in one step; about 1.5 MiB */
#define FRT_COMMIT_BYTES (64u << 20) /* payload committed in one step */
#define FRT_FUNCTIONS 16384 /* initial slots of the function table */
#define FRT_FUNCTION_PROBES 64 /* slots to try for a function; if all are taken, the next table is used */
#define FRT_ACTORS 8192 /* most actor records; a dead actor keeps its record while a handle exists */
#define FRT_ACTORS_STEP 1024 /* actor records whose memory is committed in one step */
#define FRT_RING_CELLS 16384 /* initial cells of the ready queue; they double up to ring_max */
#endif
#define FRT_CLIENTS_MOST 8192
#define FRT_CLIENTS_DENSE 256 /* most clients that have their bits beside each object's state word */
#define FRT_SLOTS_BEYOND 4    /* slots above the limit, for drivers and tools that join when the table is full */
#define FRT_PLANE_WORDS 4
#define FRT_PLANE_CLIENTS (64 * FRT_PLANE_WORDS)
#define FRT_PLANE_BYTES (3 * 8 * FRT_PLANE_WORDS) /* per entry */
#define FRT_SLOTS_MOST (FRT_CLIENTS_MOST + FRT_PLANE_CLIENTS)
enum { FRT_CALLER_WORDS = FRT_SLOTS_MOST / 64 }; /* words of a set of clients */
#define FRT_CELL_BYTES 8
#define FRT_PRIORITY_MAX 100 /* priorities are -100 to 100: a signed byte in the task's record */
#define FRT_TRACE_RECORDS 16384 /* per client; half a MiB, committed when the client first records */
#define FRT_SPILL_BYTES_MIN 16384u /* smaller values are not spilled: a file each would cost more than it frees */
#define FRT_MAGAZINE 128 /* most free records that a client keeps in its private magazine */

enum { /* locks[] */
    FRT_LOCK_JANITOR = 0,
    FRT_LOCK_SLOTS,
    FRT_LOCK_ACTORS,
    FRT_LOCK_FUNCTIONS,
    FRT_LOCK_LINKS, /* the `counted` words (contained and argument refs), waiter lists, streams */
    FRT_LOCK_QUEUE,
    FRT_LOCK_OBJECTS,
    FRT_LOCK_TASKS,
    FRT_LOCK_CLASS0,
    FRT_LOCK_EXTENT = FRT_LOCK_CLASS0 + FRT_CLASSES,
    FRT_LOCK_GROW,
    FRT_LOCKS
};

/* The free records of a table: a stack, derived from the state words, that changes only under the pool's lock. */
typedef struct {
    uint32_t max;
    uint32_t committed;   /* records that have memory */
    uint32_t fresh;       /* records from this index on have never been used */
    uint32_t free_count;
    uint64_t free_offset; /* the stack: uint32_t[max] */
    char pad[40];
} frt_pool;

#include "outcomes.h"

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t abi; /* hash of every struct's size: a build with another layout does not attach */
    uint64_t total_bytes;
    uint32_t clients_max, clients_limit; /* most slots (see bits.h); slots that workers and actors may take */
    uint32_t words, planes_max; /* words of 64 clients' bits beside each state word; most planes for other clients */
    uint32_t objects_max, tasks_max, ring_max, pages_max;
    uint64_t locks_offset, clients_offset, ctl_offset, entries_offset, task_words_offset, tasks_offset,
        free_objects_offset, free_tasks_offset, ring_offset, functions_offset, pages_offset, links_offset,
        owners_offset, bits_offset, trace_offset, payload_offset, actors_offset, ranked_offset, planes_offset,
        tallies_offset, failure_words_offset, failures_offset;
    uint64_t session[2]; /* 128 random bits */
    uint64_t boot_hash, pid_namespace;
    uint32_t uid, node;
    uint64_t static_end; /* ---- all above is fixed at creation and covered by static_crc ---- */
    uint32_t static_crc;
    uint32_t state; /* FRT_SEG_*; READY is stored last */
    int32_t daemon_pid;
    uint32_t trace_on; /* 0: clients record nothing; else trace_clock. Derived, see frt_client.recordings */
    uint64_t daemon_start; /* start time of the daemon's process: pid and start time name one process */
    char poison[128];      /* why the segment is POISONED or CLOSED */

    uint64_t next_objref __attribute__((aligned(64))); /* clients take ranges of 2^16 */
    uint32_t death_epoch;                              /* bumped after each recovery, so that sleepers look again */
    uint32_t janitor_victim;                           /* client + 1 whose recovery is under way */
    uint32_t planes, planes_opened; /* in use now, and ever; stored before a client of the plane is admitted */
    uint32_t actors_committed;      /* actor records that have memory */
    frt_pool objects __attribute__((aligned(64)));
    frt_pool tasks __attribute__((aligned(64)));

    uint64_t ring_head __attribute__((aligned(64))); /* the ready queue: head and tail change under its lock */
    uint32_t ranked;       /* tasks in the heap of tasks with a priority; derived, under the ready queue's lock */
    uint32_t ranked_cells; /* heap cells that have memory; grows before a task of a higher index gets a priority */
    uint32_t ahead;        /* cells at the ring's front that were pushed there; a hint, as is the next */
    uint32_t ahead_in_row; /* how often that was done since a cell was taken that was pushed at the end */
    uint64_t ring_tail __attribute__((aligned(64)));
    uint64_t idle[FRT_CALLER_WORDS] __attribute__((aligned(64))); /* bit c: client c sleeps until a task is pushed */
    uint32_t spinner;                              /* client + 1 of the one idle worker that spins */
    uint32_t ring_cells;                           /* a power of two; stored (commit) after the cells are moved */
    uint32_t wanted_workers;                       /* how many workers should be able to run now */
    uint32_t actors_fresh;                         /* actor records from this index on have never been used */
    uint32_t function_slots;                       /* slots that have memory; stored before one is used */
    uint32_t load_watcher;                         /* client + 1 that the next change of the load wakes; 0: none */

    uint32_t pages_committed __attribute__((aligned(64)));
    uint32_t bin_head[FRT_BINS];      /* free runs, derived */
    uint32_t slab_head[FRT_CLASSES];  /* slab pages with a free block, derived */
    uint64_t used_pages;              /* statistics, repairable */

    uint32_t clock; /* the daemon increments it now and then; entry.used is this clock's value at the last use */
    uint32_t spill_rounds; /* rounds of spilling that have ended; a client that waits for room watches it */
    uint64_t spill_freed;  /* bytes that the last round freed */
    uint64_t spilled_objects, spilled_bytes, restored_objects, restored_bytes; /* totals */
    char spill_error[128];
    char spill_dir[256]; /* the folder of the spill files, each named by its objref in hex */
    uint64_t mapped_objects, mapped_bytes; /* totals of values that found no room and were written to files */
    uint32_t falls_back; /* 1: such values go to files; 0: they wait for room */
    uint32_t held;      /* first task in the list of those that wait for admission, index + 1; derived, links lock */
    uint32_t held_news; /* futex: bumped when a task enters the list or has left it and ended, or a worker is parked */
    uint32_t trace_clock; /* FRT_CLOCK_*: the clock of all trace records of the session */
    int64_t trace_ticks, trace_ns; /* the session's start by trace_clock and by the monotonic clock */
    uint64_t failures;             /* numbers given to failures, see frt_failure */
    uint32_t traced, rooms_failed; /* 1: the session records all its life; failed waits for room, see `fail_first` */
} frt_superblock;

/* One per client. Its owner writes it, the daemon (join, leave) and the processes that wake it. */
typedef struct {
    uint64_t word; /* {FRT_CLIENT_*, -, gen} */
    int32_t pid;
    uint32_t kind; /* FRT_KIND_* */
    uint64_t starttime; /* of the process: pids are reused */
    /* Intents: notifications that this client is about to make. If it dies, recovery makes them. Index + 1, or 0. */
    uint32_t sealing; /* object: sealed or about to be sealed, its waiters not yet notified */
    uint32_t pushing; /* task: READY or about to be, perhaps not yet in the ring */
    uint32_t task;    /* the task that this worker runs, index + 1: a hint for status and cancel */
    uint32_t blocked; /* depth of gets that sleep inside a task */
    uint64_t job;     /* of the driver or uplink for which it works now */
    uint64_t tasks_done;
    /* The devices (GPUs) that this process has used or may use: bit k is device k of the node. A worker or an actor's
     * process stores them once, before user code runs, `devices` last (commit); they are its own until it has ended. */
    uint64_t device_holder; /* the worker's task, by its id; the actor, as {gen:32 | index:32} */
    uint32_t device_parts;  /* of each of these devices, in parts of 1/10,000 */
    uint32_t devices;
    /* Of the slot, not of its client: these outlive it, and the slot's next client continues them; see frt_tally. */
    uint64_t other[FRT_OUTCOMES]; /* counts of functions without a row */
    uint32_t tallies; /* rows of this slot; stored (commit) after the row is complete */
    uint32_t wake __attribute__((aligned(64))); /* futex: a process with news for this client bumps it */
    uint32_t sleepers;                          /* threads of this client that sleep in the futex */
    /* Recordings of the session that this client makes: only it changes them, and recovery, which makes them 0. The
     * session records while any client has one, or `traced` is set: a process that has changed a count stores
     * `trace_on` and then looks at all counts again, until they agree; see trace.pyx. It ends with its process. */
    uint32_t recordings;
    uint32_t parked; /* 1: this worker takes no task, as others use its CPU; the daemon's */
    uint32_t departed, pad1[11]; /* departed: 1: it has left by itself, so what it has submitted goes on */
    char name[64];
} frt_client;

/* One per object. Its control block of 1 + 3 * words words lies in a separate dense array, which recovery scans:
 *   state | ref bits | pin bits | wait bits      one bit per client in each
 * ref: the client holds a reference. pin: the client has the bytes mapped. wait: wake the client when the object is
 * sealed. The bits of clients from 64 * words on are in planes, see bits.h. */
typedef struct {
    uint64_t objref;
    uint64_t bytes;
    uint64_t offset;  /* of the payload from the segment's start; 0: the value is in `inlined` */
    uint32_t counted; /* holds by containers and by tasks (arguments); derived, under the links lock */
    uint32_t task;    /* index + 1 of the task that will seal it; when FREEING: index + 1 of the next entry to free */
    uint32_t waiter;  /* first task that waits for it, index + 1; derived, under the links lock */
    uint32_t nrefs;   /* contained refs: frt_refslot[nrefs] at the end of the payload */
    uint16_t kind;    /* how the value is encoded: below 16 a scalar (scalar.pxd), else the store's choice */
    uint8_t flags;
    uint8_t maps; /* reads from its file since it is there, up to 255; a hint */
    union { /* an actor's own object is never an item */
        uint32_t actor; /* with FRT_ENTRY_ACTOR: index + 1 of the actor that lives as long as this object */
        uint32_t next;  /* of an unread stream item: the next item, index + 1; under the links lock */
    };
    uint32_t site;  /* number of the source line that made it, for tools; 0: not recorded */
    uint32_t used; /* the superblock's clock at the last read: the longest unused values are spilled first */
    char inlined[FRT_INLINE_BYTES];
} frt_entry;

enum {
    FRT_ENTRY_COUNTED = 1, /* its contained refs are in their `counted` words */
    FRT_ENTRY_ERROR = 2,   /* get raises the value */
    FRT_ENTRY_FILE = 4,    /* there may be a file of its bytes; with contained refs: its block has only those */
    FRT_ENTRY_ACTOR = 8,   /* an actor's object: the actor ends with it */
    FRT_ENTRY_STREAM = 16, /* its value is a frt_stream */
    FRT_ENTRY_READ = 32,   /* an error that a caller has read; an actor's object: a call has raised why it is dead */
    FRT_ENTRY_REMOTE = 64  /* another node keeps the value, see frt_source; bytes in memory here are a copy of it */
};

/* Of a remote value, in `inlined`: the node that has named the object, and its number there. */
typedef struct { uint8_t node[16]; uint64_t objref; } frt_source;

/* A stream: the unread items of a generator. It is the value of an object that exists for it, stored in the entry.
 * Readers have references to that object; the generator's task names it as the last of its refs.
 *
 * The items are sealed objects in a list that starts at `head` and continues through `next` of their entries. Under
 * the links lock the task appends items and any reader takes the first one. One store commits each: to append, `next`
 * of the last item (or `head` of an empty list); to take, `head`. The list holds its items in their `counted` words,
 * as a container does; the other fields are derived from it. The number of items ever produced is therefore the items
 * taken plus the items in the list; a later attempt starts the task from its beginning and skips that many.
 * The stream ends when the task's only result is sealed (with an error if the task failed). A reader that sees the
 * result sealed and then no item has read everything. Readers that wait for items, and the task when it waits for
 * room, are waiters of the stream's object.
 * If the readers are on another node, one process here takes the items for them. Only that process writes `away` and
 * `elsewhere`. When it dies, its hold of the object is dropped, too, and both fields have no meaning. */
typedef struct {
    uint64_t head;     /* {items taken:32 | first item, index + 1:32}; also read without the lock */
    uint64_t produced; /* items ever added; derived */
    uint32_t last;     /* newest item, index + 1; derived */
    uint32_t limit;    /* the task waits while this many items or more are unread; 0: it never waits */
    uint32_t away;      /* items taken for remote readers that they have not read: unread, like those in the list */
    uint32_t elsewhere; /* 1 + the most that remote readers want: nothing, the end, items; 0: no remote readers */
} frt_stream;

typedef struct { /* one reference inside a value or a task: an object by name and place */
    uint64_t objref;
    uint32_t index;
    uint32_t extra; /* of a task's demand: see FRT_TASK_DEMAND; else 0 */
} frt_refslot;

/* Life of an entry: EMPTY -> RESERVED -> (PENDING ->) SEALED -> DELETING -> (back to SEALED, or) FREEING -> RESERVED.
 * A holder sets its bit first and reads the state second. A deleter sets DELETING first and then reads refs, pins and
 * `counted`, in this order. So at least one of the two sees the other. A hold that moves from one kind to the next
 * (ref -> counted when a task takes it, counted -> ref when a worker reads it) is never missed either: a client that
 * sets a bit and sees DELETING swaps the word back to SEALED, and the deleter's swap to FREEING fails. */

/* A task. Its body: results[nreturns], then refs[nrefs] (the first ndeps must be sealed before it runs), then the
 * bytes of the arguments; in `inlined` or in a block of the arena. From READY/WAITING on the record is immutable,
 * except the fields marked *: they change under the links lock, or by the client that the state word names. */
typedef struct {
    uint64_t id; /* taken from the objref counter: unique, and grows with submission */
    uint64_t function; /* objref of the function's object */
    uint64_t job;      /* {tag:16 | gen:32 | client + 1:16} of the driver, or of the uplink for a job of another node */
    uint64_t cancelled; /* * frt_cancel_word. Swapped: a late cancel must not affect the record's next task */
    uint64_t offset;   /* of the body; 0: inlined */
    uint64_t path;     /* FRT_PATH_STEP times the parent's path (0: a driver) plus its number among the parent's tasks:
                        * the same in every run of a program; within a job it also identifies parent and child */
    uint32_t function_index;
    uint32_t bytes; /* of the arguments */
    uint32_t nreturns, nrefs, ndeps;
    uint32_t waiter;  /* * next task in the waiter list of the object it waits for, index + 1 */
    uint32_t dep;     /* * the dependency that it waits for */
    uint32_t actor;   /* 0: a plain task. Else actor index + 1: a call of its method number `function_index`;
                       * `waiter` (index + 1) and `dep` (generation) name the previous call in the mailbox */
    uint16_t kind;    /* how the arguments are encoded */
    uint8_t flags;    /* * FRT_TASK_COUNTED, FRT_TASK_LINKED */
    uint8_t attempts, retries; /* attempts: * runs started; retries: runs allowed beyond the first */
    uint8_t signal;   /* * the signal that ended the last attempt */
    union {
        uint16_t caller; /* of a call: the client that made it; calls of one caller keep their order */
        struct { uint8_t hops; int8_t priority; }; /* of a task: times it was forwarded; priority if RANKED */
    };
    uint32_t before; /* * the task before it in that list, index + 1; of the first task, the last one */
    uint32_t submitter; /* the client that made it, index + 1; once that has ended FRT_ORPHAN, or 0 if departed */
    char inlined[FRT_TASK_INLINE_BYTES]; /* aligned to 8 bytes */
} frt_task;
#define FRT_ORPHAN 0xffffffffu /* its process was killed: it ends once nothing refers to its results */

/* A task with DEMAND needs resources: the last of its ndeps names the object that lists them. Only the daemon makes
 * it READY, when its arguments are sealed and the resources are free; until then it is WAITING with dep == ndeps. So
 * no counter of resources in use exists: they are the demands of all tasks with this flag that are beyond WAITING.
 * `extra` of the demand's refslot has a bit for each device (GPU) that the task was given. The daemon stores it before
 * it makes the task READY (commit); in a task that is WAITING it has no meaning. */
enum {
    FRT_TASK_COUNTED = 1, /* its refs are in their `counted` words */
    FRT_TASK_RETRY_ERRORS = 2, /* an exception in user code is retried, too */
    FRT_TASK_LINKED = 4, /* in a waiter list */
    FRT_TASK_DEMAND = 8,
    FRT_TASK_STREAM = 16, /* the last ref is the stream of the items that it yields */
    FRT_TASK_POLICY = 32, /* the last ref (before the stream, if any) is an object with the options for running it */
    FRT_TASK_LATE = 64,   /* it exceeded its timeout: its worker process ends, and it is not retried */
    FRT_TASK_RANKED = 128 /* it has a priority: when READY it is in the heap beside the ready queue */
};

/* frt_task.cancelled: {the task's id without its two highest bits, which are the same in a whole node:62 |
 * FRT_CANCEL_*:2}. FORCE: end the process that runs it, if possible. ALONE: do not cancel its child tasks. */
enum { FRT_CANCEL_FORCE = 1, FRT_CANCEL_ALONE = 2 };
static inline uint64_t frt_cancel_word(uint64_t id, unsigned how) { return id << 2 | how; }
static inline int frt_cancels(uint64_t cancelled, uint64_t id) { return (cancelled ^ id << 2) < 4; }

/* A cell of the heap of RANKED tasks: the smallest key is taken first. `cell` is as in the ring. */
typedef struct {
    uint64_t key; /* {127 - priority:8 | the task's id without its node:48} */
    uint64_t cell;
} frt_ranked;

typedef struct {
    uint64_t hash[2];
    uint64_t objref; /* stored last (commit); 0: free; all ones: swept */
    uint32_t index;
    uint32_t pad; /* marks, see functions.pyx: may be swept, is being swept */
    char name[64]; /* for messages, which must not need to import the function's modules */
} frt_function;

/* An actor: an object that its handles refer to, its process, and a mailbox.
 *
 * The calls are task records, and the task words decide. The mailbox is a hint: a list of calls, newest first. Any
 * caller pushes by one swap; only the actor's process takes the calls, all at once. A call is pushed before its word
 * says READY, so every READY call has been pushed, and a record is linked at most once per life. Links carry
 * generations: a link that does not match its record (cancelled, ended) breaks the list. Then the actor's process
 * searches the task table for the calls, as each new process of the actor does.
 * `word` is changed by the actor's process (STARTING, LIVE), by recovery (DOWN) and by the daemon (the rest). A caller
 * stores READY and then checks for DEAD; the daemon stores DEAD and then looks for READY calls: so one of them ends a
 * late call. The record holds its object (COUNTED) until the instance is built, because the object says how to build
 * it; a DETACHED one holds it until the end. The process that sees the later of "swept" and "its object is gone" frees
 * the record. */
typedef struct {
    uint64_t word;     /* {FRT_ACTOR_*, client, -, gen} */
    uint64_t mailbox;  /* {gen:32 | task + 1:32} of the newest call; 0: nothing new */
    uint32_t asleep;   /* its process sleeps or is about to: wake it */
    uint32_t rescan;   /* there may be READY calls outside the mailbox */
    uint32_t released; /* its object is gone, so no process can make another call */
    uint32_t ended;    /* FRT_END_*: why it is not started again; 0: it may be */
    uint32_t swept;    /* it is DEAD, and its remaining calls have been taken, to be ended with an error */
    uint32_t devices;  /* bits of the devices (GPUs) that it was given; changes while it is WANTED, under the lock */
    char pad[24];
    uint64_t function __attribute__((aligned(64))); /* objref of its class */
    uint64_t objref;
    uint32_t index; /* of its object */
    int32_t max_restarts; /* -1: any number */
    uint32_t restarts;
    uint8_t flags;
    uint8_t node_lost, pad1[2]; /* node_lost: `how` is the loss of the node of its process */
    uint64_t demand; /* objref of the resources it needs, kept by its object or the function table; 0: none */
    uint32_t demand_index;
    uint32_t order;        /* in state AWAY: FRT_ORDER_*, for the client that forwards its calls */
    uint32_t pid;          /* of the last process here; 0: it had none */
    uint8_t pad2[8];
    char name[192];
    char reason[448]; /* why it is DEAD, or will be */
    char how[256];    /* how its last process ended; written before the word says DOWN, empty while it is WANTED */
} frt_actor;

/* BARE: an actor without a process or calls, which only holds resources; the word's client is the daemon. A bundle of
 * a placement group is such a record, so that it lives, moves and ends as an actor does. */
enum { FRT_ACTOR_COUNTED = 1, FRT_ACTOR_DETACHED = 2, FRT_ACTOR_BARE = 4 };
enum { FRT_ORDER_NONE = 0, FRT_ORDER_KILL = 1 };
enum { FRT_END_KILLED = 1, FRT_END_FAILED = 2, FRT_END_EXITED = 3 }; /* frt_actor.ended */

/* Per page: its neighbours in a bin or slab list. Derived; under the lock of that list (extent or size class). */
typedef struct {
    uint32_t next, prev; /* page index, or FRT_NONE */
    uint32_t back;       /* on the last page of a free run: its first page */
    uint32_t listed;
} frt_page_link;

enum { FRT_CLOCK_MONOTONIC = 1, FRT_CLOCK_TSC = 2 };

/* One action of a client, with its start and end. Only that client writes it, one thread at a time; any process reads
 * it without a lock. If the client dies, the action under way has no end. */
typedef struct {
    int64_t start, end; /* by the session's trace_clock; end is 0 while the action lasts */
    uint64_t id;              /* of the task, the object or the process */
    uint32_t what;            /* the function's entry, a method's number, or a value's size in KiB */
    uint16_t kind;
    uint16_t actor; /* index + 1 */
} frt_trace_record;

typedef struct {
    uint64_t count; /* records ever begun; the last FRT_TRACE_RECORDS are kept */
    char pad[56];
    frt_trace_record records[FRT_TRACE_RECORDS];
} frt_trace_ring;

_Static_assert(sizeof(frt_pool) == 64, "frt_pool");
_Static_assert(sizeof(frt_trace_record) == 32, "frt_trace_record");
_Static_assert(sizeof(frt_client) == 256, "frt_client");
_Static_assert(sizeof(frt_entry) == 128, "frt_entry");
_Static_assert(offsetof(frt_entry, inlined) == 56, "an entry and its small value are two cache lines");
_Static_assert(sizeof(frt_stream) <= FRT_INLINE_BYTES, "a stream is stored in its entry");
_Static_assert(sizeof(frt_task) == 256, "frt_task");
_Static_assert(sizeof(frt_function) == 96, "frt_function");
_Static_assert(sizeof(frt_ranked) == 16, "frt_ranked");
_Static_assert(sizeof(frt_actor) == 1024, "frt_actor");
_Static_assert(sizeof(frt_superblock) <= 4096, "the superblock is one page");

/* ---- one process's view ----------------------------------------------------------------------------------- */
/* The geometry is copied here once, at attach, and never read from the segment again. */
typedef struct {
    char *base;       /* read-write mapping */
    const char *view; /* read-only mapping: users' views of values point here */
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
    frt_tally *tallies; /* FRT_TALLIES for each slot */
    uint64_t *failure_words;
    frt_failure *failures;
    uint64_t payload_offset;
    uint32_t words, stride; /* stride: 1 + 3 * words */
    uint32_t clients_max, clients_limit, planes_max;
    uint32_t objects_max, tasks_max, pages_max, ring_max, functions_max, node;
    uint32_t *free_objects, *free_tasks;

    uint32_t me; /* client index */
    uint32_t gen;
    uint32_t me_word; /* this client's bit in a set of clients: the word's number, and the bit */
    uint64_t me_bit;
    uint64_t *mine;                    /* the word of entry 0 that has this client's ref bit */
    uint32_t mine_stride, mine_kinds;  /* words from there to the next entry's, and to the next kind of bits */
    uint64_t next_objref, end_objref;  /* the rest of this client's range of new objrefs */
    uint32_t trace_ready; /* 1: this process's trace ring has memory; 2: there was none for it */
    uint64_t tally_function;  /* of the task counted last, */
    uint32_t tally_method;
    uint32_t succeeded;       /* FRT_SUCCEEDED; FRT_FORWARDED in an uplink, whose tasks other nodes run and count */
    uint32_t method_names;    /* how many names there are in: */
    uint64_t *tally_counts;   /* and where it is counted; NULL: nowhere yet */
    const char *methods;      /* of an actor's process: the names of its methods, FRT_NAME_BYTES each */
    uint8_t tally_rows[64];   /* rows of functions by a hash, + 1; a hint */
    uint32_t objects_kept, tasks_kept; /* free records in the magazines `objects` and `tasks_free` */
    uint64_t path; /* of the last submitted task, or the value before the first: each task's path is one more */
    uint32_t objects[FRT_MAGAZINE], tasks_free[FRT_MAGAZINE];
    uint32_t *refs_held, *pins_held; /* per entry: this process's counts; a bit is set while its count is above 0 */
    frt_threads threads;
} frt_ctx;

static inline uint64_t *frt_state(const frt_ctx *x, uint32_t i) { return x->ctl + (size_t)i * x->stride; }

#include "bits.h"
#include "threads.h"

/* ---- checks of values that other processes wrote --------------------------------------------------------------
 * A process with a stray pointer can write any number anywhere. So every index, offset and count from the segment is
 * copied once, checked against this process's own geometry, and then used. A reader without a lock or a hold may see
 * numbers of the record's next user: to it a wrong number only means that the searched record is gone. */

/* Call this when a lock or a record protects an impossible value: every later client call raises ArenaCorrupt. */
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
/* How many records of each table, and pages of the payload, are in use and may be read. */
static inline uint32_t frt_objects(const frt_ctx *x) { return frt_most(&x->sb->objects.fresh, x->objects_max); }
static inline uint32_t frt_tasks(const frt_ctx *x) { return frt_most(&x->sb->tasks.fresh, x->tasks_max); }
static inline uint32_t frt_pages(const frt_ctx *x) { return frt_most(&x->sb->pages_committed, x->pages_max); }
static inline uint32_t frt_functions(const frt_ctx *x) { return frt_most(&x->sb->function_slots, x->functions_max); }
static inline uint32_t frt_actors(const frt_ctx *x) { return frt_most(&x->sb->actors_fresh, FRT_ACTORS); }

/* The memory at an offset, or NULL if nbytes from there do not lie inside the payload. */
static inline char *frt_inside(const frt_ctx *x, uint64_t offset, uint64_t nbytes) {
    if (offset < x->payload_offset || offset > x->total_bytes || offset & 63) return NULL;
    if (nbytes > x->total_bytes - offset) return NULL;
    return x->base + offset;
}

/* How many of a task's last refs are not arguments: the stream and the policy. */
static inline uint32_t frt_task_extras(uint8_t flags) {
    return (flags & FRT_TASK_STREAM ? 1 : 0) + (flags & FRT_TASK_POLICY ? 1 : 0);
}

/* A checked copy of where a task's body lies; see frt_task. */
typedef struct {
    frt_refslot *results, *refs;
    const char *args;
    uint32_t nreturns, nrefs, ndeps, bytes;
} frt_body;

/* Fill in `b`: 1 when the whole body lies inside the segment; else 0, and the body is empty. */
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

/* The n refs that a value contains, after its bytes at the next multiple of 8; n is 0 if they lie outside the block.
 * If the bytes are in a file, the refs are alone. */
static inline frt_refslot *frt_entry_refs(const frt_ctx *x, uint32_t i, uint32_t *n) {
    frt_entry *entry = x->entries + i;
    uint64_t offset = a64_load_rlx(&entry->offset), nbytes = a64_load_rlx(&entry->bytes);
    if (a8_load_rlx(&entry->flags) & FRT_ENTRY_FILE) nbytes = 0;
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

/* The number of the lowest bit that is set. v is not 0. */
static inline int frt_lowest(uint64_t v) { return __builtin_ctzll(v); }

/* The stream in entry i, whose flags say FRT_ENTRY_STREAM. */
static inline frt_stream *frt_stream_of(const frt_ctx *x, uint32_t i) { return (frt_stream *)x->entries[i].inlined; }

#endif
