/* Hands gcc's coverage of the core to libFuzzer, which knows only the counters that clang makes.
 *
 * gcc calls __sanitizer_cov_trace_pc at every branch; the pair of the last two places is a counter, as in AFL.
 * Comparisons are passed on as they are, so that the fuzzer learns the numbers that the core compares with.
 * Preloaded; target.py gives it libFuzzer's functions with `frt_coverage_start`.
 */
#include <stdint.h>

#define COUNTERS (1u << 16)

static uint8_t counters[COUNTERS];
static __thread uintptr_t before;
static void (*cmp1)(uint8_t, uint8_t), (*cmp2)(uint16_t, uint16_t), (*cmp4)(uint32_t, uint32_t),
    (*cmp8)(uint64_t, uint64_t);

/* The counters' beginning and end. */
void *frt_coverage_counters(void) { return counters; }
void *frt_coverage_end(void) { return counters + COUNTERS; }
void frt_coverage_start(void *c1, void *c2, void *c4, void *c8) { cmp1 = c1, cmp2 = c2, cmp4 = c4, cmp8 = c8; }

void __sanitizer_cov_trace_pc(void) {
    uintptr_t here = (uintptr_t)__builtin_return_address(0) * 0x9e3779b97f4a7c15u >> 48;
    uint8_t *counter = &counters[(before ^ here) % COUNTERS];
    if (*counter < 255) ++*counter;
    before = here >> 1;
}

#define TRACE(n, type) \
    void __sanitizer_cov_trace_cmp##n(type a, type b) { if (cmp##n) cmp##n(a, b); } \
    void __sanitizer_cov_trace_const_cmp##n(type a, type b) { if (cmp##n) cmp##n(a, b); }
TRACE(1, uint8_t)
TRACE(2, uint16_t)
TRACE(4, uint32_t)
TRACE(8, uint64_t)
void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t *cases) { (void)value, (void)cases; }
