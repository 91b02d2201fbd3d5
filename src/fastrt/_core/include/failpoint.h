/* Failpoints: places where a test build kills, stops or delays its own process, before and after every atomic change
 * of a shared word and every lock and unlock. Without FRT_FAILPOINTS this file is empty: release builds pay nothing.
 *
 * No point is written by hand. In a test build atomic.h and lock.h wrap their functions in FRT_AROUND, and Cython
 * emits #line directives, so each call in the core is a point named by its file, line and operation:
 * "objects.pyx:95 store". The sites of an extension lie in a separate linker section. When the extension is loaded, it
 * enters them into a table in the file FASTRT_FAILPOINTS_FILE, which every process of the test maps: one counter per
 * site and side, and one order ("at the n-th hit of this point, process p does that"). fastrt.testing reads and
 * writes the table.
 */
#ifndef FRT_FAILPOINT_H
#define FRT_FAILPOINT_H
#ifdef FRT_FAILPOINTS

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FRT_FP_SLOTS 2048
#define FRT_FP_NAME 56
enum { FRT_FP_NOTHING = 0, FRT_FP_KILL = 1, FRT_FP_STOP = 2 };

typedef struct { /* in the file: a header of 64 bytes, then the slots */
    uint32_t slots_used;
    uint32_t action;
    uint32_t slot, side; /* the point of the order */
    int32_t pid;         /* the process that obeys the order; 0: any process */
    uint32_t countdown;  /* hits left; the process acts when it falls to 0 */
    uint32_t jitter;     /* yield the processor at one in this many hits; 0: never */
    uint32_t lock;
    char pad[32];
} frt_fp_header;

typedef struct {
    char name[FRT_FP_NAME];
    uint32_t hits[2]; /* before, after */
} frt_fp_slot;

typedef struct {
    const char *file;
    int line;
    const char *op;
    uint32_t slot;
} frt_fp_site;

/* State of one extension, set when it is loaded. Each extension has a separate copy of this header's statics. */
static frt_fp_header *frt_fp_table;
extern frt_fp_site __start_frt_sites[] __attribute__((weak, visibility("hidden")));
extern frt_fp_site __stop_frt_sites[] __attribute__((weak, visibility("hidden")));

static uint32_t frt_fp_enter(frt_fp_header *t, const char *name) {
    frt_fp_slot *slots = (frt_fp_slot *)(t + 1);
    uint32_t i;
    while (__atomic_exchange_n(&t->lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
    for (i = 0; i < t->slots_used; i++)
        if (strcmp(slots[i].name, name) == 0) break;
    if (i == t->slots_used && i < FRT_FP_SLOTS - 1) {
        strcpy(slots[i].name, name);
        t->slots_used++;
    }
    __atomic_store_n(&t->lock, 0, __ATOMIC_RELEASE);
    return i;
}

__attribute__((constructor)) static void frt_fp_load(void) {
    const char *path = getenv("FASTRT_FAILPOINTS_FILE");
    size_t bytes = sizeof(frt_fp_header) + FRT_FP_SLOTS * sizeof(frt_fp_slot);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return;
    for (frt_fp_site *s = __start_frt_sites; s < __stop_frt_sites; s++) {
        char name[FRT_FP_NAME];
        const char *slash = strrchr(s->file, '/');
        snprintf(name, sizeof name, "%s:%d %s", slash ? slash + 1 : s->file, s->line, s->op);
        s->slot = frt_fp_enter(p, name);
    }
    frt_fp_table = p;
}

static void frt_fp_hit(const frt_fp_site *site, uint32_t side) {
    frt_fp_header *t = frt_fp_table;
    if (!t) return;
    frt_fp_slot *slot = (frt_fp_slot *)(t + 1) + site->slot;
    uint32_t hits = __atomic_add_fetch(&slot->hits[side], 1, __ATOMIC_RELAXED);
    if (t->jitter && (hits * 2654435761u) % t->jitter == 0) sched_yield();
    if (__atomic_load_n(&t->action, __ATOMIC_ACQUIRE) == FRT_FP_NOTHING || t->slot != site->slot || t->side != side ||
        (t->pid && t->pid != getpid()) || __atomic_sub_fetch(&t->countdown, 1, __ATOMIC_SEQ_CST) != 0)
        return;
    uint32_t action = __atomic_exchange_n(&t->action, FRT_FP_NOTHING, __ATOMIC_SEQ_CST);
    if (action) kill(getpid(), action == FRT_FP_KILL ? SIGKILL : SIGSTOP);
}

#define FRT_FP_SITE(name) \
    static frt_fp_site site_ __attribute__((section("frt_sites"), used)) = {__FILE__, __LINE__, name, 0}
#define FRT_AROUND(name, call) \
    __extension__({ FRT_FP_SITE(name); frt_fp_hit(&site_, 0); __auto_type got_ = (call); frt_fp_hit(&site_, 1); got_; })
#define FRT_AROUND_VOID(name, call) \
    __extension__({ FRT_FP_SITE(name); frt_fp_hit(&site_, 0); (call); frt_fp_hit(&site_, 1); (void)0; })

#endif
#endif
