# cython: language_level=3, freethreading_compatible=True
"""The client table: the processes that are attached to the segment, and each process's handle on it.

The daemon writes a slot's word {state, gen}. For a joining process it opens the pidfd, compares the start time
and then makes the slot LIVE; when the process is gone, freeing the slot is the last step of its recovery. A slot's
generation grows with each use, so stamps of an earlier client in the slot are recognised.

A `Client` is one process's attachment: mappings, slot, private reference counts, magazines. It is bound to
its pid: after a fork the child's first call raises `ForkedHandle`, and the store attaches again.
"""
import os

cimport cython

from fastrt.errors import ArenaCorrupt, AttachError, NodeDiedError, NotInitializedError

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport *
from fastrt._core.memory.pool cimport pool_flush
from fastrt._core.memory.segment cimport Segment, segment_commit, segment_lock_grow
from fastrt._core.memory.segment import start_time
from fastrt._core.memory.trace cimport FRT_TRACE_PROCESS, frt_trace_point
from fastrt._core.memory.write_guard cimport guard_add, guard_remove

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    void *MAP_FAILED

KIND_DAEMON, KIND_DRIVER, KIND_WORKER, KIND_TOOL, KIND_ACTOR = (
    FRT_KIND_DAEMON, FRT_KIND_DRIVER, FRT_KIND_WORKER, FRT_KIND_TOOL, FRT_KIND_ACTOR)
JOB_BITS = FRT_JOB_BITS

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef extern from *:
    """
    #include "layout.h"
    /* Clear a slot for its next client, all but its word and the counts, which belong to the slot. */
    static inline void frt_client_clear(frt_client *slot) {
        const size_t counts = offsetof(frt_client, other), rest = offsetof(frt_client, wake);
        memset(&slot->pid, 0, counts - offsetof(frt_client, pid));
        memset((char *)slot + rest, 0, sizeof *slot - rest);
    }
    """
    void frt_client_clear(frt_client *slot) noexcept nogil

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*)() noexcept, void (*)() noexcept, void (*)() noexcept nogil)

cdef uint64_t _epochs = 0
cdef int _forks = 0  # how many forks lie between the first process that loaded this module and this one


cdef void _count_fork() noexcept nogil:
    global _forks
    _forks += 1


pthread_atfork(NULL, NULL, _count_fork)


class ForkedHandle(Exception):
    """The client belongs to the parent process of this forked child, which must attach again."""


cdef uint64_t client_new_objref(frt_ctx *x) noexcept nogil:
    """A fresh objref: {node:16 | counter:48}, from a private range."""
    cdef uint64_t number
    frt_threads_take(x)
    if x.next_objref == x.end_objref:
        x.next_objref = a64_add_rlx(&x.sb.next_objref, 1 << 16)
        x.end_objref = x.next_objref + (1 << 16)
    number = x.next_objref
    x.next_objref = number + 1
    frt_threads_give(x)
    return (<uint64_t>x.node << 48) | number


cdef void client_wake(frt_ctx *x, uint32_t client) noexcept nogil:
    """Wake a client: something it may wait for has happened."""
    cdef frt_client *slot = x.clients + client
    a32_add_sc(&slot.wake, 1)
    if a32_load_sc(&slot.sleepers):
        frt_futex_wake(&slot.wake)


cdef int _open_plane(frt_ctx *x) noexcept nogil:
    """Commit memory for the next plane and the slots of its clients. Under the slots lock."""
    cdef uint32_t p = frt_planes(x)
    cdef uint32_t first = frt_clients(x)
    cdef int rc
    if p == x.planes_max:
        return FRT_CLIENTS_FULL
    rc = segment_lock_grow(x)
    if rc != FRT_OK:
        return rc
    rc = segment_commit(x, <char *>(x.clients + first) - x.base, FRT_PLANE_CLIENTS * sizeof(frt_client))
    rc |= segment_commit(x, <char *>frt_plane(x, p, 0) - x.base,
                         <uint64_t>frt_most(&x.sb.objects.committed, x.objects_max) * FRT_PLANE_BYTES)
    if rc == FRT_OK:
        if x.sb.planes_opened <= p:
            a32_store_rel(&x.sb.planes_opened, p + 1)
        a32_store_sc(&x.sb.planes, p + 1)  # commit
    frt_lock_give(x.locks + FRT_LOCK_GROW)
    return rc


cdef int _free_slot(frt_ctx *x, uint32_t first, uint32_t most) noexcept nogil:
    """A free slot from `first` on and below `most`, or a negative code. Under the slots lock."""
    cdef uint32_t i = first
    cdef int rc
    while i < most:
        while i >= frt_clients(x):
            rc = _open_plane(x)
            if rc != FRT_OK:
                return rc
        if frt_word_state(x.clients[i].word) == FRT_CLIENT_FREE:
            return <int>i
        i += 1
    return FRT_CLIENTS_FULL


cdef void _write_name(frt_client *slot, bytes text):
    """Write a client's name, of at most 63 bytes, into its slot."""
    cdef size_t j
    for j in range(sizeof(slot.name)):
        slot.name[j] = text[j] if j < <size_t>len(text) else 0


def admit(Segment segment, int pid, int kind, str name="", uint32_t beyond=0, uint32_t first=0):
    """Give a process a slot. The caller (the daemon) has opened the process's pidfd already.

    Args:
        segment: the mapped segment.
        pid: of the joining process.
        kind: KIND_DAEMON, KIND_DRIVER, KIND_WORKER, KIND_TOOL or KIND_ACTOR.
        name: shown in listings; at most 63 bytes.
        beyond: how many slots above the limit it may take, up to 4: they are kept for drivers and tools.
        first: the lowest slot that it may get.
    Returns:
        (slot index, generation).
    Raises:
        AttachError: every slot is taken, /dev/shm has no room for more of them, or the process is gone.
    """
    cdef frt_ctx x
    cdef frt_client *slot
    cdef uint32_t i, gen
    cdef bytes text = name.encode()[:63]
    cdef uint64_t started = start_time(pid)
    segment.describe(&x)
    if started == 0:
        raise AttachError(f"process {pid} ended before it could join")
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_SLOTS)
    if rc < 0:
        raise AttachError("a stopped process holds the lock of the client table; resume or kill it")
    if rc == FRT_LOCK_ORPHANED:
        frt_lock_mend(x.locks + FRT_LOCK_SLOTS)  # one word commits a slot: nothing to repair
    try:
        rc = _free_slot(&x, first, x.clients_limit + min(beyond, FRT_SLOTS_BEYOND))
        if rc >= 0:
            i = <uint32_t>rc
            slot = x.clients + i
            gen = (frt_word_gen(slot.word) + 1) & 0xffffffff
            frt_client_clear(slot)
            slot.pid, slot.starttime, slot.kind = pid, started, kind
            _write_name(slot, text)
            a64_store_sc(&slot.word, frt_word(FRT_CLIENT_LIVE, 0, gen))  # commit
            return i, gen
    finally:
        frt_lock_give(x.locks + FRT_LOCK_SLOTS)
    if rc != FRT_CLIENTS_FULL:
        raise AttachError(f"/dev/shm has no room for more than {frt_clients(&x)} client slots; give it more room")
    raise AttachError(f"all {x.clients_limit} client slots of {segment.name} are taken; raise clients_max")


cdef uint32_t clients_ever(frt_ctx *x) noexcept nogil:
    """How many slots have ever been open: no client has or had a higher one."""
    return 64 * x.words + FRT_PLANE_CLIENTS * frt_most(&x.sb.planes_opened, x.planes_max)


def readmit(Segment segment, uint32_t index, int kind, str name):
    """Reopen the slot of a process that left and joins again. The new generation gives it a new job.

    Args:
        segment: the mapped segment.
        index: the slot.
        kind, name: as for `admit`.
    Returns:
        The generation.
    """
    cdef frt_ctx x
    cdef bytes text = name.encode()[:63]
    segment.describe(&x)
    if index >= x.clients_max:
        raise ValueError(f"slot {index} is not in the table of {x.clients_max}")
    cdef frt_client *slot = x.clients + index
    cdef uint32_t gen = (frt_word_gen(slot.word) + 1) & 0xffffffff
    slot.kind, slot.departed = kind, 0
    _write_name(slot, text)
    a64_store_sc(&slot.word, frt_word(FRT_CLIENT_LIVE, 0, gen))
    return gen


def slots(Segment segment):
    """How many slots have ever been open: no client has or had a higher one."""
    cdef frt_ctx x
    segment.describe(&x)
    return clients_ever(&x)


cdef uint32_t clients_attached(frt_ctx *x) noexcept nogil:
    """How many slots are in use."""
    cdef uint32_t i, used = 0
    for i in range(frt_clients(x)):
        used += frt_word_state(a64_load_acq(&x.clients[i].word)) != FRT_CLIENT_FREE
    return used


def occupancy(Segment segment):
    """Count slots: (in use, in use by tools, limit for workers and actors)."""
    cdef frt_ctx x
    cdef uint32_t i, tools = 0
    segment.describe(&x)
    for i in range(frt_clients(&x)):
        tools += x.clients[i].kind == FRT_KIND_TOOL and \
            frt_word_state(a64_load_acq(&x.clients[i].word)) != FRT_CLIENT_FREE
    return clients_attached(&x), tools, x.clients_limit


def want_workers(Client client, uint32_t count):
    """Set how many workers there should be: actors do not take the slots of workers that have yet to join."""
    client.ensure()
    a32_store_rel(&client.x.sb.wanted_workers, count)


def park(Client client, uint32_t worker, bint parked):
    """Keep a worker from taking further tasks, or let it take them again; a task that it runs goes on."""
    cdef frt_client *slot = client.x.clients + worker
    client.ensure()
    if worker < frt_clients(&client.x) and a32_load_sc(&slot.parked) != <uint32_t>parked:
        a32_store_sc(&slot.parked, parked)
        client_wake(&client.x, worker)  # a parked one leaves the set of idle workers


def table(Segment segment, int only=-1):
    """The client table as a list of dicts, one per slot in use; of the slot `only` alone if that is not negative."""
    cdef frt_ctx x
    cdef frt_client *slot
    cdef uint32_t i, task
    segment.describe(&x)
    rows = []
    for i in range(frt_clients(&x)):
        slot = x.clients + i
        task = a32_load_rlx(&slot.task)
        if frt_word_state(slot.word) != FRT_CLIENT_FREE and (only < 0 or <uint32_t>only == i):
            rows.append({
                "client": i, "pid": slot.pid, "kind": slot.kind, "state": frt_word_state(slot.word),
                "gen": frt_word_gen(slot.word), "start_time": slot.starttime, "blocked": slot.blocked,
                "task": None if task == 0 else task - 1, "tasks_done": slot.tasks_done,
                "parked": slot.parked != 0, "name": slot.name[:strnlen(slot.name, 64)].decode("utf-8", "replace"),
            })
    return rows


@cython.no_gc  # the collector could unmap the segment before it deletes references that still need it
cdef class Client:
    """A process's attachment to a segment through the slot it was given by `admit`.

    Args:
        segment: the mapped segment.
        index, gen: the slot.
        former: this process's previous attachment through the same slot, which has left; its pins stay valid.
    Raises:
        AttachError: the slot does not belong to this process.
    """

    def __cinit__(self, Segment segment, uint32_t index, uint32_t gen, Client former=None):
        segment.describe(&self.x)
        frt_threads_init(&self.x, NULL if former is None else &former.x)
        self.x.refs_held = NULL
        self.x.pins_held = NULL
        self.segment = segment
        self.pid = os.getpid()
        self.forks = _forks
        if index >= frt_clients(&self.x):
            raise AttachError(f"slot {index} is not in the table of {frt_clients(&self.x)}")
        cdef frt_client *slot = self.x.clients + index
        if slot.word != frt_word(FRT_CLIENT_LIVE, 0, gen) or slot.pid != self.pid:
            raise AttachError(f"slot {index} belongs to process {slot.pid}, not to {self.pid}")
        self.x.me, self.x.gen = index, gen
        self.x.succeeded = FRT_FORWARDED if slot.kind == <uint32_t>FRT_KIND_TOOL else FRT_SUCCEEDED
        self.x.me_word, self.x.me_bit = index >> 6, <uint64_t>1 << (index & 63)
        self.x.mine = frt_bits(&self.x, 0, FRT_REFS, self.x.me_word)
        if self.x.me_word < self.x.words:
            self.x.mine_stride, self.x.mine_kinds = self.x.stride, self.x.words
        else:
            self.x.mine_stride, self.x.mine_kinds = FRT_KINDS * FRT_PLANE_WORDS, FRT_PLANE_WORDS
        self.x.refs_held = self._private_counts()
        self.former = former
        self.x.pins_held = self._private_counts() if former is None else former.x.pins_held
        frt_trace_point(&self.x, FRT_TRACE_PROCESS, self.pid, slot.kind, 0)
        self.epoch = a64_add_rlx(&_epochs, 1) + 1
        guard_add(&self.x)

    cdef uint32_t *_private_counts(self) except NULL:
        # Sparse: only pages with entries that this process uses get memory.
        cdef void *p = mmap(NULL, <size_t>self.x.objects_max * 4, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if p == MAP_FAILED:
            raise MemoryError("no address space for the private reference counts")
        return <uint32_t *>p

    def __dealloc__(self):
        guard_remove(&self.x)
        if self.x.refs_held != NULL:
            munmap(self.x.refs_held, <size_t>self.x.objects_max * 4)
        if self.x.pins_held != NULL and self.former is None:
            munmap(self.x.pins_held, <size_t>self.x.objects_max * 4)

    cdef int ensure(self) except -1:
        """Raise unless this process may use the handle now. Cheap enough for every call that may wait."""
        if a32_load_rlx(&self.has_closed):
            raise NotInitializedError("the runtime was shut down; call fastrt.init() again")
        if self.forks != _forks:
            raise ForkedHandle()
        cdef uint32_t state = a32_load_acq(&self.x.sb.state)
        if state != <uint32_t>FRT_SEG_READY:
            why = self.x.sb.poison[:strnlen(self.x.sb.poison, 128)].decode("utf-8", "replace")
            raise NodeDiedError(why) if state == <uint32_t>FRT_SEG_CLOSED else ArenaCorrupt(why)
        return 0

    def close(self):
        """Leave: return the free records in the magazines. The daemon frees the slot when the process reports its
        departure or ends. Later calls raise `NotInitializedError`; views that still exist stay readable."""
        if self.usable():
            pool_flush(&self.x)
            a32_store_rel(&self.x.clients[self.x.me].departed, 1)
        a32_store_rel(&self.has_closed, 1)

    cdef bint may_let_go(self) noexcept:
        """Whether pins and unsealed values can be released: also after `recovery.leave`, which keeps the slot."""
        return (not a32_load_rlx(&self.has_closed) or a32_load_rlx(&self.has_left)) and self.forks == _forks

    cdef bint usable(self) noexcept:
        """Whether the segment may be touched through this handle (destructors must not raise)."""
        return not a32_load_rlx(&self.has_closed) and self.forks == _forks

    def abandon(self):
        """Forget the attachment without touching the segment (in a forked child)."""
        a32_store_rel(&self.has_closed, 1)

    @property
    def closed(self):
        """Whether this process has left through this handle, or forgotten it."""
        return a32_load_rlx(&self.has_closed) != 0

    @property
    def forked(self):
        """Whether this process is a fork of the process that made the handle."""
        return self.forks != _forks

    @property
    def index(self):
        """The slot's index in the client table."""
        return self.x.me

    @property
    def gen(self):
        """The slot's generation."""
        return self.x.gen

    @property
    def job(self):
        """The number of this client's job, which its tasks carry; never 0."""
        return (<uint64_t>self.x.gen << 16) | (self.x.me + 1)

    @property
    def working_job(self):
        """The number of the job for which this client works: that of its newest task, or as adopted; 0: none yet."""
        self.ensure()
        return a64_load_rlx(&self.x.clients[self.x.me].job)

    def adopt_job(self, uint64_t job):
        """Work for a driver: tasks submitted from now on belong to its job."""
        self.ensure()
        a64_store_rlx(&self.x.clients[self.x.me].job, job)

    def rename(self, str name):
        """Change this client's name in listings, which may read a part of it meanwhile; at most 63 bytes."""
        cdef bytes text = name.encode("utf-8", "replace")[:63]
        self.ensure()
        _write_name(self.x.clients + self.x.me, text)

    def name_methods(self, list names):
        """Give the names of the methods whose calls this client runs, for its counts: at most 63 bytes of each."""
        self.ensure()
        self.names = b"".join([
            name.encode("utf-8", "replace")[:FRT_NAME_BYTES - 1].ljust(FRT_NAME_BYTES, b"\0") for name in names])
        self.x.methods, self.x.method_names = <const char *>self.names, <uint32_t>len(names)

    def wake(self, uint32_t client):
        """Wake another client, which then checks its waits again."""
        self.ensure()
        if client < frt_clients(&self.x):
            client_wake(&self.x, client)
