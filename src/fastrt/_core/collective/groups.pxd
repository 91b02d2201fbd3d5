"""C declarations of a group's shared memory, for the modules with its operations."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_yields

cdef extern from "group.h" nogil:
    ctypedef struct frt_post:
        uint64_t stamp
        uint64_t what
        uint64_t count
        uint64_t source
        uint64_t target
        uint64_t flags

    ctypedef struct frt_rank:
        frt_post posts[2]
        uint32_t wake
        uint32_t sleepers
        uint32_t processor
        uint32_t pid
        uint32_t state
        uint64_t start

    ctypedef struct frt_channel:
        uint64_t head
        uint64_t tail
        uint32_t broken

    ctypedef struct frt_group:
        uint64_t magic
        uint32_t version
        uint32_t world_size
        uint64_t total_bytes
        uint64_t chunk_bytes
        uint64_t ring_bytes
        uint64_t heap_bytes
        uint64_t ranks
        uint64_t channels
        uint64_t staging
        uint64_t rings
        uint64_t heaps
        uint64_t abandoned
        uint32_t dead
        uint32_t sleepers

    uint64_t FRT_GROUP_MAGIC
    uint32_t FRT_GROUP_VERSION
    int FRT_GROUP_RANKS_MAX, FRT_STEP_BITS
    int FRT_RANK_ABSENT, FRT_RANK_HERE, FRT_RANK_LEFT

cdef enum:
    WAIT_MET = 0
    WAIT_TIMED_OUT = 1
    WAIT_DEAD = 2
    WAIT_ABANDONED = 3
    WAIT_SIGNALLED = 4  # an exception is kept, to be raised once the caller has the GIL
    WAIT_BROKEN = 5


cdef class GroupMemory:
    cdef readonly int fd
    cdef readonly int rank
    cdef readonly int world_size
    cdef readonly uint64_t total_bytes
    cdef char *base
    cdef frt_group *head
    cdef frt_rank *ranks
    cdef frt_rank *mine
    cdef uint64_t chunk_bytes
    cdef uint64_t ring_bytes
    cdef uint64_t heap_begin  # offset of this rank's heap
    cdef uint64_t heap_bytes
    cdef uint64_t present  # the heap has memory up to this offset; allocations take the first free part that fits
    cdef list free  # (offset, bytes) of unused parts of the heap, by offset, never adjacent
    cdef list results  # (offset, bytes) of shared results that some rank may still use
    cdef list returned  # (offset, bytes) of blocks that were dropped since the last allocation
    cdef bint crowded  # the node has more ranks than processors
    cdef uint64_t moved_ns  # when this process last moved to another processor
    cdef frt_yields yields
    cdef uint32_t last_checked  # the rank whose process was checked last; all ranks take turns
    cdef dict raised  # thread -> the exception of WAIT_SIGNALLED

    cdef char *staging(self, int rank, int parity, int step) noexcept nogil
    cdef frt_channel *channel(self, int source, int target) noexcept nogil
    cdef char *ring(self, int source, int target) noexcept nogil
    cdef uint64_t offset_of(self, const void *at, uint64_t nbytes) noexcept nogil
    cdef void wake_all(self) noexcept nogil
    cdef int _collect(self) except -1
    cdef int wait(self, const uint64_t *word, uint64_t least, int rank, uint64_t seq,
                  int64_t *deadline_ns) noexcept nogil
    cdef void _leave_processor(self, int rank, int64_t now) noexcept nogil
    cdef int _check_others(self, int rank, bint of_all) noexcept with gil
    cdef void mark_dead(self, int rank) noexcept nogil


cdef class GroupPart:
    cdef GroupMemory memory
    cdef uint32_t is_closed  # another thread may set it

    cdef int check_open(self) except -1


cdef class Block:
    cdef GroupMemory memory
    cdef uint64_t offset
    cdef uint64_t nbytes
    cdef bint is_result  # all ranks write it once, then it is read-only
    cdef public bint open  # a result that may still be written
