from libc.stddef cimport size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_ctx

cdef enum:
    PASS_COPIED = 1 << 16  # bytes of records that are copied at once: more do not stay in the processor's cache
    PASS_RECORDS = 512     # of the smaller kind that are copied at once
    PASS_EXISTING = 0xfffc  # a bit for each state of a task or an object that exists: those beyond RESERVED
    PASS_THREADS = 4       # that read one table together, at most

# One thread's part of a pass over a table. Between two calls of `pass_tasks` or `pass_objects` the copies are the
# caller's.
cdef struct table_pass:
    frt_ctx r
    uint64_t *taken                 # `pieces` of the first thread
    uint64_t pieces                 # that threads have taken
    uint32_t n, states
    uint32_t next, end              # the rest of this thread's piece
    uint32_t first                  # index of the first copied record
    uint16_t at[PASS_RECORDS]       # places in `records` of those that match
    uint64_t words[PASS_RECORDS]    # state words, from before the copy, by place
    char records[PASS_COPIED]

ctypedef void (*pass_reader)(table_pass *p, void *into) noexcept nogil

cdef void pass_copy(frt_ctx *x, const void *first, size_t nbytes, char *to) noexcept nogil
cdef uint32_t pass_threads(uint32_t records) except 0
cdef table_pass *pass_begin(frt_ctx *x, uint32_t records, uint32_t states, uint32_t threads) except NULL
cdef uint32_t pass_tasks(table_pass *p) noexcept nogil
cdef uint32_t pass_objects(table_pass *p) noexcept nogil
cdef void pass_read(table_pass *p, uint32_t threads, pass_reader read, void *into, size_t nbytes) noexcept nogil
