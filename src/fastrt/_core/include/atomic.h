/* Atomic operations on words in shared memory, with the order in the name.
 *
 * _sc: sequentially consistent. Needed where one side sets a bit and then reads a state while the other
 *      side changes that state and then reads the bits (holders against a deleter, sleepers against a
 *      waker): acquire/release alone would let both sides miss each other, on x86 as on aarch64.
 * _acq / _rel: read and publish data that one store commits.
 * _rlx: counters and hints that nothing depends on.
 */
#ifndef FRT_ATOMIC_H
#define FRT_ATOMIC_H

#include <stdint.h>

#include "failpoint.h"

static inline uint64_t a64_load_rlx(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint64_t a64_load_acq(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint64_t a64_load_sc(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void a64_store_rlx(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void a64_store_rel(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void a64_store_sc(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint64_t a64_or_sc(uint64_t *p, uint64_t v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
static inline uint64_t a64_and_sc(uint64_t *p, uint64_t v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
static inline uint64_t a64_add_rlx(uint64_t *p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

/* 1 when *p was `want` and is now `to`. */
static inline int a64_cas_sc(uint64_t *p, uint64_t want, uint64_t to) {
    return __atomic_compare_exchange_n(p, &want, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline uint8_t a8_load_rlx(const uint8_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void a8_store_rlx(uint8_t *p, uint8_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void a8_or_sc(uint8_t *p, uint8_t v) { __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
static inline void a8_and_sc(uint8_t *p, uint8_t v) { __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
static inline uint8_t a8_load_sc(const uint8_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline uint32_t a32_load_rlx(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint32_t a32_load_acq(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint32_t a32_load_sc(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void a32_store_rlx(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void a32_store_rel(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void a32_store_sc(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint32_t a32_add_sc(uint32_t *p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
static inline uint32_t a32_sub_sc(uint32_t *p, uint32_t v) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); }

static inline int a32_cas_sc(uint32_t *p, uint32_t want, uint32_t to) {
    return __atomic_compare_exchange_n(p, &want, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline void a_fence_sc(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void a_fence_acq(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
/* Keeps later stores behind earlier ones, which neither a release store nor a compare-and-swap does by itself. */
static inline void a_fence_rel(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

#ifdef FRT_FAILPOINTS
#define a64_store_rel(p, v) FRT_AROUND_VOID("store", a64_store_rel(p, v))
#define a64_store_sc(p, v) FRT_AROUND_VOID("store", a64_store_sc(p, v))
#define a64_or_sc(p, v) FRT_AROUND("or", a64_or_sc(p, v))
#define a64_and_sc(p, v) FRT_AROUND("and", a64_and_sc(p, v))
#define a64_cas_sc(p, a, b) FRT_AROUND("swap", a64_cas_sc(p, a, b))
#define a8_or_sc(p, v) FRT_AROUND_VOID("or", a8_or_sc(p, v))
#define a8_and_sc(p, v) FRT_AROUND_VOID("and", a8_and_sc(p, v))
#define a32_store_rel(p, v) FRT_AROUND_VOID("store", a32_store_rel(p, v))
#define a32_store_sc(p, v) FRT_AROUND_VOID("store", a32_store_sc(p, v))
#define a32_add_sc(p, v) FRT_AROUND("add", a32_add_sc(p, v))
#define a32_sub_sc(p, v) FRT_AROUND("sub", a32_sub_sc(p, v))
#define a32_cas_sc(p, a, b) FRT_AROUND("swap", a32_cas_sc(p, a, b))
#endif

/* Tell the processor that this is a spin loop. */
static inline void a_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
