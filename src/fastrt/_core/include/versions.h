/* The shared memory of a dense table: one server writes it, processes of the same machine read it.
 *
 *   frt_versions | slot 0 | slot 1 | ...            (a memfd, its size sealed; pages get memory at their first touch)
 *
 * A slot holds a whole version of the server's part of the table. `current` names the newest version; it grows with
 * each publication, and its store is the commit point. The server writes the next version into a slot that is neither
 * current nor pinned by a reader. A reader pins the current slot and then checks that it still is current. Both sides
 * store first and load second, sequentially consistent, so that at least one sees the other. Each reader writes its
 * own row of pins; when its connection ends the server clears the row. If the server dies, readers keep their pins.
 */
#ifndef FRT_VERSIONS_H
#define FRT_VERSIONS_H

#include <stdint.h>

#define FRT_VERSIONS_MAGIC 0x31737265762d7266ull
#define FRT_VERSIONS_SLOTS 16
#define FRT_VERSIONS_READERS 63
#define FRT_VERSIONS_HEAD_BYTES 8192
#define FRT_VERSIONS_RETIRED 0xff /* in place of the current slot: the table's data has moved to another memory */

typedef struct {
    uint64_t magic;
    uint64_t slot_bytes; /* a multiple of a page */
    uint64_t current __attribute__((aligned(64))); /* number << 8 | slot; numbers grow */
    uint32_t pins[FRT_VERSIONS_READERS][FRT_VERSIONS_SLOTS] __attribute__((aligned(64)));
} frt_versions;

_Static_assert(sizeof(frt_versions) <= FRT_VERSIONS_HEAD_BYTES, "the head's pages");

#endif
