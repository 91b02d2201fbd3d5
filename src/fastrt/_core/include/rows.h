/* The shared memory of an embedding table: one server writes it, processes of the same machine look rows up.
 *
 *   frt_rows | note of each row | values of each row | indexes        (a memfd, its size sealed and mostly a hole)
 *
 * An index is a hash table from key to row, with open addressing and linear steps. There are two places for an index
 * of each size from 2^FRT_INDEX_BITS_MIN entries on; `index` names the one in use and is the commit point of a
 * rebuild. The memory of the old index is freed at once: a reader that still looks there finds nothing and asks the
 * server.
 *
 * An entry's `row` is stored after its key; the row's note decides. A reader reads `seq`, copies the row and reads
 * `seq` again; the server makes `seq` odd while it writes the row. The reader also compares the note's key with the
 * wanted key. So a reader that meets a change, or a server that died within one, finds "missing" at worst, never
 * another key's values. Readers write only `used` and `clock`: hints of which rows were used last.
 */
#ifndef FRT_ROWS_H
#define FRT_ROWS_H

#include <stdint.h>

#define FRT_ROWS_MAGIC 0x3173776f722d7266ull
#define FRT_ROWS_HEAD_BYTES 4096
#define FRT_ROWS_MAX (1ull << 31)
#define FRT_INDEX_BITS_MIN 10
#define FRT_ROW_NONE 0u          /* an entry that was never used: a search ends here */
#define FRT_ROW_GONE 0xffffffffu /* an entry whose key was evicted */

typedef struct {
    uint64_t magic;
    uint64_t rows_max;
    uint32_t dim;
    uint32_t tracks_use;
    uint64_t index __attribute__((aligned(64))); /* logarithm of the size | place << 8 */
    uint64_t clock __attribute__((aligned(64))); /* counts lookups; `used` holds its value at a row's last use */
} frt_rows;

typedef struct {
    uint64_t key;
    uint32_t seq;
    uint32_t used;
} frt_note;

typedef struct {
    uint64_t key;
    uint32_t row; /* 1 + its number */
    uint32_t unused;
} frt_entry_of_row;

static inline uint64_t frt_mix(uint64_t x) { /* the finalizer of SplitMix64: every bit of a key reaches every other */
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

#endif
