/* Copies of large blocks into shared memory.
 *
 * Above a size of its own (192 MiB where this was measured) memcpy of glibc 2.36 copies several pages side by side. Its
 * loads then wait for its stores if the target lies 16 to 512 bytes further in its page than the source: 4 instead of
 * 15 GB/s on a Zen 3. NumPy's large arrays begin 16 bytes into a page and a store's values 64 or more, so most puts met
 * it. One page after the other, with stores past the cache, takes 13 to 15 GB/s at every distance; and from 8 MiB on
 * it is 1.4 times as fast as smaller memcpys, as the target is not read before it is written. Blocks below that go
 * through the cache, where their readers find them: a put and a task that sums 1 MiB took 1.5 times as long past it.
 */
#ifndef FRT_COPY_H
#define FRT_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>

#define FRT_PAST_CACHE_BYTES (8u << 20)

static inline void frt_copy_past_cache(char *to, const char *from, size_t n) {
    size_t head = -(uintptr_t)to & 63, at;
    memcpy(to, from, head);
    for (at = head; n - at >= 64; at += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    memcpy(to + at, from + at, n - at);
    _mm_sfence(); /* before the store that shows the value to others */
}
#endif

/* As memcpy: the blocks do not overlap. */
static inline void frt_copy(void *to, const void *from, size_t n) {
#if defined(__x86_64__)
    if (n >= FRT_PAST_CACHE_BYTES) {
        frt_copy_past_cache((char *)to, (const char *)from, n);
        return;
    }
#endif
    memcpy(to, from, n);
}

#endif
