from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from *:
    """
    #define FRT_NIL ((uint64_t)-1)
    #define FRT_PENDING ((uint32_t)1 << 31)
    """
    const uint64_t NIL "FRT_NIL"
    const uint32_t PENDING "FRT_PENDING"


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass


cdef extern from "turn.h":
    void frt_turn_take(pthread_mutex_t *) noexcept
    void frt_turn_give(pthread_mutex_t *) noexcept
    void frt_read_take(pthread_mutex_t *) noexcept
    void frt_read_give(pthread_mutex_t *) noexcept


cdef struct frt_contents:
    uint64_t count
    uint64_t refs[1]


cdef struct frt_ref:
    # All fields of a reference are in one cache line: code that uses one field also uses others.
    uint64_t count  # FREED once deallocated
    uint64_t target  # the reference of which it is an alias; itself: canonical; UNKNOWN: neither yet
    uint64_t parent  # union-find over the classes
    uint64_t next  # the ring of a class's members; once freed, the chain of all references freed with it
    uint64_t live  # at a class's root: members with a count or a hold; during a deallocation, a link of its stack
    uint64_t end  # at a class's root: the end of its chain of aliases
    frt_contents *contents  # the references that the object contains
    uint32_t hold  # deliveries in flight; the top bit is set while a producer is pending
    uint32_t unused


cdef enum:
    BLOCK_BITS = 12


cdef class RefTable:
    cdef frt_ref **blocks  # of 1 << BLOCK_BITS references each; a block never moves; FORGOTTEN once all are dead
    cdef uint32_t *block_alive  # by block: its live references
    cdef bint has_dead_block  # which `forget` has not freed yet
    cdef uint64_t block_count
    cdef uint64_t block_room
    cdef uint64_t length
    cdef uint64_t room
    cdef uint64_t freed_count
    cdef uint64_t dangling_count
    cdef pthread_mutex_t lock
    cpdef uint64_t alive_count(self) noexcept
    cpdef uint64_t add(self, uint64_t n=*, uint64_t count=*, bint pending=*) except? 0
    cpdef increment(self, refs)
    cpdef list decrement(self, refs)
    cpdef hold(self, uint64_t ref)
    cpdef list release(self, uint64_t ref)
    cpdef list ready(self, uint64_t ref)
    cpdef int64_t canonical_of(self, uint64_t ref) except? -2
    cpdef uint64_t end(self, uint64_t ref) except? 0
    cpdef bint is_alive(self, uint64_t ref) except -1
    cpdef bint is_pending(self, uint64_t ref) except -1
    cpdef list members(self, uint64_t ref)
    cdef copied(self, uint64_t first, bint are_targets)
    cdef uint64_t read(self, const uint64_t *word) noexcept
    cdef int fail(self, int kind, uint64_t ref) except -1
    cdef int grow(self, uint64_t wanted) except -1
    cdef int add_forgotten(self) except -1
    cdef bint is_kept(self, uint64_t block) noexcept nogil
    cdef int forget(self) noexcept
    cdef uint64_t find(self, uint64_t ref) noexcept nogil
    cdef int seen(self, uint64_t ref) noexcept nogil
    cdef int increment_all(self, const uint64_t *refs, Py_ssize_t n, uint64_t *bad) noexcept nogil
    cdef int decrement_all(
        self, const uint64_t *refs, Py_ssize_t n, uint64_t *zeros, uint64_t *head, uint64_t *bad
    ) noexcept nogil
    cdef uint64_t drop(self, uint64_t *zeros, Py_ssize_t n) noexcept nogil
    cdef uint64_t drop_contents(self, uint64_t ref, uint64_t stack) noexcept nogil
    cdef int contain_all(self, uint64_t ref, const uint64_t *refs, Py_ssize_t n, uint64_t *bad) noexcept nogil
    cdef int keep_contents(self, uint64_t ref, const uint64_t *refs, Py_ssize_t n) noexcept nogil
    cdef int merge(self, uint64_t alias, uint64_t target) noexcept nogil
    cdef int checked(self, int failed, uint64_t ref) except -1
    cdef list listed(self, int failed, uint64_t ref, uint64_t head, list found)


cdef inline frt_ref *ref_at(RefTable table, uint64_t ref) noexcept nogil:
    """The fields of a reference, which must exist."""
    return &table.blocks[ref >> BLOCK_BITS][ref & ((1 << BLOCK_BITS) - 1)]


cdef inline void enter(RefTable table) noexcept:
    """Lock the table; release the GIL only if another thread holds the lock."""
    frt_turn_take(&table.lock)


cdef inline void leave(RefTable table) noexcept:
    frt_turn_give(&table.lock)


cdef inline void enter_read(RefTable table) noexcept:
    """Lock the table for a few reads; where there is a GIL, it is enough."""
    frt_read_take(&table.lock)


cdef inline void leave_read(RefTable table) noexcept:
    frt_read_give(&table.lock)
