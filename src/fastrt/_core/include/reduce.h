/* Element-wise reductions over raw buffers: one set of loops for any processor, one for AVX2, chosen at load time.
 *
 * A result depends only on the inputs and their order: the loops combine source 0 with 1, the result with 2 and so on,
 * for every processor, alignment and division into blocks. float16 and bfloat16 are summed in float32 and rounded
 * once, to nearest even. min and max propagate a NaN, as NumPy's do. Integers wrap.
 */
#ifndef FRT_REDUCE_H
#define FRT_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { FRT_SUM, FRT_PROD, FRT_MIN, FRT_MAX, FRT_BAND, FRT_BOR, FRT_REDUCTIONS };
enum {
    FRT_I8, FRT_I16, FRT_I32, FRT_I64, FRT_U8, FRT_U16, FRT_U32, FRT_U64,
    FRT_F16, FRT_BF16, FRT_F32, FRT_F64, FRT_DTYPES
};

static const unsigned char FRT_ITEM_BYTES[FRT_DTYPES] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};

typedef void (*frt_pair_fn)(void *out, const void *a, const void *b, size_t count);
typedef int (*frt_reduce_fn)(int reduction, int dtype, void *out, const void *const *sources, int sources_count,
                             size_t count, uint32_t divisor);

/* The iterations are independent even if `out` is one of the sources: each reads its own element, then writes it.
 * Without this pragma an operation in place would take the scalar loop behind the compiler's overlap check. */
#if defined(__clang__)
#define FRT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FRT_INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline float frt_bits_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t frt_float_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

static inline float frt_from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if ((h & 0x7c00) == 0x7c00) return frt_bits_float(sign | 0x7f800000 | rest | (h & 0x3ff ? 0x400000 : 0));
    if ((h & 0x7c00) == 0) { /* subnormal: a multiple of 2**-24 */
        float f = (float)(h & 0x3ff) * 0x1p-24f;
        return frt_bits_float(sign | frt_float_bits(f));
    }
    return frt_bits_float(sign | (rest + (112u << 23)));
}

static inline uint16_t frt_to_half(float f) {
    uint32_t bits = frt_float_bits(f), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more round to infinity */
    if (rest < 0x38800000) /* below 2**-14: 0.5 has 2**-24 as its last bit, so the addition rounds to a multiple */
        return (uint16_t)(sign | (frt_float_bits(frt_bits_float(rest) + 0.5f) - frt_float_bits(0.5f)));
    return (uint16_t)(sign | ((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13));
}

static inline float frt_from_bfloat(uint16_t h) { return frt_bits_float((uint32_t)h << 16); }

static inline uint16_t frt_to_bfloat(float f) {
    uint32_t bits = frt_float_bits(f);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

#define FRT_BLOCK_BYTES 4096 /* of intermediate results: a block stays in the L1 cache beside two sources */

#define FRT_NAME(x) x##_any
#define FRT_TARGET
#include "reduce_loops.h"
#undef FRT_NAME
#undef FRT_TARGET

#if defined(__x86_64__)
#define FRT_NAME(x) x##_avx2
#define FRT_TARGET __attribute__((target("avx2,f16c")))
#define FRT_HALF_BY_HARDWARE
#include "reduce_loops.h"
#undef FRT_HALF_BY_HARDWARE
#undef FRT_NAME
#undef FRT_TARGET
#endif

static inline int frt_reduce_has_avx2(void) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init(); /* also checks that the system saves the wide registers. "f16c": not all compilers know it */
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
#else
    return 0;
#endif
}

static inline frt_reduce_fn frt_reduce_choose(int avx2) {
#if defined(__x86_64__)
    if (avx2) return frt_reduce_avx2;
#endif
    (void)avx2;
    return frt_reduce_any;
}

#endif
