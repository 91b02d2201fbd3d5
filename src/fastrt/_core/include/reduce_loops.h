/* The loops of reduce.h, included once for each set of instructions: FRT_NAME gives them distinct names. */

#define FRT_PAIR(name, type, expression)                                                                     \
    FRT_TARGET static void FRT_NAME(name)(void *o, const void *p, const void *q, size_t count) {             \
        type *out = (type *)o;                                                                               \
        const type *a = (const type *)p, *b = (const type *)q;                                               \
        FRT_INDEPENDENT                                                                                      \
        for (size_t i = 0; i < count; i++) {                                                                 \
            type x = a[i], y = b[i];                                                                         \
            out[i] = (type)(expression);                                                                     \
        }                                                                                                    \
    }

/* Bits do not depend on the sign; arithmetic in an unsigned type at least as wide as int has no overflow. */
#define FRT_PAIRS_OF_BITS(bits, wide)                          \
    FRT_PAIR(sum_u##bits, uint##bits##_t, (wide)x + (wide)y)   \
    FRT_PAIR(prod_u##bits, uint##bits##_t, (wide)x * (wide)y)  \
    FRT_PAIR(band_u##bits, uint##bits##_t, x & y)              \
    FRT_PAIR(bor_u##bits, uint##bits##_t, x | y)               \
    FRT_PAIR(min_u##bits, uint##bits##_t, x < y ? x : y)       \
    FRT_PAIR(max_u##bits, uint##bits##_t, x > y ? x : y)       \
    FRT_PAIR(min_i##bits, int##bits##_t, x < y ? x : y)        \
    FRT_PAIR(max_i##bits, int##bits##_t, x > y ? x : y)

#define FRT_PAIRS_OF_FLOATS(name, type)                        \
    FRT_PAIR(sum_##name, type, x + y)                          \
    FRT_PAIR(prod_##name, type, x * y)                         \
    FRT_PAIR(min_##name, type, x < y || x != x ? x : y)        \
    FRT_PAIR(max_##name, type, x > y || x != x ? x : y)

FRT_PAIRS_OF_BITS(8, uint32_t)
FRT_PAIRS_OF_BITS(16, uint32_t)
FRT_PAIRS_OF_BITS(32, uint32_t)
FRT_PAIRS_OF_BITS(64, uint64_t)
FRT_PAIRS_OF_FLOATS(f32, float)
FRT_PAIRS_OF_FLOATS(f64, double)

#define FRT_OF_BITS(f) f##_u8, f##_u16, f##_u32, f##_u64
#define FRT_ROW(f) FRT_NAME(f)
static const frt_pair_fn FRT_NAME(frt_pairs)[FRT_REDUCTIONS][FRT_DTYPES] = {
    {FRT_ROW(sum_u8), FRT_ROW(sum_u16), FRT_ROW(sum_u32), FRT_ROW(sum_u64), FRT_ROW(sum_u8), FRT_ROW(sum_u16),
     FRT_ROW(sum_u32), FRT_ROW(sum_u64), FRT_ROW(sum_f32), FRT_ROW(sum_f32), FRT_ROW(sum_f32), FRT_ROW(sum_f64)},
    {FRT_ROW(prod_u8), FRT_ROW(prod_u16), FRT_ROW(prod_u32), FRT_ROW(prod_u64), FRT_ROW(prod_u8), FRT_ROW(prod_u16),
     FRT_ROW(prod_u32), FRT_ROW(prod_u64), FRT_ROW(prod_f32), FRT_ROW(prod_f32), FRT_ROW(prod_f32), FRT_ROW(prod_f64)},
    {FRT_ROW(min_i8), FRT_ROW(min_i16), FRT_ROW(min_i32), FRT_ROW(min_i64), FRT_ROW(min_u8), FRT_ROW(min_u16),
     FRT_ROW(min_u32), FRT_ROW(min_u64), FRT_ROW(min_f32), FRT_ROW(min_f32), FRT_ROW(min_f32), FRT_ROW(min_f64)},
    {FRT_ROW(max_i8), FRT_ROW(max_i16), FRT_ROW(max_i32), FRT_ROW(max_i64), FRT_ROW(max_u8), FRT_ROW(max_u16),
     FRT_ROW(max_u32), FRT_ROW(max_u64), FRT_ROW(max_f32), FRT_ROW(max_f32), FRT_ROW(max_f32), FRT_ROW(max_f64)},
    {FRT_ROW(band_u8), FRT_ROW(band_u16), FRT_ROW(band_u32), FRT_ROW(band_u64), FRT_ROW(band_u8), FRT_ROW(band_u16),
     FRT_ROW(band_u32), FRT_ROW(band_u64), 0, 0, 0, 0},
    {FRT_ROW(bor_u8), FRT_ROW(bor_u16), FRT_ROW(bor_u32), FRT_ROW(bor_u64), FRT_ROW(bor_u8), FRT_ROW(bor_u16),
     FRT_ROW(bor_u32), FRT_ROW(bor_u64), 0, 0, 0, 0},
};
#undef FRT_OF_BITS
#undef FRT_ROW

/* Divide in place. Integers round towards zero, as in C. */
FRT_TARGET static void FRT_NAME(frt_divide)(int dtype, void *out, size_t count, uint32_t divisor) {
#define FRT_DIVIDE(code, type, wide)                                                                  \
    case code: {                                                                                      \
        type *x = (type *)out;                                                                        \
        for (size_t i = 0; i < count; i++) x[i] = (type)(x[i] / (wide)divisor);                       \
        break;                                                                                        \
    }
    switch (dtype) {
        FRT_DIVIDE(FRT_I8, int8_t, int64_t)
        FRT_DIVIDE(FRT_I16, int16_t, int64_t)
        FRT_DIVIDE(FRT_I32, int32_t, int64_t)
        FRT_DIVIDE(FRT_I64, int64_t, int64_t)
        FRT_DIVIDE(FRT_U8, uint8_t, uint64_t)
        FRT_DIVIDE(FRT_U16, uint16_t, uint64_t)
        FRT_DIVIDE(FRT_U32, uint32_t, uint64_t)
        FRT_DIVIDE(FRT_U64, uint64_t, uint64_t)
        FRT_DIVIDE(FRT_F32, float, float)
        FRT_DIVIDE(FRT_F64, double, double)
    }
#undef FRT_DIVIDE
}

FRT_TARGET static void FRT_NAME(frt_widen)(int dtype, float *out, const uint16_t *in, size_t count) {
    size_t i = 0;
    if (dtype == FRT_BF16) {
        for (; i < count; i++) out[i] = frt_from_bfloat(in[i]);
        return;
    }
#ifdef FRT_HALF_BY_HARDWARE
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < count; i++) out[i] = frt_from_half(in[i]);
}

FRT_TARGET static void FRT_NAME(frt_narrow)(int dtype, uint16_t *out, const float *in, size_t count) {
    size_t i = 0;
    if (dtype == FRT_BF16) {
        for (; i < count; i++) out[i] = frt_to_bfloat(in[i]);
        return;
    }
#ifdef FRT_HALF_BY_HARDWARE
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++) out[i] = frt_to_half(in[i]);
}

/* Reduce one block of 16-bit floats in float32. */
FRT_TARGET static void FRT_NAME(frt_reduce_halves)(frt_pair_fn pair, int dtype, uint16_t *out,
                                                   const void *const *sources, int sources_count, size_t from,
                                                   size_t count, uint32_t divisor) {
    float sum[FRT_BLOCK_BYTES / 4], next[FRT_BLOCK_BYTES / 4];
    FRT_NAME(frt_widen)(dtype, sum, (const uint16_t *)sources[0] + from, count);
    for (int k = 1; k < sources_count; k++) {
        FRT_NAME(frt_widen)(dtype, next, (const uint16_t *)sources[k] + from, count);
        pair(sum, sum, next, count);
    }
    if (divisor > 1) FRT_NAME(frt_divide)(FRT_F32, sum, count, divisor);
    FRT_NAME(frt_narrow)(dtype, out + from, sum, count);
}

/* out = sources[0] . sources[1] . ..., divided by `divisor` if that is above 1. `out` may be one of the sources,
 * but must not partly overlap one. -1: this reduction is not defined for this type. */
FRT_TARGET static int FRT_NAME(frt_reduce)(int reduction, int dtype, void *out, const void *const *sources,
                                           int sources_count, size_t count, uint32_t divisor) {
    char sum[FRT_BLOCK_BYTES] __attribute__((aligned(64)));
    frt_pair_fn pair = FRT_NAME(frt_pairs)[reduction][dtype];
    size_t bytes = FRT_ITEM_BYTES[dtype], from, part;
    int halves = dtype == FRT_F16 || dtype == FRT_BF16;
    if (!pair) return -1;
    if (sources_count == 1 && divisor <= 1) {
        if (out != sources[0]) memcpy(out, sources[0], count * bytes);
        return 0;
    }
    if (sources_count == 2 && divisor <= 1 && !halves) {
        pair(out, sources[0], sources[1], count);
        return 0;
    }
    for (from = 0; from < count; from += part) {
        size_t most = FRT_BLOCK_BYTES / (halves ? 4 : bytes), at = from * bytes;
        part = count - from < most ? count - from : most;
        if (halves) {
            FRT_NAME(frt_reduce_halves)(pair, dtype, (uint16_t *)out, sources, sources_count, from, part, divisor);
            continue;
        }
        /* Use a separate block: `out` may be a source that is read later. */
        memcpy(sum, (const char *)sources[0] + at, part * bytes);
        for (int k = 1; k < sources_count; k++) {
            void *to = k == sources_count - 1 && divisor <= 1 ? (char *)out + at : sum;
            pair(to, sum, (const char *)sources[k] + at, part);
        }
        if (divisor > 1) {
            FRT_NAME(frt_divide)(dtype, sum, part, divisor);
            memcpy((char *)out + at, sum, part * bytes);
        }
    }
    return 0;
}

#undef FRT_PAIR
#undef FRT_PAIRS_OF_BITS
#undef FRT_PAIRS_OF_FLOATS
