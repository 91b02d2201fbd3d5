/* Three bits per client and object: the client has a reference; it has the bytes mapped; it waits for the value.
 *
 * The bits of the first 64 * words clients lie beside the object's state word. The bits of the other clients lie in
 * planes of FRT_PLANE_CLIENTS clients: a plane is an array with FRT_KINDS * FRT_PLANE_WORDS words per entry. A plane
 * gets memory when its first client is admitted, so a session pays for the processes that it has. `planes` in the
 * superblock counts the planes in use; when the last client of the highest plane is gone, readers skip that plane.
 *
 * Part of layout.h, which includes it after frt_ctx.
 */
#ifndef FRT_BITS_H
#define FRT_BITS_H

enum { FRT_REFS = 0, FRT_PINS = 1, FRT_WAITS = 2, FRT_KINDS = 3 };

/* How many planes are in use. A client's plane is counted before the client is admitted. A deleter stores a state word
 * and then reads this count; a holder sets its bit and then reads the word: one of them sees the other's store. */
static inline uint32_t frt_planes(const frt_ctx *x) {
    uint32_t n = a32_load_sc(&x->sb->planes);
    return n < x->planes_max ? n : x->planes_max;
}
/* How many words of bits, and client slots, are in use. */
static inline uint32_t frt_words(const frt_ctx *x) { return x->words + FRT_PLANE_WORDS * frt_planes(x); }
static inline uint32_t frt_clients(const frt_ctx *x) { return 64 * frt_words(x); }

/* The block of entry i in plane p: FRT_PLANE_WORDS words of each kind. */
static inline uint64_t *frt_plane(const frt_ctx *x, uint32_t p, uint32_t i) {
    return x->planes + ((size_t)p * x->objects_max + i) * (FRT_KINDS * FRT_PLANE_WORDS);
}
/* Word number w of entry i's bits of a kind: those of clients 64 * w to 64 * w + 63. */
static inline uint64_t *frt_bits(const frt_ctx *x, uint32_t i, unsigned kind, uint32_t w) {
    if (w < x->words) return frt_state(x, i) + 1 + kind * x->words + w;
    w -= x->words;
    return frt_plane(x, w / FRT_PLANE_WORDS, i) + kind * FRT_PLANE_WORDS + w % FRT_PLANE_WORDS;
}
/* The word that has this client's bit of a kind at entry i. */
static inline uint64_t *frt_mine(const frt_ctx *x, uint32_t i, unsigned kind) {
    return x->mine + (size_t)i * x->mine_stride + kind * x->mine_kinds;
}
/* Whether any client has a bit at entry i of the kinds `first` to `first + kinds - 1`, whose words are neighbours. */
static inline int frt_any_of(const frt_ctx *x, uint32_t i, unsigned first, unsigned kinds) {
    const uint64_t *bits = frt_state(x, i) + 1 + first * x->words;
    uint32_t n, p;
    for (uint32_t w = 0; w < kinds * x->words; w++)
        if (a64_load_sc(bits + w)) return 1;
    n = frt_planes(x);
    for (p = 0; __builtin_expect(p < n, 0); p++) {
        bits = frt_plane(x, p, i) + first * FRT_PLANE_WORDS;
        for (uint32_t w = 0; w < kinds * FRT_PLANE_WORDS; w++)
            if (a64_load_sc(bits + w)) return 1;
    }
    return 0;
}
static inline int frt_any(const frt_ctx *x, uint32_t i, unsigned kind) { return frt_any_of(x, i, kind, 1); }
/* Whether any client has a reference to entry i, or its bytes mapped. */
static inline int frt_held(const frt_ctx *x, uint32_t i) { return frt_any_of(x, i, FRT_REFS, 2); }
/* Clear all wait bits of entry i. The caller owns the entry. */
static inline void frt_clear_waits(const frt_ctx *x, uint32_t i) {
    uint64_t *bits = frt_state(x, i) + 1 + FRT_WAITS * x->words;
    uint32_t n = frt_planes(x), p;
    for (uint32_t w = 0; w < x->words; w++) a64_store_rlx(bits + w, 0);
    for (p = 0; __builtin_expect(p < n, 0); p++) {
        bits = frt_plane(x, p, i) + FRT_WAITS * FRT_PLANE_WORDS;
        for (uint32_t w = 0; w < FRT_PLANE_WORDS; w++) a64_store_rlx(bits + w, 0);
    }
}

#endif
