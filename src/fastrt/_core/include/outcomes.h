/* The records of tasks that have ended: counts by function and outcome, and the last failures. */
#ifndef FRT_OUTCOMES_H
#define FRT_OUTCOMES_H

enum { FRT_SUCCEEDED = 0, FRT_FAILED, FRT_CANCELLED, FRT_CRASHED, FRT_RETRIED, FRT_FORWARDED, FRT_OUTCOMES };

#define FRT_NAME_BYTES 64
#define FRT_TALLIES_STEP 32 /* rows whose memory is committed in one step: a page */
#ifdef FRT_FAILPOINTS /* small, so that a kill test fills them */
#define FRT_TALLIES 8
#define FRT_FAILURES 8
#else
#define FRT_TALLIES 256 /* functions and methods that each slot counts apart; the rest is in frt_client.other */
#define FRT_FAILURES 1024
#endif

/* How the tasks of one function, or the calls of one method, have ended in the processes that had one slot.
 *
 * Only the slot's client writes its rows, one thread at a time; when it is dead, the process that recovers it does,
 * under the janitor lock. Rows are never cleared: the slot's next client goes on with them. A reader sums the
 * rows of all slots. Each count is one word {count:40 | mark:24}. The mark names the task that was counted last (its id
 * and its attempt), so one store counts a task and says that it has been counted: recovery reads the dead client's
 * unfinished records and completes or takes back the one count that the death may have cut off. */
typedef struct {
    uint64_t function; /* objref of the function or class */
    uint32_t method;   /* of a call: its number; else the index of the function's object */
    uint32_t actor;    /* index + 1 of the actor whose call was counted first; 0: a function */
    uint64_t counts[FRT_OUTCOMES];
    char name[FRT_NAME_BYTES]; /* of the function, or of the method alone */
} frt_tally;

#define FRT_TALLY_MARK 0xffffffu

/* One attempt that failed. Each has a word {FRT_FAILURE_*:8 | client:16 | number:40}; the numbers are 1, 2, ..., and
 * number n has place (n - 1) % FRT_FAILURES. A process takes a number by one addition, swaps the word of the place to
 * WRITING, fills in the record, and stores KEPT (commit). If another process is writing the place, it takes the next
 * number. A reader copies the record and reads the word before and after. Recovery empties the places that a dead
 * client was writing; memory is committed before the first record of a place. */
enum {
    FRT_FAILURE_EMPTY = 0,
    FRT_FAILURE_WRITING = 1, /* client: fills in the record */
    FRT_FAILURE_KEPT = 2,
    FRT_FAILURE_MENDED = 3 /* kept, and a later attempt succeeded */
};
enum { FRT_TEXT_NAME = 0, FRT_TEXT_TYPE, FRT_TEXT_MESSAGE, FRT_TEXT_TRACEBACK, FRT_TEXT_NODE, FRT_TEXTS };
#define FRT_FAILURE_RETRIED 1 /* flags: another attempt followed */

typedef struct {
    int64_t time; /* of the system's clock, in ns */
    uint64_t id, function; /* as in frt_task */
    uint32_t method, actor;
    int32_t pid;
    uint8_t attempt, retries, signal, flags;
    uint16_t lengths[FRT_TEXTS];
    char pad[14];
    char text[4096 - 64]; /* FRT_TEXT_*, one after the other, in UTF-8 without ends */
} frt_failure;

_Static_assert(sizeof(frt_tally) == 128, "frt_tally");
_Static_assert(sizeof(frt_failure) == 4096, "frt_failure");

static inline uint64_t frt_failure_word(unsigned state, unsigned client, uint64_t number) {
    return ((uint64_t)state << 56) | ((uint64_t)client << 40) | (number & 0xffffffffffULL);
}
static inline uint64_t frt_failure_number(uint64_t word) { return word & 0xffffffffffULL; }

/* Count one more, and mark the task. */
static inline void frt_tally_add(uint64_t *count, uint32_t mark) {
    a64_store_rel(count, ((a64_load_rlx(count) | FRT_TALLY_MARK) + 1) | mark);
}
static inline uint64_t frt_tally_count(uint64_t word) { return word >> 24; }

#endif
