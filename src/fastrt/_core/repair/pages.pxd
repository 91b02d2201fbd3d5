from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx, frt_entry

cdef enum:
    PAGES_COPIED = 1 << 16  # bytes of records that are copied at once: more do not stay in the processor's cache
    PAGES_RECORDS = 512     # of the smaller kind that are copied at once
    PAGES_EXISTING = 0xfffc  # a bit for each state of a task or an object that exists: those beyond RESERVED

# A pass over a table: `begin`, then `next` until it returns 0. Between two calls the copies are the caller's.
cdef struct pages_pass:
    frt_ctx r
    uint32_t n, next, states
    uint32_t first                  # index of the first copied record
    uint16_t at[PAGES_RECORDS]      # places in `records` of those that match
    uint64_t words[PAGES_RECORDS]   # state words, from before the copy, by place
    char records[PAGES_COPIED]

cdef void pages_copy(frt_ctx *x, const void *first, size_t nbytes, char *to) noexcept nogil
cdef pages_pass *pages_begin(frt_ctx *x, uint32_t records, uint32_t states) except NULL
cdef uint32_t pages_next_tasks(pages_pass *p) noexcept nogil
cdef uint32_t pages_next_objects(pages_pass *p) noexcept nogil
cdef uint32_t pages_what(const frt_entry *entry, uint32_t i, const uint8_t *functions) noexcept nogil
cdef uint8_t *pages_functions(frt_ctx *x, uint32_t n) except NULL
