# cython: language_level=3, freethreading_compatible=True
"""The memory that the ranks of one node share: its mapping, its heap, and the waits of the ranks for one another.

`include/group.h` describes the memory and names the writer of each field. A rank waits until a word of another rank
reaches a value: it spins, because the others are usually microseconds away, then sleeps on a futex, and every 50 ms
checks that other ranks are alive and whether a signal came. The first rank that finds another one dead stores this in
the group's head and wakes all.
"""
import os
from bisect import insort

from fastrt._core.memory.segment import start_time
from fastrt.errors import AttachError, ObjectStoreFullError, StaleReferenceError

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pythread cimport PyThread_get_thread_ident
from libc.errno cimport EINTR
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset
from posix.unistd cimport close

from fastrt._core.memory.layout cimport (
    a8_and_sc, a8_load_sc, a32_add_sc, a32_cas_sc, a32_load_rlx, a32_load_sc, a32_store_rlx, a32_store_sc, a32_sub_sc,
    a64_load_acq, a64_load_rlx, a64_load_sc, a64_store_rlx, a_relax, frt_futex_wait, frt_futex_wake, frt_now_ns,
    frt_yield,
)

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_NORESERVE
    void *MAP_FAILED

cdef extern from "<sched.h>" nogil:
    ctypedef struct cpu_set_t:
        pass
    int sched_getcpu()
    int sched_getaffinity(int, size_t, cpu_set_t *)
    int sched_setaffinity(int, size_t, const cpu_set_t *)
    void CPU_CLR(int, cpu_set_t *)
    int CPU_COUNT(const cpu_set_t *)

cdef extern from *:
    """
    #include "group.h"
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
    """
    int MADV_POPULATE_WRITE

CHUNK_BYTES = 1 << 19
RING_BYTES = 1 << 18
cdef enum:
    PAGE = 4096
    SPINS = 1000  # about 25 us: ranks that come to an operation together are much closer
    SPINS_CROWDED = 50
    YIELDS = 20  # after the spins, yield this often (the other rank may need this processor); then sleep
    CHECK_NS = 50_000_000
    MOVE_NS = 2_000_000  # the shortest time between two moves to another processor


def page_up(nbytes):
    """The next multiple of a page."""
    return (nbytes + PAGE - 1) & -PAGE


cdef class GroupMemory:
    """One process's mapping of a group's memory, for one rank. Call `create` in one process and `attach` in all."""

    def __cinit__(self):
        self.fd = -1
        self.base = NULL

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.total_bytes)
        if self.fd >= 0:
            close(self.fd)

    @staticmethod
    def create(int world_size, uint64_t chunk_bytes=CHUNK_BYTES, uint64_t heap_bytes=0):
        """Make the memory for a group.

        Args:
            world_size: how many ranks, 1 to FRT_GROUP_RANKS_MAX.
            chunk_bytes: size of a staging buffer; operations move this much at a time.
            heap_bytes: how much each rank can allocate, in bytes; by default the size of the machine's memory.
        Returns:
            The descriptor of a sealed memfd; the caller closes it.
        Raises:
            ValueError: a size is out of range.
        """
        import fcntl

        cdef frt_group head
        cdef uint64_t pairs = world_size * world_size
        if not 1 <= world_size <= FRT_GROUP_RANKS_MAX:
            raise ValueError(f"a group of {world_size} ranks on one node; there can be 1 to {FRT_GROUP_RANKS_MAX}")
        if chunk_bytes < PAGE or chunk_bytes % PAGE:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be a multiple of {PAGE}")
        memset(&head, 0, sizeof(head))
        head.magic, head.version, head.world_size = FRT_GROUP_MAGIC, FRT_GROUP_VERSION, world_size
        head.chunk_bytes, head.ring_bytes = chunk_bytes, RING_BYTES
        head.heap_bytes = page_up(heap_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        head.ranks = PAGE
        head.channels = page_up(head.ranks + world_size * sizeof(frt_rank))
        head.staging = page_up(head.channels + pairs * sizeof(frt_channel))
        head.rings = head.staging + world_size * 4 * chunk_bytes
        head.heaps = head.rings + pairs * RING_BYTES
        head.total_bytes = head.heaps + world_size * head.heap_bytes
        fd = os.memfd_create("fastrt-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, head.total_bytes)
            os.pwrite(fd, (<char *>&head)[:sizeof(head)], 0)
            # No process can truncate it: a process that touched the truncated part would be killed (SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def attach(int fd, int rank, int world_size):
        """Map a group's memory as one of its ranks.

        Args:
            fd: the descriptor from `create`, or a duplicate; the result owns it from now on.
            rank: this process's number.
            world_size: how many ranks the memory must be made for.
        Returns:
            The mapping.
        Raises:
            AttachError: the memory was not made by a process of this build for this group, or cannot be mapped.
        """
        cdef GroupMemory self = GroupMemory.__new__(GroupMemory)
        cdef frt_group *head
        cdef void *at
        self.fd = fd
        self.total_bytes = os.fstat(fd).st_size
        if self.total_bytes < PAGE:
            raise AttachError(f"the group's memory has {self.total_bytes} bytes and no head")
        at = mmap(NULL, self.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)
        if at == MAP_FAILED:
            raise AttachError(f"cannot map {self.total_bytes} bytes for a group: raise the address-space limit "
                              "(ulimit -v)")
        self.base = <char *>at
        self.head = head = <frt_group *>at
        if head.magic != FRT_GROUP_MAGIC or head.version != FRT_GROUP_VERSION or \
                head.total_bytes != self.total_bytes or <int>head.world_size != world_size or \
                not 0 <= rank < world_size:
            raise AttachError("the group's memory was made by another version of fastrt, or for another group")
        self.ranks = <frt_rank *>(self.base + head.ranks)
        self.mine = &self.ranks[rank]
        self.rank, self.world_size = rank, world_size
        self.chunk_bytes, self.ring_bytes, self.heap_bytes = head.chunk_bytes, head.ring_bytes, head.heap_bytes
        self.heap_begin = head.heaps + rank * head.heap_bytes
        self.present = self.heap_begin
        self.free = [(self.heap_begin, head.heap_bytes)]
        self.results = []
        self.returned = []
        self.raised = {}
        self.crowded = world_size > len(os.sched_getaffinity(0))
        self.mine.pid, self.mine.start = os.getpid(), start_time(os.getpid())
        a32_store_sc(&self.mine.state, FRT_RANK_HERE)
        return self

    def leave(self):
        """Mark this rank as left; ranks that wait for it are woken at once."""
        a32_store_sc(&self.mine.state, FRT_RANK_LEFT)
        self.wake_all()

    def dead_rank(self):
        """The rank that was found dead or gone, or None."""
        cdef uint32_t dead = a32_load_sc(&self.head.dead)
        return dead - 1 if dead else None

    def has_left(self, int rank):
        """Whether a rank has left the group."""
        return a32_load_sc(&self.ranks[rank].state) == FRT_RANK_LEFT

    def is_gone(self, int rank):
        """Whether a rank's process has ended, or the rank has left."""
        cdef frt_rank *other = &self.ranks[rank]
        cdef uint32_t state = a32_load_sc(&other.state)
        return state == FRT_RANK_LEFT or (state == FRT_RANK_HERE and start_time(other.pid) != other.start)

    # ---- addresses ----

    cdef char *staging(self, int rank, int parity, int step) noexcept nogil:
        return self.base + self.head.staging + (4 * rank + 2 * parity + (step & 1)) * self.chunk_bytes

    cdef frt_channel *channel(self, int source, int target) noexcept nogil:
        return <frt_channel *>(self.base + self.head.channels) + source * self.world_size + target

    cdef char *ring(self, int source, int target) noexcept nogil:
        return self.base + self.head.rings + <uint64_t>(source * self.world_size + target) * self.ring_bytes

    cdef uint64_t offset_of(self, const void *at, uint64_t nbytes) noexcept nogil:
        """The offset of a buffer in a heap, where other ranks can read it in place; 0 for private memory."""
        cdef uint64_t offset = <uintptr_t>at - <uintptr_t>self.base
        cdef uint64_t heaps = self.heap_begin - self.rank * self.heap_bytes
        if <uintptr_t>at >= <uintptr_t>self.base and offset >= heaps and offset + nbytes <= self.total_bytes:
            return offset
        return 0

    # ---- waiting ----

    cdef void wake_all(self) noexcept nogil:
        cdef int k
        for k in range(self.world_size):
            if a32_load_sc(&self.ranks[k].sleepers):
                a32_add_sc(&self.ranks[k].wake, 1)
                frt_futex_wake(&self.ranks[k].wake)

    cdef void mark_dead(self, int rank) noexcept nogil:
        a32_cas_sc(&self.head.dead, 0, rank + 1)
        self.wake_all()

    cdef int wait(self, const uint64_t *word, uint64_t least, int rank, uint64_t seq,
                  int64_t *deadline_ns) noexcept nogil:
        """Wait until a word of `rank` is at least `least`; one of WAIT_*.

        Args:
            seq: the operation of this wait, or 0 for none; the wait also ends if a rank gives that operation up.
            deadline_ns: a time of the clock; or, if negative, the time from now, which is then replaced by the time
                of the clock when the wait first needs it.
        """
        cdef int spins = SPINS_CROWDED if self.crowded else SPINS
        cdef int _k, rc
        cdef uint32_t seen
        cdef int64_t now, left, checked
        for _k in range(spins):
            if a64_load_acq(word) >= least:
                return WAIT_MET
            a_relax()
        checked = frt_now_ns()
        self._leave_processor(rank, checked)
        for _k in range(YIELDS):
            if not frt_yield(&self.yields, &checked):
                break
            if a64_load_acq(word) >= least:
                return WAIT_MET
        if deadline_ns[0] < 0:
            deadline_ns[0] = checked - deadline_ns[0]
        a32_add_sc(&self.head.sleepers, 1)
        a32_add_sc(&self.mine.sleepers, 1)
        while True:
            seen = a32_load_sc(&self.mine.wake)
            if a64_load_sc(word) >= least:
                rc = WAIT_MET
                break
            if a32_load_sc(&self.head.dead):
                rc = WAIT_DEAD
                break
            if seq and a64_load_sc(&self.head.abandoned) >= seq:
                rc = WAIT_ABANDONED
                break
            now = frt_now_ns()
            left = deadline_ns[0] - now
            if now - checked >= CHECK_NS or left <= 0:
                rc = self._check_others(rank, seq != 0)
                if rc != WAIT_MET:
                    break
                checked = now
            if left <= 0:
                rc = WAIT_TIMED_OUT
                break
            if frt_futex_wait(&self.mine.wake, seen, left if left < CHECK_NS else CHECK_NS) == EINTR:
                checked = 0
        a32_sub_sc(&self.mine.sleepers, 1)
        a32_sub_sc(&self.head.sleepers, 1)
        # If the other rank stored the value and then left or died, the wait has still succeeded.
        return WAIT_MET if rc != WAIT_SIGNALLED and a64_load_sc(word) >= least else rc

    cdef void _leave_processor(self, int rank, int64_t now) noexcept nogil:
        """Leave the processor that this rank shares with the rank it waits for, if there are enough processors.

        The kernel wakes a sleeper on its waker's processor. Two ranks that take turns there are never busy at the same
        time, and each has run too recently to be moved: they stay together, and each operation takes 35 us instead of
        0.7.
        """
        cdef cpu_set_t allowed, others
        cdef int here = sched_getcpu()
        a32_store_sc(&self.mine.processor, here + 1)
        if self.crowded or rank > self.rank or <int>a32_load_sc(&self.ranks[rank].processor) != here + 1 or \
                now - <int64_t>a64_load_rlx(&self.moved_ns) < MOVE_NS or \
                sched_getaffinity(0, sizeof(allowed), &allowed) != 0:
            return
        others = allowed
        CPU_CLR(here, &others)
        if CPU_COUNT(&others):
            a64_store_rlx(&self.moved_ns, <uint64_t>now)
            sched_setaffinity(0, sizeof(others), &others)
            sched_setaffinity(0, sizeof(allowed), &allowed)

    cdef int _check_others(self, int rank, bint of_all) noexcept with gil:
        """Check for signals, and whether the rank that this one waits for is alive.

        In an operation of all ranks another rank is checked, too, in turns: all may be waiting for a rank that is only
        late, and none for the one that is dead. (A rank that has left may have done its part in this operation.)
        """
        cdef frt_rank *other
        cdef uint32_t next
        try:
            PyErr_CheckSignals()
            if self.is_gone(rank):
                self.mark_dead(rank)
                return WAIT_DEAD
            next = (a32_load_rlx(&self.last_checked) + 1) % <uint32_t>self.world_size
            a32_store_rlx(&self.last_checked, next)
            other = &self.ranks[next]
            if of_all and a32_load_sc(&other.state) == FRT_RANK_HERE and start_time(other.pid) != other.start:
                self.mark_dead(next)
                return WAIT_DEAD
        except BaseException as e:
            self.raised[PyThread_get_thread_ident()] = e
            return WAIT_SIGNALLED
        return WAIT_MET

    def take_raised(self):
        """Take the exception that ended a wait of this thread."""
        return self.raised.pop(PyThread_get_thread_ident())

    # ---- the heap of this rank ----

    @cython.critical_section
    def allocate(self, uint64_t nbytes, bint is_result=False):
        """Allocate a block of this rank's heap, with its memory, that all ranks can read in place.

        Args:
            nbytes: its size.
            is_result: all ranks will write it and read it; see `result`.
        Returns:
            The block; its memory is free again when the block and all views of it are gone.
        Raises:
            ObjectStoreFullError: the heap is used up, or the system has no more memory.
        """
        cdef uint64_t room = page_up(nbytes + (PAGE if is_result else 0)) or PAGE
        cdef uint64_t offset, size
        self._collect()
        for k, (offset, size) in enumerate(self.free):
            if size >= room:
                if size > room:
                    self.free[k] = (offset + room, size - room)
                else:
                    del self.free[k]
                break
        else:
            raise ObjectStoreFullError(
                f"a group's heap of {self.heap_bytes} bytes has no room for {nbytes}: drop arrays that are not needed")
        if offset + room > self.present:
            with nogil:
                # Older kernels reject this request (EINVAL); pages then get memory at the first touch.
                madvise(self.base + offset, room, MADV_POPULATE_WRITE)
            self.present = max(self.present, offset + room)  # another thread may have allocated behind this block
        cdef Block block = Block.__new__(Block)
        block.memory, block.nbytes, block.is_result = self, nbytes, is_result
        block.offset = offset + (PAGE if is_result else 0)
        if is_result:
            memset(self.base + offset, 1, self.world_size)
            self.results.append((offset, room))
        return block

    def result(self, uint64_t offset, uint64_t nbytes):
        """Make this rank's hold on a shared result that another rank has allocated; `allocate` has counted it."""
        cdef Block block = Block.__new__(Block)
        block.memory, block.offset, block.nbytes, block.is_result = self, offset, nbytes, True
        return block

    cdef int _collect(self) except -1:
        """Free the blocks that were dropped, and the shared results that no rank uses any more."""
        cdef uint64_t offset
        cdef const uint8_t *held
        cdef bint is_held
        cdef int rank
        while self.returned:
            try:
                offset, size = self.returned.pop()
            except IndexError:  # another thread has taken the last one
                break
            self._release(offset, size)
        kept = []
        for offset, size in self.results:
            held = <const uint8_t *>(self.base + offset)
            is_held = False
            for rank in range(self.world_size):
                is_held |= a8_load_sc(held + rank) != 0
            if is_held:
                kept.append((offset, size))
            else:
                self._release(offset, size)
        self.results = kept

    def _release(self, offset, size):
        insort(self.free, (offset, size))
        k = self.free.index((offset, size))
        for left in (k, k - 1):  # join it with its neighbours
            if 0 <= left < len(self.free) - 1 and sum(self.free[left]) == self.free[left + 1][0]:
                offset, size = self.free[left]
                self.free[left] = (offset, size + self.free.pop(left + 1)[1])

    @property
    def used_bytes(self):
        """How many bytes of this rank's heap are allocated."""
        with cython.critical_section(self):
            self._collect()
            return self.heap_bytes - sum(size for _, size in self.free)


cdef class GroupPart:
    """A use that one rank makes of its group: it ends when the group is destroyed, or belongs to a parent process.

    Args:
        memory: this rank's mapping of the group's memory.
    """

    def __cinit__(self, GroupMemory memory, *_, **__):
        self.memory = memory

    @property
    def closed(self):
        """Whether the group is destroyed: nothing is possible any more."""
        return a32_load_sc(&self.is_closed) != 0

    @closed.setter
    def closed(self, bint closed):
        a32_store_sc(&self.is_closed, closed)

    cdef int check_open(self) except -1:
        if a32_load_sc(&self.is_closed):
            raise StaleReferenceError("the group is destroyed, or belongs to the process this one was forked from")
        return 0


cdef class Block:
    """A part of the group's memory, as a buffer. It stays mapped and allocated as long as any view of it lives."""

    def __init__(self):
        raise TypeError("a Block cannot be made directly; call GroupMemory.allocate() or GroupMemory.result()")

    def __dealloc__(self):
        if self.memory is None:
            return
        if self.is_result:
            # One byte per rank, so that a rank that dies leaves nothing half done.
            a8_and_sc(<uint8_t *>self.memory.base + self.offset - PAGE + self.memory.rank, 0)
        elif self.nbytes or self.offset:
            # Not into the list `free`: the garbage collector may call this in the middle of an allocation.
            self.memory.returned.append((self.offset, page_up(self.nbytes) or PAGE))

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef bint frozen = self.is_result and not self.open
        PyBuffer_FillInfo(buffer, self, self.memory.base + self.offset, self.nbytes, frozen, flags)

    @property
    def place(self):
        """The block's offset in the group's memory."""
        return self.offset
