# Declarations of the segment's structs for Cython; include/layout.h documents each field.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "layout.h" nogil:
    uint64_t FRT_MAGIC
    uint32_t FRT_LAYOUT_VERSION, FRT_NONE, FRT_PAGE_BYTES, FRT_PAGE_SHIFT, FRT_CLASSES, FRT_BLOCKS_PER_PAGE
    uint32_t FRT_BINS, FRT_OWNER_TASK, FRT_COMMIT_RECORDS, FRT_CLIENTS_MOST, FRT_RING_CELLS, FRT_ACTORS
    uint32_t FRT_ACTORS_STEP, FRT_CLIENTS_DENSE, FRT_SLOTS_BEYOND, FRT_SLOTS_MOST, FRT_PLANE_WORDS, FRT_PLANE_CLIENTS
    uint32_t FRT_PLANE_BYTES
    uint32_t FRT_REFS, FRT_PINS, FRT_WAITS, FRT_KINDS
    enum:
        FRT_CALLER_WORDS
    uint32_t FRT_FUNCTIONS, FRT_FUNCTION_PROBES
    uint32_t FRT_CELL_BYTES, FRT_PRIORITY_MAX, FRT_TRACE_RECORDS, FRT_CLOCK_MONOTONIC, FRT_CLOCK_TSC
    uint32_t FRT_INLINE_BYTES, FRT_TASK_INLINE_BYTES, FRT_MAGAZINE
    uint64_t FRT_PATH_STEP
    uint64_t FRT_COMMIT_BYTES
    uint32_t FRT_CLASS_BYTES(uint32_t) noexcept
    int FRT_OK, FRT_FULL, FRT_STALE, FRT_TIMEOUT, FRT_CORRUPT, FRT_STUCK, FRT_TOO_LARGE, FRT_TABLE_FULL
    int FRT_CLOSED, FRT_INTERRUPTED, FRT_CLIENTS_FULL, FRT_NOT_FOUND, FRT_GROW, FRT_SPILLED
    int FRT_OBJ_EMPTY, FRT_OBJ_RESERVED, FRT_OBJ_PENDING, FRT_OBJ_SEALED, FRT_OBJ_DELETING
    int FRT_OBJ_FREEING, FRT_OBJ_SPILLING, FRT_OBJ_SPILLED, FRT_OBJ_RESTORING
    int FRT_TASK_EMPTY, FRT_TASK_RESERVED, FRT_TASK_WAITING, FRT_TASK_READY, FRT_TASK_CLAIMED, FRT_TASK_RUNNING
    int FRT_TASK_BLOCKED, FRT_TASK_ENDING
    int FRT_ACTOR_EMPTY, FRT_ACTOR_WANTED, FRT_ACTOR_STARTING, FRT_ACTOR_LIVE, FRT_ACTOR_DOWN, FRT_ACTOR_DEAD
    int FRT_ACTOR_AWAY
    uint8_t FRT_ACTOR_COUNTED, FRT_ACTOR_DETACHED, FRT_ACTOR_BARE
    uint32_t FRT_ORDER_NONE, FRT_ORDER_KILL
    uint32_t FRT_END_KILLED, FRT_END_FAILED, FRT_END_EXITED
    int FRT_CLIENT_FREE, FRT_CLIENT_JOINING, FRT_CLIENT_LIVE, FRT_CLIENT_DYING
    int FRT_KIND_DAEMON, FRT_KIND_DRIVER, FRT_KIND_WORKER, FRT_KIND_TOOL, FRT_KIND_ACTOR
    int FRT_SEG_INIT, FRT_SEG_READY, FRT_SEG_POISONED, FRT_SEG_CLOSED
    int FRT_PAGE_INNER, FRT_PAGE_FREE, FRT_PAGE_RUN, FRT_PAGE_SLAB
    int FRT_LOCK_JANITOR, FRT_LOCK_SLOTS, FRT_LOCK_ACTORS, FRT_LOCK_FUNCTIONS, FRT_LOCK_LINKS, FRT_LOCK_QUEUE
    int FRT_LOCK_OBJECTS, FRT_LOCK_TASKS, FRT_LOCK_CLASS0, FRT_LOCK_EXTENT, FRT_LOCK_GROW, FRT_LOCKS
    uint8_t FRT_ENTRY_COUNTED, FRT_ENTRY_ERROR, FRT_ENTRY_FILE, FRT_ENTRY_ACTOR, FRT_ENTRY_STREAM
    uint8_t FRT_ENTRY_READ, FRT_ENTRY_REMOTE
    uint32_t FRT_SPILL_BYTES_MIN
    uint8_t FRT_TASK_COUNTED, FRT_TASK_RETRY_ERRORS, FRT_TASK_LINKED, FRT_TASK_DEMAND, FRT_TASK_STREAM
    uint8_t FRT_TASK_POLICY, FRT_TASK_LATE, FRT_TASK_RANKED
    uint32_t FRT_CANCEL_FORCE, FRT_CANCEL_ALONE, FRT_ORPHAN

    bint FRT_NO_GIL
    void frt_threads_init(frt_ctx *x, frt_ctx *former) noexcept
    void frt_threads_take(frt_ctx *x) noexcept
    void frt_threads_give(frt_ctx *x) noexcept
    bint frt_has_left(const frt_ctx *x) noexcept
    bint frt_has_left_since(const frt_ctx *x) noexcept
    void frt_set_left(frt_ctx *x) noexcept
    uint64_t frt_word(int state, uint32_t client, uint32_t gen) noexcept
    int frt_word_state(uint64_t word) noexcept
    uint32_t frt_word_client(uint64_t word) noexcept
    uint32_t frt_word_gen(uint64_t word) noexcept
    uint64_t frt_cancel_word(uint64_t id, uint32_t how) noexcept
    bint frt_cancels(uint64_t cancelled, uint64_t id) noexcept
    uint64_t frt_word_deleting(uint32_t client, uint64_t word) noexcept
    uint64_t frt_word_undeleted(uint64_t word) noexcept
    uint64_t frt_page_word(int state, uint32_t cls, uint32_t pages) noexcept

    ctypedef struct frt_lock:
        pass

    ctypedef struct frt_pool:
        uint32_t max, committed, fresh, free_count
        uint64_t free_offset

    ctypedef struct frt_superblock:
        uint64_t magic
        uint32_t version, abi
        uint64_t total_bytes
        uint32_t clients_max, clients_limit, words, planes_max, objects_max, tasks_max, ring_max, pages_max
        uint64_t locks_offset, clients_offset, ctl_offset, entries_offset, task_words_offset, tasks_offset
        uint64_t free_objects_offset, free_tasks_offset, ring_offset, functions_offset, pages_offset
        uint64_t links_offset, owners_offset, bits_offset, trace_offset, payload_offset, actors_offset, ranked_offset
        uint64_t planes_offset, tallies_offset, failure_words_offset, failures_offset
        uint64_t session[2]
        uint64_t boot_hash, pid_namespace
        uint32_t uid, node
        uint64_t static_end
        uint32_t static_crc, state
        int32_t daemon_pid
        uint32_t trace_on
        uint64_t daemon_start
        char poison[128]
        uint64_t next_objref
        uint32_t death_epoch, janitor_victim, planes, planes_opened, actors_committed
        frt_pool objects, tasks
        uint64_t ring_head, ring_tail
        uint32_t ahead, ahead_in_row
        uint32_t ranked, ranked_cells
        uint64_t idle[FRT_CALLER_WORDS]
        uint32_t spinner, ring_cells, wanted_workers, actors_fresh, function_slots, load_watcher
        uint32_t pages_committed
        uint32_t bin_head[32]
        uint32_t slab_head[6]
        uint64_t used_pages
        uint32_t clock, spill_rounds
        uint64_t spill_freed, spilled_objects, spilled_bytes, restored_objects, restored_bytes
        uint64_t mapped_objects, mapped_bytes
        uint32_t falls_back
        char spill_error[128]
        char spill_dir[256]
        uint32_t held, held_news, trace_clock
        int64_t trace_ticks, trace_ns
        uint64_t failures
        uint32_t traced, rooms_failed

    ctypedef struct frt_client:
        uint64_t word
        int32_t pid
        uint32_t kind
        uint64_t starttime
        uint32_t sealing, pushing, task, blocked
        uint64_t job, tasks_done, device_holder
        uint32_t device_parts, devices
        uint64_t other[6]
        uint32_t tallies
        uint32_t wake, sleepers, recordings, parked, departed
        char name[64]

    ctypedef struct frt_entry:
        uint64_t objref, bytes, offset
        uint32_t counted, task, waiter, nrefs
        uint16_t kind
        uint8_t flags, maps
        uint32_t actor, next, site, used
        char inlined[72]

    ctypedef struct frt_source:
        uint8_t node[16]
        uint64_t objref

    ctypedef struct frt_stream:
        uint64_t head, produced
        uint32_t last, limit, away, elsewhere

    ctypedef struct frt_refslot:
        uint64_t objref
        uint32_t index, extra

    ctypedef struct frt_task:
        uint64_t id, function, job, cancelled, offset, path
        uint32_t function_index, bytes, nreturns, nrefs, ndeps, waiter, dep, actor
        uint16_t kind
        uint8_t flags, attempts, retries, signal
        uint16_t caller
        uint8_t hops
        int8_t priority
        uint32_t before, submitter
        char inlined[160]

    ctypedef struct frt_ranked:
        uint64_t key, cell

    ctypedef struct frt_function:
        uint64_t hash[2]
        uint64_t objref
        uint32_t index
        char name[64]

    ctypedef struct frt_actor:
        uint64_t word, mailbox
        uint32_t asleep, rescan, released, ended, swept, devices
        uint64_t function, objref
        uint32_t index
        int32_t max_restarts
        uint32_t restarts
        uint8_t flags, node_lost
        uint64_t demand
        uint32_t demand_index, order, pid
        char name[64]
        char reason[448]
        char how[256]

    ctypedef struct frt_page_link:
        uint32_t next, prev, back, listed

    ctypedef struct frt_trace_record:
        int64_t start, end
        uint64_t id
        uint32_t what
        uint16_t kind, actor

    ctypedef struct frt_trace_ring:
        uint64_t count
        frt_trace_record records[16384]

    uint32_t FRT_SUCCEEDED, FRT_FAILED, FRT_CANCELLED, FRT_CRASHED, FRT_RETRIED, FRT_FORWARDED, FRT_OUTCOMES
    uint32_t FRT_NAME_BYTES, FRT_TALLIES, FRT_TALLIES_STEP, FRT_TALLY_MARK, FRT_FAILURES
    uint32_t FRT_FAILURE_EMPTY, FRT_FAILURE_WRITING, FRT_FAILURE_KEPT, FRT_FAILURE_MENDED
    uint32_t FRT_TEXT_NAME, FRT_TEXT_TYPE, FRT_TEXT_MESSAGE, FRT_TEXT_TRACEBACK, FRT_TEXT_NODE
    uint8_t FRT_FAILURE_RETRIED
    enum:
        FRT_TEXTS

    ctypedef struct frt_tally:
        uint64_t function
        uint32_t method, actor
        uint64_t counts[6]
        char name[64]

    ctypedef struct frt_failure:
        int64_t time
        uint64_t id, function
        uint32_t method, actor
        int32_t pid
        uint8_t attempt, retries, signal, flags
        uint16_t lengths[FRT_TEXTS]
        char text[4032]

    uint64_t frt_failure_word(uint32_t state, uint32_t client, uint64_t number) noexcept
    uint64_t frt_failure_number(uint64_t word) noexcept
    void frt_tally_add(uint64_t *count, uint32_t mark) noexcept
    uint64_t frt_tally_count(uint64_t word) noexcept

    ctypedef struct frt_ctx:
        char *base
        const char *view
        uint64_t total_bytes
        int fd
        frt_superblock *sb
        frt_lock *locks
        frt_client *clients
        uint64_t *ctl
        uint64_t *planes
        frt_entry *entries
        uint64_t *task_words
        frt_task *tasks
        uint64_t *ring
        frt_ranked *ranked
        frt_function *functions
        frt_actor *actors
        uint64_t *pages
        frt_page_link *links
        uint32_t *owners
        uint64_t *bits
        frt_trace_ring *traces
        frt_tally *tallies
        uint64_t *failure_words
        frt_failure *failures
        uint64_t payload_offset
        uint32_t words, stride, clients_max, clients_limit, planes_max
        uint32_t objects_max, tasks_max, pages_max, ring_max, functions_max, node
        uint32_t *free_objects
        uint32_t *free_tasks
        uint32_t me, gen, me_word
        uint64_t me_bit
        uint64_t *mine
        uint32_t mine_stride, mine_kinds
        uint64_t next_objref, end_objref
        uint32_t trace_ready
        uint64_t tally_function
        uint32_t tally_method, succeeded, method_names
        uint64_t *tally_counts
        const char *methods
        uint8_t tally_rows[64]
        uint32_t objects_kept, tasks_kept
        uint64_t path
        uint32_t objects[128]
        uint32_t tasks_free[128]
        uint32_t *refs_held
        uint32_t *pins_held

    ctypedef struct frt_body:
        frt_refslot *results
        frt_refslot *refs
        const char *args
        uint32_t nreturns, nrefs, ndeps, bytes

    int frt_broken(const frt_ctx *x, const char *why) noexcept
    uint32_t frt_most(const uint32_t *word, uint32_t most) noexcept
    uint32_t frt_objects(const frt_ctx *x) noexcept
    uint32_t frt_tasks(const frt_ctx *x) noexcept
    uint32_t frt_pages(const frt_ctx *x) noexcept
    uint32_t frt_functions(const frt_ctx *x) noexcept
    uint32_t frt_actors(const frt_ctx *x) noexcept
    char *frt_inside(const frt_ctx *x, uint64_t offset, uint64_t nbytes) noexcept
    bint frt_task_body(const frt_ctx *x, uint32_t t, frt_body *body) noexcept
    uint32_t frt_task_extras(uint8_t flags) noexcept
    frt_refslot *frt_entry_refs(const frt_ctx *x, uint32_t i, uint32_t *n) noexcept

    uint64_t *frt_state(const frt_ctx *x, uint32_t i) noexcept
    uint32_t frt_planes(const frt_ctx *x) noexcept
    uint32_t frt_words(const frt_ctx *x) noexcept
    uint32_t frt_clients(const frt_ctx *x) noexcept
    uint64_t *frt_plane(const frt_ctx *x, uint32_t p, uint32_t i) noexcept
    uint64_t *frt_bits(const frt_ctx *x, uint32_t i, uint32_t kind, uint32_t w) noexcept
    uint64_t *frt_mine(const frt_ctx *x, uint32_t i, uint32_t kind) noexcept
    bint frt_any(const frt_ctx *x, uint32_t i, uint32_t kind) noexcept
    bint frt_held(const frt_ctx *x, uint32_t i) noexcept
    void frt_clear_waits(const frt_ctx *x, uint32_t i) noexcept
    frt_stream *frt_stream_of(const frt_ctx *x, uint32_t i) noexcept
    int frt_lowest(uint64_t) noexcept

cdef extern from "atomic.h" nogil:
    uint64_t a64_load_rlx(const uint64_t *) noexcept
    uint64_t a64_load_acq(const uint64_t *) noexcept
    uint64_t a64_load_sc(const uint64_t *) noexcept
    void a64_store_rlx(uint64_t *, uint64_t) noexcept
    void a64_store_rel(uint64_t *, uint64_t) noexcept
    void a64_store_sc(uint64_t *, uint64_t) noexcept
    uint64_t a64_or_sc(uint64_t *, uint64_t) noexcept
    uint64_t a64_and_sc(uint64_t *, uint64_t) noexcept
    uint64_t a64_add_rlx(uint64_t *, uint64_t) noexcept
    bint a64_cas_sc(uint64_t *, uint64_t, uint64_t) noexcept
    uint8_t a8_load_rlx(const uint8_t *) noexcept
    uint8_t a8_load_sc(const uint8_t *) noexcept
    void a8_and_sc(uint8_t *, uint8_t) noexcept
    void a8_or_sc(uint8_t *, uint8_t) noexcept
    void a8_store_rlx(uint8_t *, uint8_t) noexcept
    uint32_t a32_load_rlx(const uint32_t *) noexcept
    uint32_t a32_load_acq(const uint32_t *) noexcept
    uint32_t a32_load_sc(const uint32_t *) noexcept
    void a32_store_rlx(uint32_t *, uint32_t) noexcept
    void a32_store_rel(uint32_t *, uint32_t) noexcept
    void a32_store_sc(uint32_t *, uint32_t) noexcept
    uint32_t a32_add_sc(uint32_t *, uint32_t) noexcept
    uint32_t a32_sub_sc(uint32_t *, uint32_t) noexcept
    bint a32_cas_sc(uint32_t *, uint32_t, uint32_t) noexcept
    void a_fence_sc() noexcept
    void a_fence_acq() noexcept
    void a_fence_rel() noexcept
    void a_relax() noexcept

cdef extern from "futex.h" nogil:
    int64_t frt_now_ns() noexcept
    int frt_futex_wait(uint32_t *, uint32_t, int64_t) noexcept
    void frt_futex_wake(uint32_t *) noexcept

cdef extern from "yield.h" nogil:
    ctypedef struct frt_yields:
        pass
    int frt_yield(frt_yields *yields, int64_t *now_ns)

cdef extern from "lock.h" nogil:
    int FRT_LOCKED, FRT_LOCK_ORPHANED
    int frt_lock_init(frt_lock *) noexcept
    int frt_lock_take(frt_lock *) noexcept
    void frt_lock_mend(frt_lock *) noexcept
    void frt_lock_give(frt_lock *) noexcept
