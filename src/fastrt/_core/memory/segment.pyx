# cython: language_level=3, freethreading_compatible=True
"""One POSIX shared-memory segment: create, attach, commit memory, unlink.

The name carries 128 random bits, the mode is 0600, creation is exclusive. Attaching checks everything that
could give the segment's words another meaning in this process: magic, layout version, the build's struct sizes,
a checksum of the geometry, owner, boot and PID namespace (thread ids of another namespace would confuse robust
locks). Each process has two mappings: read-write for the tables and for payloads being written (not inherited
by fork), and read-only for the views that users get, so that a stray write crashes only the process that made it.

The size is fixed and sparse. `segment_commit` makes the kernel reserve memory (fallocate) before any process
touches it: a full /dev/shm is an error code, never SIGBUS.
"""
import operator
import os
import re
import stat
import zlib

from fastrt.errors import AttachError, ObjectStoreFullError

from libc.errno cimport EINTR
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport close, getpid, unlink

from fastrt._core.memory.layout cimport *
from fastrt._core.memory.shm cimport create_shm, map_aligned, open_shm, unlink_shm
from fastrt._core.memory.trace cimport frt_trace_ticks

cdef extern from "<sys/mman.h>" nogil:
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    int PROT_READ, PROT_WRITE, MADV_DONTFORK
    void *MAP_FAILED

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef extern from "<fcntl.h>" nogil:
    int posix_fallocate(int, long, long)
    int fallocate(int, int, long, long)
    int FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE

cdef extern from "<sys/statvfs.h>" nogil:
    ctypedef struct frt_statvfs "struct statvfs":
        uint64_t f_bavail
        uint64_t f_blocks
        uint64_t f_frsize
    int fstatvfs(int, frt_statvfs *)

cdef extern from *:
    """
    #include "layout.h"
    #define HUGE_BYTES (2ul << 20) /* of a huge page; the payload region begins at a multiple of it */
    #define FRT_STATIC_BYTES offsetof(frt_superblock, static_end)

    /* Builds that disagree on any struct's size get different values. No secret, and no checksum of contents. */
    static inline uint32_t frt_abi(void) {
        uint64_t h = 1469598103934665603ULL;
        const uint64_t facts[] = {sizeof(frt_superblock), sizeof(frt_client), sizeof(frt_entry), sizeof(frt_task),
                                  sizeof(frt_lock), sizeof(frt_page_link), sizeof(frt_trace_ring), sizeof(frt_function),
                                  sizeof(frt_actor), sizeof(frt_ranked), sizeof(frt_tally), FRT_TALLIES,
                                  sizeof(frt_failure), FRT_FAILURES, FRT_ACTORS, FRT_FUNCTIONS, FRT_LOCKS,
                                  FRT_SLOTS_MOST, FRT_PLANE_WORDS,
                                  FRT_PAGE_SHIFT, FRT_CLASSES, FRT_CELL_BYTES, HUGE_BYTES,
                                  offsetof(frt_superblock, ring_head), 0x01020304};
        for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) h = (h ^ facts[i]) * 1099511628211ULL;
        return (uint32_t)(h ^ (h >> 32));
    }
    """
    uint32_t frt_abi() noexcept
    uint32_t FRT_STATIC_BYTES
    uint64_t HUGE_BYTES
    uint32_t sizeof_client "sizeof(frt_client)"
    uint32_t sizeof_entry "sizeof(frt_entry)"
    uint32_t sizeof_task "sizeof(frt_task)"
    uint32_t sizeof_function "sizeof(frt_function)"
    uint32_t sizeof_actor "sizeof(frt_actor)"
    uint32_t sizeof_link "sizeof(frt_page_link)"
    uint32_t sizeof_trace "sizeof(frt_trace_ring)"
    uint32_t sizeof_lock "sizeof(frt_lock)"

NAME_PREFIX = "/fastrt-"
STORE_BYTES_MIN = 1 << 20
STORE_BYTES_MAX = 1 << 44  # page indexes stay below 2**30
RECORDS_MIN, RECORDS_MAX = 64, 1 << 26
cdef enum:
    TABLES_RESERVE = 6 << 20  # the first FRT_COMMIT_RECORDS of both tables, and some more
    COMMIT_STEP = 1 << 18  # takes 0.25 ms: fallocate starts again after each signal, also those of timers


cdef uint64_t segment_room(int fd) noexcept nogil:
    """How many bytes /dev/shm has left for values, less a reserve for the tables; 2^62 when it has no limit."""
    cdef frt_statvfs info
    cdef uint64_t free
    if fstatvfs(fd, &info) != 0 or info.f_blocks == 0:
        return <uint64_t>1 << 62
    free = <uint64_t>info.f_bavail * info.f_frsize
    return free - TABLES_RESERVE if free > TABLES_RESERVE else 0


cdef int segment_discard(frt_ctx *x, uint64_t offset, uint64_t nbytes) noexcept nogil:
    """Give the memory of [offset, offset + nbytes) back to the system; it reads as zeros from now on."""
    return FRT_OK if fallocate(x.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes) == 0 else FRT_FULL


cdef int segment_commit(frt_ctx *x, uint64_t offset, uint64_t nbytes) noexcept nogil:
    """Make the kernel reserve memory for [offset, offset + nbytes). FRT_FULL when it has none."""
    cdef uint64_t step
    cdef int rc
    while nbytes:
        step = nbytes if nbytes < COMMIT_STEP else COMMIT_STEP
        rc = posix_fallocate(x.fd, offset, step)
        if rc == 0:
            offset += step
            nbytes -= step
        elif rc != EINTR:
            return FRT_FULL
    return FRT_OK


cdef int segment_lock_grow(frt_ctx *x) noexcept nogil:
    """Take the lock for reserving memory. It needs no repair: one store commits each change that it guards."""
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_GROW)
    if rc == FRT_LOCK_ORPHANED:
        frt_lock_mend(x.locks + FRT_LOCK_GROW)
        return FRT_OK
    return rc


cdef void spill_remove(frt_ctx *x, uint64_t objref) noexcept nogil:
    """Remove the file of a spilled value that is being deleted."""
    cdef char path[300]
    if x.sb.spill_dir[0]:
        snprintf(path, sizeof(path), "%.255s/%016llx", x.sb.spill_dir, <unsigned long long>objref)
        unlink(path)


cdef uint32_t _trace_clock():
    """The clock for trace records: the processor's counter if the kernel keeps time by it, else the kernel's clock."""
    try:
        with open("/sys/devices/system/clocksource/clocksource0/current_clocksource", "rb") as f:
            return FRT_CLOCK_TSC if f.read().strip() == b"tsc" else FRT_CLOCK_MONOTONIC
    except OSError:
        return FRT_CLOCK_MONOTONIC


def boot_hash() -> int:
    """64 bits that differ from boot to boot (process ids and start times repeat across boots)."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as f:
        return int(f.read().strip().replace(b"-", b""), 16) & (2**64 - 1)


def pid_namespace() -> int:
    """The inode that names this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc(5) stat, field 22), or 0 when there is no such process.

    Pids are reused, pairs of pid and start time are not. The first thread has the same; qemu does not fake its file.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


cdef uint64_t _place(uint64_t *end, uint64_t nbytes) noexcept:
    """Take the next 4 KiB-aligned region of nbytes; its offset."""
    cdef uint64_t at = (end[0] + 4095) & ~<uint64_t>4095
    end[0] = at + nbytes
    return at


cdef uint32_t _functions_most(uint64_t objects_max) noexcept:
    """Slots of all function tables, each twice as large as the one before: at least twice the number of objects."""
    cdef uint64_t most = FRT_FUNCTIONS
    while most < 2 * objects_max:
        most = 2 * most + FRT_FUNCTIONS
    return <uint32_t>most


cdef void _lay_out(frt_superblock *sb, uint64_t store_bytes) noexcept:
    """Fill in the regions' offsets and the total size from the tables' sizes."""
    cdef uint64_t end = 4096
    cdef uint64_t n = sb.objects_max
    cdef uint64_t t = sb.tasks_max
    sb.pages_max = <uint32_t>((store_bytes + FRT_PAGE_BYTES - 1) >> FRT_PAGE_SHIFT)
    sb.ring_max = FRT_RING_CELLS
    while sb.ring_max < 2 * t:
        sb.ring_max *= 2
    sb.locks_offset = _place(&end, FRT_LOCKS * sizeof_lock)
    sb.failure_words_offset = _place(&end, <uint64_t>FRT_FAILURES * 8)
    sb.clients_offset = _place(&end, sb.clients_max * sizeof_client)
    sb.actors_offset = _place(&end, <uint64_t>FRT_ACTORS * sizeof_actor)
    sb.functions_offset = _place(&end, <uint64_t>_functions_most(n) * sizeof_function)
    sb.ctl_offset = _place(&end, n * 8 * (1 + 3 * sb.words))
    sb.planes_offset = _place(&end, n * sb.planes_max * FRT_PLANE_BYTES)
    sb.entries_offset = _place(&end, n * sizeof_entry)
    sb.free_objects_offset = _place(&end, n * 4)
    sb.task_words_offset = _place(&end, t * 8)
    sb.tasks_offset = _place(&end, t * sizeof_task)
    sb.free_tasks_offset = _place(&end, t * 4)
    sb.ring_offset = _place(&end, <uint64_t>sb.ring_max * FRT_CELL_BYTES)
    sb.ranked_offset = _place(&end, t * sizeof(frt_ranked))
    sb.pages_offset = _place(&end, <uint64_t>sb.pages_max * 8)
    sb.links_offset = _place(&end, <uint64_t>sb.pages_max * sizeof_link)
    sb.bits_offset = _place(&end, <uint64_t>sb.pages_max * 8)
    sb.owners_offset = _place(&end, <uint64_t>sb.pages_max * 4 * FRT_BLOCKS_PER_PAGE)
    sb.trace_offset = _place(&end, <uint64_t>sb.clients_max * sizeof_trace)
    sb.tallies_offset = _place(&end, <uint64_t>sb.clients_max * FRT_TALLIES * sizeof(frt_tally))
    sb.failures_offset = _place(&end, <uint64_t>FRT_FAILURES * sizeof(frt_failure))
    end = (end + HUGE_BYTES - 1) & ~<uint64_t>(HUGE_BYTES - 1)  # values may lie in huge pages, the tables do not
    sb.payload_offset = _place(&end, <uint64_t>sb.pages_max << FRT_PAGE_SHIFT)
    sb.total_bytes = end


cdef bint _damaged(frt_superblock *sb, uint64_t size):
    """Whether a copied superblock describes a layout that no build of this version makes for a file of this size.

    The checksum finds accidents only: a process that writes wrong offsets can compute a checksum, too. So the regions'
    offsets are also computed again from the tables' sizes and compared.
    """
    cdef frt_superblock made
    if sb.static_crc != zlib.crc32((<char *>sb)[:FRT_STATIC_BYTES]) or sb.total_bytes != size:
        return True
    if sb.words == 0 or sb.words > FRT_CLIENTS_DENSE // 64 or sb.planes_max > FRT_CLIENTS_MOST // FRT_PLANE_CLIENTS or \
            sb.clients_max != 64 * sb.words + FRT_PLANE_CLIENTS * sb.planes_max or \
            sb.clients_limit > sb.clients_max - FRT_SLOTS_BEYOND or \
            not RECORDS_MIN <= sb.objects_max <= RECORDS_MAX or not RECORDS_MIN <= sb.tasks_max <= RECORDS_MAX or \
            sb.pages_max == 0 or sb.pages_max > STORE_BYTES_MAX >> FRT_PAGE_SHIFT:
        return True
    memcpy(&made, sb, sizeof(made))
    _lay_out(&made, <uint64_t>sb.pages_max << FRT_PAGE_SHIFT)
    return memcmp(&made, sb, FRT_STATIC_BYTES) != 0


cdef class Segment:
    """A mapped segment. Use `Segment.create` or `Segment.attach`.

    The mappings live as long as this object, and every view of a stored value keeps it alive: a value read
    before `unlink` stays readable. `name` and `total_bytes` (sparse size) are fixed.
    """

    def __cinit__(self):
        self.fd = -1
        self.base = NULL
        self.view = NULL

    def __dealloc__(self):
        # A forked child has no read-write mapping (MADV_DONTFORK): that address range may belong to another mapping.
        if self.base != NULL and self.pid == getpid():  # at the interpreter's end the module `os` is empty
            munmap(self.base, self.total_bytes)
        if self.view != NULL:
            munmap(<void *>self.view, self.total_bytes)
        if self.fd >= 0:
            close(self.fd)

    cdef frt_superblock *superblock(self) except NULL:
        if self.base == NULL or self.pid != os.getpid():
            raise AttachError(f"segment {self.name} is not mapped in process {os.getpid()}; attach to it here")
        return <frt_superblock *>self.base

    cdef int describe(self, frt_ctx *x) except -1:
        """Fill in a process's view of the segment: mappings and geometry, no client."""
        self.superblock()
        memcpy(x, &self.plan, sizeof(frt_ctx))
        return 0

    cdef void _plan(self, const frt_superblock *sb) noexcept:
        """Keep the addresses of all regions, from a checked copy of the superblock, which is never read again."""
        cdef frt_ctx *x = &self.plan
        memset(x, 0, sizeof(frt_ctx))
        x.base, x.view, x.total_bytes, x.fd = self.base, self.view, self.total_bytes, self.fd
        x.sb = <frt_superblock *>self.base
        x.locks = <frt_lock *>(self.base + sb.locks_offset)
        x.clients = <frt_client *>(self.base + sb.clients_offset)
        x.ctl = <uint64_t *>(self.base + sb.ctl_offset)
        x.planes = <uint64_t *>(self.base + sb.planes_offset)
        x.entries = <frt_entry *>(self.base + sb.entries_offset)
        x.free_objects = <uint32_t *>(self.base + sb.free_objects_offset)
        x.task_words = <uint64_t *>(self.base + sb.task_words_offset)
        x.tasks = <frt_task *>(self.base + sb.tasks_offset)
        x.free_tasks = <uint32_t *>(self.base + sb.free_tasks_offset)
        x.ring = <uint64_t *>(self.base + sb.ring_offset)
        x.ranked = <frt_ranked *>(self.base + sb.ranked_offset)
        x.functions = <frt_function *>(self.base + sb.functions_offset)
        x.actors = <frt_actor *>(self.base + sb.actors_offset)
        x.pages = <uint64_t *>(self.base + sb.pages_offset)
        x.links = <frt_page_link *>(self.base + sb.links_offset)
        x.owners = <uint32_t *>(self.base + sb.owners_offset)
        x.bits = <uint64_t *>(self.base + sb.bits_offset)
        x.traces = <frt_trace_ring *>(self.base + sb.trace_offset)
        x.tallies = <frt_tally *>(self.base + sb.tallies_offset)
        x.failure_words = <uint64_t *>(self.base + sb.failure_words_offset)
        x.failures = <frt_failure *>(self.base + sb.failures_offset)
        x.payload_offset = sb.payload_offset
        x.words, x.stride = sb.words, 1 + 3 * sb.words
        x.clients_max, x.clients_limit, x.planes_max = sb.clients_max, sb.clients_limit, sb.planes_max
        x.objects_max, x.tasks_max = sb.objects_max, sb.tasks_max
        x.functions_max = _functions_most(sb.objects_max)
        x.pages_max, x.ring_max, x.node = sb.pages_max, sb.ring_max, sb.node
        x.me = FRT_NONE

    cdef int _map(self, int fd, const frt_superblock *sb) except -1:
        cdef uint64_t nbytes = sb.total_bytes
        self.fd, self.total_bytes, self.pid = fd, nbytes, os.getpid()
        cdef void *rw = map_aligned(fd, nbytes, HUGE_BYTES, PROT_READ | PROT_WRITE)
        if rw == MAP_FAILED:
            raise AttachError(f"cannot map {nbytes} bytes of {self.name}: raise the address-space limit (ulimit -v)")
        self.base = <char *>rw
        madvise(rw, nbytes, MADV_DONTFORK)
        cdef void *ro = map_aligned(fd, nbytes, HUGE_BYTES, PROT_READ)
        if ro == MAP_FAILED:
            raise AttachError(f"cannot map {nbytes} bytes of {self.name}: raise the address-space limit (ulimit -v)")
        self.view = <const char *>ro
        self._plan(sb)
        return 0

    @staticmethod
    def create(store_bytes, *, clients_max=64, clients_dense=256, objects_max=1 << 17, tasks_max=1 << 17, node=1,
               trace=False):
        """Make a new segment, ready for clients.

        Args:
            store_bytes: capacity for values, in bytes; rounded up to 16 KiB. The tables are added to it, sparse.
            clients_max: processes that may be attached at once, at most 8192; rounded up to 64. Drivers and tools
                may take 4 more slots.
            clients_dense: how many of these have their bits in every object's control block, at most 256; each 64
                cost 24 bytes per object. The bits of the others get memory when those clients join.
            objects_max, tasks_max: capacity of the tables, in records.
            node: the node's index, the high 16 bits of the objrefs made here.
            trace: whether clients record their actions (`fastrt._core.memory.trace`).
        Returns:
            A mapped `Segment`.
        Raises:
            ValueError: a size is out of range.
            ObjectStoreFullError, OSError: /dev/shm has no room even for the tables; the kernel refuses the file.
        """
        store_bytes = operator.index(store_bytes)
        if not STORE_BYTES_MIN <= store_bytes <= STORE_BYTES_MAX:
            raise ValueError(f"store_bytes is {store_bytes}; it must be from {STORE_BYTES_MIN} to {STORE_BYTES_MAX}")
        if not 0 <= node < 1 << 16:
            raise ValueError(f"node is {node}; it must be from 0 to 65535")
        if not 1 <= clients_max <= FRT_CLIENTS_MOST:
            raise ValueError(f"clients_max is {clients_max}; it must be from 1 to {FRT_CLIENTS_MOST}")
        if clients_dense < 1:
            raise ValueError(f"clients_dense is {clients_dense}; it must be at least 1")
        for what, count in (("objects_max", objects_max), ("tasks_max", tasks_max)):
            if not RECORDS_MIN <= count <= RECORDS_MAX:
                raise ValueError(f"{what} is {count}; it must be from {RECORDS_MIN} to {RECORDS_MAX}")
        cdef frt_superblock sb
        memset(&sb, 0, sizeof(sb))
        sb.magic, sb.version, sb.abi = FRT_MAGIC, FRT_LAYOUT_VERSION, frt_abi()
        sb.words = (min(clients_max, clients_dense, FRT_CLIENTS_DENSE) + 63) // 64
        sb.clients_limit = (clients_max + 63) // 64 * 64
        beyond = sb.clients_limit + FRT_SLOTS_BEYOND - 64 * sb.words
        sb.planes_max = (beyond + FRT_PLANE_CLIENTS - 1) // FRT_PLANE_CLIENTS
        sb.clients_max = 64 * sb.words + FRT_PLANE_CLIENTS * sb.planes_max
        sb.objects_max, sb.tasks_max, sb.node = objects_max, tasks_max, node
        random = os.urandom(16)
        sb.session[0], sb.session[1] = int.from_bytes(random[:8], "big"), int.from_bytes(random[8:], "big")
        sb.boot_hash, sb.pid_namespace, sb.uid = boot_hash(), pid_namespace(), os.getuid()
        _lay_out(&sb, store_bytes)
        sb.static_crc = zlib.crc32((<char *>&sb)[:FRT_STATIC_BYTES])
        cdef Segment self = Segment.__new__(Segment)
        self.name = f"{NAME_PREFIX}{sb.session[0]:016x}{sb.session[1]:016x}"
        cdef int fd = create_shm(self.name, sb.total_bytes)
        try:
            self._map(fd, &sb)
            self._initialise(&sb, trace)
        except BaseException:
            self.unlink()
            raise
        return self

    cdef int _initialise(self, frt_superblock *sb, bint trace) except -1:
        cdef frt_ctx x
        cdef uint32_t i
        cdef frt_superblock *there = self.superblock()
        x.fd = self.fd
        # The superblock and the locks get all their memory now; the tables grow as they are used.
        cdef int rc = segment_commit(&x, 0, sb.clients_offset + 64 * sb.words * sizeof_client)
        rc |= segment_commit(&x, sb.actors_offset, FRT_ACTORS_STEP * sizeof_actor)
        rc |= segment_commit(&x, sb.functions_offset, FRT_FUNCTIONS * sizeof_function)
        rc |= segment_commit(&x, sb.ring_offset, FRT_RING_CELLS * FRT_CELL_BYTES)
        if rc:
            raise ObjectStoreFullError(_shm_advice(FRT_FUNCTIONS * sizeof_function + sb.clients_offset))
        there[0] = sb[0]
        there.trace_clock = _trace_clock()
        there.trace_ticks, there.trace_ns = frt_trace_ticks(there.trace_clock), frt_now_ns()
        there.trace_on, there.traced = there.trace_clock if trace else 0, trace
        there.daemon_pid, there.daemon_start = os.getpid(), start_time(os.getpid())
        there.next_objref = 1
        there.ring_cells, there.function_slots = FRT_RING_CELLS, FRT_FUNCTIONS
        there.actors_committed = FRT_ACTORS_STEP
        there.objects.max, there.objects.free_offset = sb.objects_max, sb.free_objects_offset
        there.tasks.max, there.tasks.free_offset = sb.tasks_max, sb.free_tasks_offset
        for i in range(FRT_BINS):
            there.bin_head[i] = FRT_NONE
        for i in range(FRT_CLASSES):
            there.slab_head[i] = FRT_NONE
        for i in range(<uint32_t>FRT_LOCKS):
            frt_lock_init(<frt_lock *>(self.base + sb.locks_offset) + i)
        a32_store_sc(&there.state, FRT_SEG_READY)
        return 0

    @staticmethod
    def attach(name):
        """Map an existing segment after checking that this process can use it.

        Args:
            name: as `Segment.name`, "/fastrt-" and 32 hex digits.
        Returns:
            A mapped `Segment`.
        Raises:
            AttachError: it does not exist, is another user's, or was made by another build, boot or PID namespace.
        """
        cdef Segment self = Segment.__new__(Segment)
        cdef frt_superblock copy
        self.name = name
        if not re.fullmatch(NAME_PREFIX + "[0-9a-f]{32}", name):
            raise AttachError(f"{name!r} is not the name of a fastrt segment")
        try:
            self.fd = open_shm(name)
        except FileNotFoundError:
            raise AttachError(f"{name} does not exist: its session has ended") from None
        except OSError as e:
            raise AttachError(f"{name} cannot be opened: {e}") from None
        self.pid = os.getpid()
        info = os.fstat(self.fd)
        why = None
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != 0o600:
            why = f"it belongs to uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):o}, not to you with 600"
        elif info.st_size < 4096:
            why = f"it has {info.st_size} bytes and no superblock"
        if why is None:
            why = self._why_unusable(&copy, info.st_size)
        if why is not None:
            raise AttachError(f"{name} is refused: {why}")
        self._map(self.fd, &copy)
        return self

    cdef object _why_unusable(self, frt_superblock *sb, uint64_t size):
        """Why this process cannot use the segment, or None; its superblock is copied to `sb`.

        The superblock is read, not mapped: if it is a hole, a mapped read could find no memory.
        """
        cdef bytes raw = os.pread(self.fd, sizeof(frt_superblock), 0)
        memcpy(sb, <char *>raw, sizeof(frt_superblock))
        if sb.magic != FRT_MAGIC:
            return "it is not a fastrt segment, or it is not initialised yet"
        if sb.version != FRT_LAYOUT_VERSION or sb.abi != frt_abi():
            return (f"it has layout {sb.version}/{sb.abi:08x}, this build has {FRT_LAYOUT_VERSION}/{frt_abi():08x}; "
                    "run all processes of a session with the same fastrt and interpreter build")
        if _damaged(sb, size):
            return "its superblock is damaged"
        if sb.boot_hash != boot_hash():
            return "it was made before this boot"
        if sb.pid_namespace != pid_namespace():
            return "it was made in another PID namespace; share the namespace (docker run --pid=...)"
        if sb.state == FRT_SEG_POISONED:
            return f"it is poisoned: {sb.poison[:strnlen(sb.poison, 128)].decode('utf-8', 'replace')}"
        if sb.state != FRT_SEG_READY:
            return f"its state is {sb.state}, not ready"
        return None

    def unlink(self):
        """Remove the name; the memory is freed with the last mapping. Removing it twice is harmless."""
        unlink_shm(self.name)

    def poison(self, why, *, closed=False):
        """Mark the segment unusable: every later call of every client raises `ArenaCorrupt` with `why`.

        Args:
            why: at most 127 bytes are kept.
            closed: nothing is corrupt, but the session has no daemon any more: calls raise `NodeDiedError`.
        """
        cdef bytes text = why.encode()[:127]
        cdef frt_superblock *sb = self.superblock()
        cdef uint32_t i
        for i in range(<uint32_t>len(text)):
            sb.poison[i] = (<char *>text)[i]
        sb.poison[len(text)] = 0
        a32_store_sc(&sb.state, FRT_SEG_CLOSED if closed else FRT_SEG_POISONED)

    def take_over(self):
        """Register this process as the segment's daemon, in place of one that died."""
        cdef frt_superblock *sb = self.superblock()
        sb.daemon_pid, sb.daemon_start = os.getpid(), start_time(os.getpid())

    @property
    def session(self):
        """The session's 128 random bits as 32 hex digits."""
        return self.name[len(NAME_PREFIX):]

    @property
    def daemon(self):
        """(pid, start time) of the process that made the segment."""
        return self.superblock().daemon_pid, self.superblock().daemon_start


def _shm_advice(asked):
    free = os.statvfs("/dev/shm")
    return (f"/dev/shm has {free.f_bavail * free.f_frsize} bytes free; the store's tables need {asked} more bytes: "
            "remove old files there or give it more room (docker run --shm-size=...)")


def segments():
    """Names of all fastrt segments on this machine that belong to this user."""
    names = []
    for entry in os.scandir("/dev/shm"):
        if entry.name.startswith(NAME_PREFIX[1:]):
            try:
                mine = entry.stat(follow_symlinks=False).st_uid == os.getuid()
            except FileNotFoundError:
                continue
            if mine:
                names.append("/" + entry.name)
    return names


def leftovers():
    """This user's segments whose daemon and attached processes are dead; none that cannot be read reliably."""
    return [name for name in segments() if not _in_use(name)]


def sweep():
    """Unlink the segments that `leftovers` names; return the names removed."""
    removed = []
    for name in leftovers():
        if unlink_shm(name):
            removed.append(name)
    return removed


cdef bint _is_mapped(name) except -1:
    """Whether a process whose /proc/PID/maps this user may read has the segment mapped."""
    needle = f" /dev/shm{name}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", "rb") as maps:
                if needle in maps.read():
                    return True
        except OSError:  # it has ended, or it belongs to another user, who cannot have attached
            continue
    return False


cdef bint _in_use(name) except -1:
    cdef int fd
    try:
        fd = open_shm(name)
    except OSError:
        return True
    cdef frt_superblock sb
    cdef frt_client slot
    cdef bytes raw
    try:
        raw = os.pread(fd, sizeof(sb), 0)
        if len(raw) < <Py_ssize_t>sizeof(sb):
            return _may_be_in_the_making(fd)
        memcpy(&sb, <char *>raw, sizeof(sb))  # not read in place: bytes are not aligned as the struct is
        if sb.magic == 0:
            return _may_be_in_the_making(fd)
        if sb.magic != FRT_MAGIC or sb.pid_namespace != pid_namespace():
            return True
        if sb.boot_hash != boot_hash():
            return False
        if start_time(sb.daemon_pid) == sb.daemon_start:
            return True
        if sb.version != FRT_LAYOUT_VERSION or sb.abi != frt_abi():
            return _is_mapped(name)  # another layout of the client table; its clients may wait for a new daemon
        if _damaged(&sb, os.fstat(fd).st_size):
            return True
        for i in range(64 * sb.words + FRT_PLANE_CLIENTS * min(sb.planes, sb.planes_max)):
            raw = os.pread(fd, sizeof(slot), sb.clients_offset + i * sizeof(slot))
            if len(raw) < <Py_ssize_t>sizeof(slot):
                return True
            memcpy(&slot, <char *>raw, sizeof(slot))
            if frt_word_state(slot.word) != FRT_CLIENT_FREE and start_time(slot.pid) == slot.starttime:
                return True
        return False
    finally:
        os.close(fd)


cdef bint _may_be_in_the_making(int fd) except -1:
    """Whether a segment without a superblock may still be in the making: that takes less than a minute."""
    import time
    return time.time() - os.fstat(fd).st_mtime < 60
