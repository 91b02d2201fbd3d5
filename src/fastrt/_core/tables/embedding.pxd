from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef extern from "rows.h" nogil:
    uint64_t FRT_ROWS_MAGIC, FRT_ROWS_MAX
    uint32_t FRT_ROW_NONE, FRT_ROW_GONE
    ctypedef struct frt_rows:
        uint64_t magic
        uint64_t rows_max
        uint32_t dim
        uint32_t tracks_use
        uint64_t index
        uint64_t clock
    ctypedef struct frt_note:
        uint64_t key
        uint32_t seq
        uint32_t used
    ctypedef struct frt_entry_of_row:
        uint64_t key
        uint32_t row
        uint32_t unused
    uint64_t frt_mix(uint64_t) noexcept

cdef struct frt_mapped:
    frt_rows *head             # NULL: this process has not mapped the server's memory
    frt_note *notes
    const float *values
    const frt_entry_of_row *entries
    uint64_t mask
    uint64_t rows_max

cdef enum:
    PAGE = 4096
    HEAD = 4096  # FRT_ROWS_HEAD_BYTES
    BITS_MIN = 10  # FRT_INDEX_BITS_MIN


cdef class EmbeddingMemory:
    cdef readonly int fd
    cdef readonly uint64_t rows_max
    cdef readonly uint32_t dim
    cdef readonly uint64_t rows_used   # rows that were ever allocated; set on the server only
    cdef readonly uint64_t count       # rows that have a key; set on the server only
    cdef uint64_t total_bytes
    cdef uint64_t tombs
    cdef char *base
    cdef frt_rows *head
    cdef frt_note *notes
    cdef float *values
    cdef char *indexes
    cdef int bits_max
    cdef bint is_server
    cdef pthread_mutex_t turn          # of the server's threads, which make, find, change and remove rows
    cdef list free                     # rows that were removed, to be used again
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]

    cdef void place(self, uint64_t rows_max, uint32_t dim) noexcept
    cdef void ask_for_huge_pages(self, char *begin, char *end) noexcept nogil
    cdef frt_entry_of_row *index(self, uint64_t word) noexcept nogil
    cdef void enter(self, uint64_t key, uint32_t row, frt_entry_of_row *entries, uint64_t mask) noexcept nogil
    cdef bint make_room(self, uint64_t more) noexcept
    cdef void describe(self, frt_mapped *mapped) noexcept nogil
