/* The map of a dense table's shared memory: one server writes, processes of its machine read.
 *
 *   frt_versions | slot 0 | slot 1 | ...            (a memfd, its size sealed; memory comes with the first touch)
 *
 * A slot holds a whole version of what the server has of the table. `current` names the newest one and grows with each
 * publication, which is the commit point. The server writes the next version into a slot that is not current and that
 * nobody has pinned; a reader pins the current slot and then looks whether it still is current. Both sides store first
 * and load then, sequentially consistent, so that never both miss each other. Each reader writes its own row of pins;
 * when its connection ends the server clears the row. A server that dies leaves readers what they have pinned.
 */
#ifndef FRT_VERSIONS_H
#define FRT_VERSIONS_H

#include <stdint.h>

#define FRT_VERSIONS_MAGIC 0x31737265762d7266ull
#define FRT_VERSIONS_SLOTS 16
#define FRT_VERSIONS_READERS 63
#define FRT_VERSIONS_HEAD_BYTES 8192
#define FRT_VERSIONS_RETIRED 0xff /* as the current slot: what was here is elsewhere now */

typedef struct {
    uint64_t magic;
    uint64_t slot_bytes; /* a multiple of a page */
    uint64_t current __attribute__((aligned(64))); /* number << 8 | slot; numbers grow */
    uint32_t pins[FRT_VERSIONS_READERS][FRT_VERSIONS_SLOTS] __attribute__((aligned(64)));
} frt_versions;

_Static_assert(sizeof(frt_versions) <= FRT_VERSIONS_HEAD_BYTES, "the head's pages");

#endif
