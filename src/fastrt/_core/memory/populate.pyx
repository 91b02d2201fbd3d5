# cython: language_level=3, freethreading_compatible=True
"""Memory for the payload region ahead of its use, and its form: huge pages, nodes of a NUMA machine.

The first write into a fresh page costs twelve times as much as a copy into a warm one: the kernel finds, clears and
maps a page for each 4 KiB. Here it does so before a process waits. No word of the segment changes, no lock is taken and
no byte is written: memory appears earlier, and a death at any step leaves nothing to repair. `arena_grow` commits such
memory in microseconds.

A huge page (2 MiB) costs the kernel an eighth of the time of its 512 small ones, and every process maps it by one
fault. /dev/shm gives small pages on most systems; MADV_COLLAPSE (Linux 6.1) asks for huge ones all the same. It needs
one page that exists, and fills the holes around it. Measured for 1 GiB: 0.3 s of CPU and 0.3 s more in each process
that maps it with small pages, 0.07 s and none with huge ones.
"""
import os

from libc.errno cimport EINVAL, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit

cdef extern from *:
    """
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
    #endif
    #ifndef MADV_COLLAPSE
    #define MADV_COLLAPSE 25 /* Linux 6.1 */
    #endif
    static inline long frt_mbind(void *at, size_t nbytes, int mode, const unsigned long *nodes, unsigned long bits) {
        return syscall(SYS_mbind, at, nbytes, mode, nodes, bits, 0);
    }
    """
    int madvise(void *, size_t, int) nogil
    long frt_mbind(void *, size_t, int, const unsigned long *, unsigned long) nogil
    int MADV_POPULATE_WRITE, MADV_COLLAPSE, MADV_HUGEPAGE, MADV_DONTNEED

cdef enum:
    HUGE_BYTES = 2 << 20
    SYSTEM_PAGE = 4096
    MAP_STEP = 16 << 20
    MPOL_INTERLEAVE = 3
    MPOL_LOCAL = 4
    NODE_WORDS = 16

PLACEMENTS = {"interleave": MPOL_INTERLEAVE, "local": MPOL_LOCAL}


cdef int _one_unit(frt_ctx *x, uint64_t at, uint64_t nbytes, bint huge) noexcept nogil:
    """Give memory to bytes of one huge page's range: 1 if it is a huge page, 0 if not, FRT_FULL if there is none."""
    cdef int rc = 0
    # The kernel puts a huge page on the node of the page that exists: the next unit's is one page further, so
    # that interleaved pages make interleaved huge pages.
    cdef uint64_t seed = at + at // HUGE_BYTES % (HUGE_BYTES // SYSTEM_PAGE) * SYSTEM_PAGE
    if huge and nbytes == <uint64_t>HUGE_BYTES and segment_commit(x, seed, SYSTEM_PAGE) == FRT_OK \
            and madvise(x.base + at, HUGE_BYTES, MADV_COLLAPSE) == 0:
        rc = 1
    elif madvise(x.base + at, nbytes, MADV_POPULATE_WRITE) != 0:
        # Kernels before 5.14 do not know this request.
        rc = segment_commit(x, at, nbytes) if errno == EINVAL else FRT_FULL
    # The memory stays. This process does not use it, and its size would make it a victim when memory is short.
    madvise(x.base + at, nbytes, MADV_DONTNEED)
    return rc


def populate(Client client, uint64_t at, uint64_t nbytes, bint huge):
    """Give memory to a part of the payload region that is not committed yet. Takes no lock.

    Args:
        client: an attachment.
        at: where the part begins, in bytes from the region's begin; a multiple of 4 KiB.
        nbytes: its size; it is cut at the region's end.
        huge: whether to ask for huge pages. Where there are none, small pages are used.
    Returns:
        (bytes that have memory now, bytes of these in huge pages). The first is less than asked if there is no more.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t begin = x.payload_offset + at
    cdef uint64_t end = min(begin + nbytes, x.total_bytes)
    cdef uint64_t now = begin
    cdef uint64_t step
    cdef uint64_t of_huge = 0
    cdef int rc = 0
    client.ensure()
    if at % SYSTEM_PAGE or begin < at:
        raise ValueError(f"{at} is not a multiple of {SYSTEM_PAGE}")
    with nogil:
        while now < end and rc >= 0:
            step = min(HUGE_BYTES - now % HUGE_BYTES, end - now)
            rc = _one_unit(x, now, step, huge)
            if rc >= 0:
                now += step
                of_huge += step * rc
    return max(now, begin) - begin, of_huge


def map_committed(Client client, uint64_t at):
    """Map committed memory from `at` on into this process for writing, at most 16 MiB; later writes meet no fault.

    Args:
        client: this process's attachment.
        at: bytes from the begin of the payload region; a multiple of 4 KiB.
    Returns:
        How many bytes were mapped; 0 when all committed memory is, or the kernel does not know the request.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t committed
    cdef int rc
    client.ensure()
    committed = <uint64_t>frt_pages(x) << FRT_PAGE_SHIFT
    if at >= committed or at % SYSTEM_PAGE:
        return 0
    cdef uint64_t step = min(<uint64_t>MAP_STEP, committed - at)
    with nogil:
        rc = madvise(x.base + x.payload_offset + at, step, MADV_POPULATE_WRITE)
    return step if rc == 0 else 0


def advise_huge(Client client):
    """Ask for huge pages where /dev/shm is mounted with `huge=advise`. False if the kernel has none."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    cdef uint64_t first = (x.payload_offset + HUGE_BYTES - 1) // HUGE_BYTES * HUGE_BYTES
    return first < x.total_bytes and madvise(x.base + first, x.total_bytes - first, MADV_HUGEPAGE) == 0


def place(Client client, str placement, list nodes):
    """Choose the NUMA nodes of the payload region's memory. The choice is the segment's, for all processes.

    Args:
        client: an attachment.
        placement: "interleave": spread over `nodes`; "local": on the node of the processor that first writes a page.
        nodes: numbers of the nodes that have memory, below 1024.
    Raises:
        OSError: the kernel refuses, as in some containers.
    """
    cdef frt_ctx *x = &client.x
    cdef unsigned long mask[NODE_WORDS]
    cdef int k, mode = PLACEMENTS[placement]
    client.ensure()
    for k in range(NODE_WORDS):
        mask[k] = 0
    for node in nodes:
        if not 0 <= node < 64 * NODE_WORDS:
            raise ValueError(f"node {node}: must be from 0 to {64 * NODE_WORDS - 1}")
        mask[<int>node // 64] |= <unsigned long>1 << (<int>node % 64)
    cdef uint64_t first = (x.payload_offset + SYSTEM_PAGE - 1) // SYSTEM_PAGE * SYSTEM_PAGE
    if frt_mbind(x.base + first, x.total_bytes - first, mode, NULL if mode == MPOL_LOCAL else mask,
                 0 if mode == MPOL_LOCAL else 64 * NODE_WORDS) != 0:
        code = errno
        raise OSError(code, os.strerror(code), "mbind")
