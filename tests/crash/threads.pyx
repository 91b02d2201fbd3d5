# cython: language_level=3
"""Clients as threads of one process, for ThreadSanitizer, which cannot see other processes.

Each thread has a client slot, a magazine and counts of its own, as a process has; all use one mapping. They run
without the GIL, which would put everything in an order: values are made, published on a board, read by all and
dropped; tasks that depend on them are submitted, popped, ended and waited for. Payloads are read where they were
written (the read-only mapping has other addresses, where ThreadSanitizer would see no write).
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from fastrt._core.memory.clients cimport Client, client_new_objref
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.pool cimport pool_flush, pool_keep_task, pool_take_task
from fastrt._core.memory.queue cimport queue_pop, queue_push
from fastrt._core.memory.wait cimport wait_sealed, wait_task
from fastrt._core.objects.objects cimport *
from fastrt._core.objects.references cimport links_count, links_wait, task_result
from fastrt._core.tasks.records cimport task_done

cdef enum:
    SLOTS = 64

cdef enum:
    MADE = 0
    READ, MISSED, SUBMITTED, RAN, WAITED, TORN, FAILED

COUNTS = ("made", "read", "missed", "submitted", "ran", "waited", "torn", "failed")


cdef class Board:
    """Where the threads find each other's values, and counts of what they did."""

    def counted(self):
        """A dict of the counts."""
        return {name: self.counts[k] for k, name in enumerate(COUNTS)}


cdef inline void _count(Board board, int what) noexcept nogil:
    a64_add_rlx(&board.counts[what], 1)


cdef int _make(frt_ctx *x, uint32_t nbytes) noexcept nogil:
    """A sealed value whose bytes are all its objref's lowest; its index."""
    cdef int rc = FRT_OK
    cdef int i = object_new(x)
    cdef char *room
    if i < 0:
        return i
    room = object_room(x, i, nbytes, 0, &rc)
    if room == NULL:
        object_discard(x, i)
        return rc
    memset(room, <int>(x.entries[i].objref & 127), nbytes)
    object_seal_new(x, i)
    return i


cdef bint _whole(frt_ctx *x, uint32_t i) noexcept nogil:
    """Whether a value that this client has pinned is as it was made."""
    cdef const char *data = x.base + x.entries[i].offset if x.entries[i].offset else x.entries[i].inlined
    cdef char want = <char>(x.entries[i].objref & 127)
    cdef uint64_t k
    for k in range(x.entries[i].bytes):
        if data[k] != want:
            return False
    return True


cdef int _publish(frt_ctx *x, Board board, uint32_t at, uint32_t nbytes) noexcept nogil:
    cdef int i = _make(x, nbytes)
    if i < 0:
        _count(board, FAILED)
        return i
    _count(board, MADE)
    a64_store_rlx(&board.indexes[at], <uint64_t>i)
    a64_store_rlx(&board.objrefs[at], x.entries[i].objref)
    return i


cdef void _read(frt_ctx *x, Board board, uint32_t at) noexcept nogil:
    """Pin what a slot of the board names, if it is there still; the two words may be of two values."""
    cdef uint32_t i = <uint32_t>a64_load_rlx(&board.indexes[at])
    cdef uint64_t objref = a64_load_rlx(&board.objrefs[at])
    if objref == 0 or object_acquire(x, i, objref, True) != FRT_OK:
        _count(board, MISSED)
        return
    if object_is_sealed(x, i):
        _count(board, READ if _whole(x, i) else TORN)
    object_release(x, i, True)


cdef int _submit(frt_ctx *x, uint32_t dep) noexcept nogil:
    """A task that waits for entry `dep`, which this client holds; the index of its result, which it holds, too."""
    cdef int t = pool_take_task(x)
    cdef int i = object_new(x) if t >= 0 else t
    cdef frt_task *task = x.tasks + t
    cdef frt_refslot *slots = <frt_refslot *>task.inlined
    if i < 0:
        if t >= 0:
            pool_keep_task(x, t)
        return i
    task.id, task.job, task.cancelled, task.offset = client_new_objref(x), 0, 0, 0
    task.nreturns, task.nrefs, task.ndeps, task.bytes, task.dep, task.flags = 1, 1, 1, 0, 0, 0
    task.attempts, task.retries, task.signal = 0, 0, 0
    slots[0].objref, slots[0].index = x.entries[i].objref, i
    slots[1].objref, slots[1].index = x.entries[dep].objref, dep
    a32_store_rlx(&x.entries[i].task, t + 1)
    links_count(x, slots + 1, 1, &task.flags, FRT_TASK_COUNTED)
    x.refs_held[i] = 1
    a64_or_sc(frt_mine(x, i, FRT_REFS), x.me_bit)
    a64_store_rel(frt_state(x, i), frt_word(FRT_OBJ_PENDING, 0, frt_word_gen(a64_load_rlx(frt_state(x, i)))))
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_WAITING, x.me, frt_word_gen(x.task_words[t])))
    links_wait(x, t)
    return i


cdef void _carry_out(frt_ctx *x, Board board, uint32_t t) noexcept nogil:
    """Run a claimed task: read what it depends on, seal its result."""
    cdef int rc = FRT_OK
    cdef int i = task_result(x, t, 0)
    cdef frt_body body
    cdef char *room
    if frt_task_body(x, t, &body) and object_acquire(x, body.refs[0].index, body.refs[0].objref, True) == FRT_OK:
        if not _whole(x, body.refs[0].index):
            _count(board, TORN)
        object_release(x, body.refs[0].index, True)
    else:
        _count(board, FAILED)
    if i >= 0:
        room = object_room(x, i, 40, 0, &rc)
        memset(room, <int>(x.entries[i].objref & 127), 40)
        object_seal_pending(x, i)
    task_done(x, t)
    _count(board, RAN)


cdef void _ask(frt_ctx *x, Board board, uint32_t nbytes) noexcept nogil:
    """Submit two tasks, the second on the result of the first, and see both done by whomever."""
    cdef int dep = _make(x, nbytes)
    cdef int results[2]
    cdef int t, k
    if dep < 0:
        _count(board, FAILED)
        return
    results[0] = _submit(x, dep)
    results[1] = _submit(x, results[0]) if results[0] >= 0 else FRT_FULL
    for k in range(2):
        if results[k] < 0:
            _count(board, FAILED)
            continue
        _count(board, SUBMITTED)
        while wait_sealed(x, results[k], frt_now_ns() + 200000, 0) != FRT_OK:
            t = queue_pop(x)  # nobody else may be left to do it
            if t >= 0:
                _carry_out(x, board, t)
        _count(board, WAITED)
        if not _whole(x, results[k]):
            _count(board, TORN)
    for k in range(2):
        if results[k] >= 0:
            object_release(x, results[k], False)
    object_release(x, dep, False)


cdef uint64_t run(frt_ctx *x, Board board, uint32_t seed, uint32_t rounds) noexcept nogil:
    """So many rounds of everything, in an order that the seed gives."""
    cdef uint64_t dice = seed * <uint64_t>0x9e3779b97f4a7c15 + 1
    cdef uint32_t at, nbytes
    cdef int mine[SLOTS]
    cdef int t
    memset(mine, 255, sizeof(mine))
    for _ in range(rounds):
        dice = dice * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
        at = (dice >> 33) % SLOTS
        nbytes = 1 << ((dice >> 45) % 15)  # inline, of every class, and runs
        if dice >> 62 == 0:
            if mine[at] >= 0:  # the board names it for a while yet: others come too late
                object_release(x, mine[at], False)
                mine[at] = -1
            else:
                mine[at] = _publish(x, board, at, nbytes)
        elif dice >> 62 == 1:
            _ask(x, board, nbytes)
        elif dice >> 62 == 2:
            t = wait_task(x, frt_now_ns() + 20000, 5000)
            if t >= 0:
                _carry_out(x, board, t)
        else:
            _read(x, board, at)
    for at in range(SLOTS):
        if mine[at] >= 0:
            object_release(x, mine[at], False)
    t = queue_pop(x)
    while t >= 0:
        _carry_out(x, board, t)
        t = queue_pop(x)
    return dice


def work(Client client, Board board, uint32_t seed, uint32_t rounds):
    """Do `rounds` of everything without the GIL."""
    cdef uint64_t end
    with nogil:
        end = run(&client.x, board, seed, rounds)
    return end


def race(Board board, uint32_t rounds):
    """A mistake on purpose, which must be reported: the threads count without atomic operations."""
    cdef uint32_t _
    with nogil:
        for _ in range(rounds):
            _count(board, MADE)  # so that the compiler leaves the loop as it is
            board.counts[FAILED] += 1


def give_back(Client client):
    """Empty the client's magazines."""
    pool_flush(&client.x)
