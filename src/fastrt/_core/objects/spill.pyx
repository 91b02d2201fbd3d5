# cython: language_level=3, freethreading_compatible=True
"""Spilling: take the bytes of sealed values out of memory, and restore them. The caller reads and writes the files.

    SEALED -> SPILLING(me) -> RESTORING(me) -> SPILLED(me) -> RESTORING(c) -> SEALED

A value that finds no room begins as SPILLED (`mapped`). Any client may read a SPILLED value by mapping its file.

While SPILLING the bytes are still in memory: a client that pins the value swaps the state back to SEALED, and the
spiller's swap to RESTORING fails (a pin sets its bit first and reads the state second, the spiller the other way
round). The block is freed while the entry is RESTORING, because no other client changes that state. A death while
RESTORING ends in SPILLED: the file is removed only when the value is SEALED again.

The spiller holds a reference from `begin` to `commit` or `give_up`. Without it, a client could pin the value (SEALED
again), read it and free it before the spiller makes the file: nothing would remove that file, and `commit` could meet
the entry's next value. With it, a value that is freed meanwhile goes with its file when the spiller lets go.

References and waits are not affected: a spilled value is ready. Only values without contained refs are spilled and
restored. A remote value (`remote`) has no file; its copy is dropped before others are spilled.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo

from fastrt.errors import FastrtError

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from fastrt._core.memory.arena cimport arena_alloc, arena_block_bytes, arena_free
from fastrt._core.memory.clients cimport Client, client_wake
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.queue cimport queue_means
from fastrt._core.memory.wait cimport wait_nap, wait_news, wait_resident
from fastrt._core.objects.handles cimport Ref, ref_use
from fastrt._core.objects.objects cimport object_acquire, object_maybe_delete, object_release, object_tell

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    ARGUMENTS_MAX = 1024  # of a task that are examined
    SIGNALS_NS = 50000000  # check for signals this often: a signal that came before the sleep does not end it

KIND_LOST = 7  # an error without bytes: the value's file could not be read back


@cython.no_gc
cdef class Bytes:
    """The memory of a value while it is being spilled (read-only) or restored (writable).

    If it is dropped between `begin` and `commit`, the spilling is cancelled.
    """

    cdef char *data
    cdef Py_ssize_t nbytes
    cdef bint readonly
    cdef Client client  # keeps the mapping
    cdef uint32_t index
    cdef bint holds  # a reference to the value, from `begin` to `commit` or `give_up`

    def __dealloc__(self):
        if self.holds and self.client.usable():
            _let_go(self)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.nbytes, self.readonly, flags)


cdef Bytes _bytes(Client client, uint32_t i, bint readonly):
    """The bytes of an entry; None when it names no block (the entry is damaged)."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t offset = x.entries[i].offset
    cdef uint64_t nbytes = x.entries[i].bytes
    cdef Bytes b
    if frt_inside(x, offset, nbytes) == NULL:
        return None
    b = Bytes.__new__(Bytes)
    b.client, b.index, b.readonly, b.nbytes = client, i, readonly, nbytes
    b.data = (<char *>x.view if readonly else x.base) + offset
    return b


cdef int _check_entry(Client client, uint32_t i) except -1:
    client.ensure()
    if i >= frt_objects(&client.x):
        raise IndexError(f"there is no entry {i}")
    return 0


def configure(Client client, str directory, bint falls_back=False):
    """Set the folder of the files, so that the client that drops a value's last reference can remove its file.

    Args:
        client: the daemon's attachment.
        directory: the folder.
        falls_back: whether clients write values that find no room to files, and map files that are not restored.
    Raises:
        ValueError: the path is longer than 255 bytes.
    """
    cdef bytes text = directory.encode("utf-8", "surrogateescape")
    client.ensure()
    if len(text) > 255:
        raise ValueError(f"the spill directory's path has {len(text)} bytes, more than 255")
    client.x.sb.falls_back = falls_back
    if client.x.sb.spill_dir[:strnlen(client.x.sb.spill_dir, 256)] == text:
        return  # a daemon has taken over: clients that remove files at this moment always find the folder
    memset(client.x.sb.spill_dir, 0, 256)
    for k in range(len(text)):
        client.x.sb.spill_dir[k] = text[k]


def falls_back(Client client):
    """Whether values that find no room go to files; see `configure`."""
    client.ensure()
    return client.x.sb.falls_back != 0


def candidates(Client client):
    """List the values that could be spilled now, least recently used first.

    Returns:
        (last use, block bytes, block offset, index, objref) of each; copies of remote values, which are dropped and
        not written, have the last use -1.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef uint32_t i
    client.ensure()
    rows = []
    for i in range(frt_objects(x)):
        entry = x.entries + i
        if frt_word_state(a64_load_acq(frt_state(x, i))) == FRT_OBJ_SEALED and entry.nrefs == 0 \
                and entry.bytes >= FRT_SPILL_BYTES_MIN and entry.offset and not frt_any(x, i, FRT_PINS):
            used = -1 if a8_load_rlx(&entry.flags) & FRT_ENTRY_REMOTE else entry.used
            rows.append((used, arena_block_bytes(x, entry.offset), entry.offset, i, entry.objref))
    rows.sort()
    return rows


def free_runs(Client client):
    """List the free pieces of the committed memory: (offset, bytes), by address.

    It takes no lock: while other clients allocate, some runs may be missing or wrong.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t n, page = 0
    cdef uint64_t word
    cdef list found = []
    client.ensure()
    while page < frt_pages(x):
        word = a64_load_acq(x.pages + page)
        n = <uint32_t>word
        if n == 0 or n > frt_pages(x) - page:
            n = 1  # a run that was just joined with the one before it
        elif word >> 56 == <uint64_t>FRT_PAGE_FREE:
            found.append((x.payload_offset + (<uint64_t>page << FRT_PAGE_SHIFT), <uint64_t>n << FRT_PAGE_SHIFT))
        page += n
    return found


def begin(Client client, uint32_t i, uint64_t objref):
    """Begin to spill an entry.

    Returns:
        Its bytes as a read-only buffer, for `commit` or `give_up`; None when it is pinned, gone, a copy of a remote
        value, or no longer the object `objref`.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t *state
    cdef uint64_t word
    cdef Bytes data = None
    client.ensure()
    if i >= frt_objects(x) or object_acquire(x, i, objref, False) != FRT_OK:
        return None
    state = frt_state(x, i)
    word = a64_load_sc(state)
    if frt_word_state(word) == FRT_OBJ_SEALED and a64_cas_sc(
            state, word, frt_word(FRT_OBJ_SPILLING, x.me, frt_word_gen(word))):
        if x.entries[i].nrefs == 0 and x.entries[i].offset and not frt_any(x, i, FRT_PINS) \
                and not a8_load_sc(&x.entries[i].flags) & FRT_ENTRY_REMOTE:
            data = _bytes(client, i, True)
        if data is None:
            _unspill(x, i)
    if data is None:
        object_release(x, i, False)
        return None
    data.holds = True
    x.entries[i].maps = 0
    a8_or_sc(&x.entries[i].flags, FRT_ENTRY_FILE)  # from now on the file is removed with the entry
    return data


cdef int _check_spilling(Client client, Bytes data) except -1:
    client.ensure()
    if not data.holds or data.client is not client:
        raise FastrtError("these are not the bytes of a value that this client is spilling")
    return 0


def commit(Client client, Bytes data not None, bint counts=True):
    """Free the memory of a value whose file is written.

    Args:
        data: from `begin`; its memory must not be read any more.
        counts: whether `totals` count the value; not if its file was there already.
    Returns:
        The number of bytes freed; 0 when a client has pinned the value meanwhile (it stays in memory).
    """
    _check_spilling(client, data)
    cdef frt_ctx *x = &client.x
    cdef uint32_t i = data.index
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word = a64_load_sc(state)
    cdef uint64_t room = arena_block_bytes(x, x.entries[i].offset)
    cdef int rc
    if word != frt_word(FRT_OBJ_SPILLING, x.me, frt_word_gen(word)) or not a64_cas_sc(
            state, word, frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word))):
        _let_go(data)
        return 0
    rc = arena_free(x, i + 1, &x.entries[i].offset)
    if rc != FRT_OK:  # a stuck lock: the bytes are still in memory
        a64_store_sc(state, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))
        object_tell(x, i)
        _let_go(data)
        check(rc)
    a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(word)))  # commit
    if counts:
        x.sb.spilled_objects += 1
        x.sb.spilled_bytes += x.entries[i].bytes
    _let_go(data)  # frees the value if the last other holder has let go meanwhile
    return room


def give_up(Client client, Bytes data not None):
    """Cancel the spilling of a value: it stays in memory."""
    _check_spilling(client, data)
    _let_go(data)


cdef void _let_go(Bytes data) noexcept:
    """Release the spiller's reference; a value that is still SPILLING stays in memory."""
    cdef frt_ctx *x = &data.client.x
    data.holds = False
    _unspill(x, data.index)
    object_release(x, data.index, False)


cdef void _unspill(frt_ctx *x, uint32_t i) noexcept:
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word = a64_load_sc(state)
    if word == frt_word(FRT_OBJ_SPILLING, x.me, frt_word_gen(word)):
        a64_cas_sc(state, word, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))


def begin_restore(Client client, uint32_t i, uint64_t objref):
    """Begin to restore a spilled entry.

    Returns:
        Memory for its bytes as a writable buffer; None when there is nothing to restore.
    Raises:
        ObjectStoreFullError: there is no room; the value stays spilled.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t *state
    cdef uint64_t word
    cdef int rc
    client.ensure()
    if i >= frt_objects(x):
        return None
    state = frt_state(x, i)
    word = a64_load_sc(state)
    if frt_word_state(word) != FRT_OBJ_SPILLED or x.entries[i].objref != objref or x.entries[i].nrefs:
        return None
    if not a8_load_sc(&x.entries[i].flags) & FRT_ENTRY_FILE or not a64_cas_sc(
            state, word, frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word))):
        return None
    with nogil:
        rc = arena_alloc(x, x.entries[i].bytes, i + 1, &x.entries[i].offset)
    if rc != FRT_OK:
        a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(word)))
        object_maybe_delete(x, i)
        check(rc)
    return _bytes(client, i, False)


def finish_restore(Client client, uint32_t i, bint good):
    """End a restore: the bytes are in memory again; or, if not `good`, they are lost and reading the value raises."""
    _check_entry(client, i)
    cdef frt_ctx *x = &client.x
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word = a64_load_sc(state)
    cdef frt_entry *entry = x.entries + i
    if word != frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word)):
        raise FastrtError(f"object {i} is not being restored by this client")
    if good:
        x.sb.restored_objects += 1
        x.sb.restored_bytes += entry.bytes
        entry.used = x.sb.clock
        # FRT_ENTRY_FILE stays: if this process dies now the file is left, and the client that frees the value removes
        # it.
    else:
        check(arena_free(x, i + 1, &entry.offset))
        entry.kind = KIND_LOST
        a64_store_rlx(&entry.bytes, 0)
        entry.flags |= FRT_ENTRY_ERROR
    a64_store_sc(state, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))  # commit
    object_tell(x, i)
    object_maybe_delete(x, i)


def cancel_restore(Client client, uint32_t i):
    """End a restore without the bytes, which could not be read now: they stay in the file, and the memory is free."""
    _check_entry(client, i)
    cdef frt_ctx *x = &client.x
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word = a64_load_sc(state)
    if word != frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word)):
        raise FastrtError(f"object {i} is not being restored by this client")
    check(arena_free(x, i + 1, &x.entries[i].offset))
    a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(word)))  # commit
    object_tell(x, i)
    object_maybe_delete(x, i)


def wanted_next(Client client, uint32_t tasks_most, bint elsewhere=False):
    """List the spilled arguments of the next ready tasks: (index, objref, bytes), those that are needed first.

    The queue and the records are read without a lock, so a row may name a value that no task needs any more.

    Args:
        tasks_most: how many tasks at the head of the queue are examined, and as many of those with a priority.
        elsewhere: list the arguments whose bytes only other nodes have.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t cells, n
    cdef uint64_t k, head
    cdef list found = []
    client.ensure()
    n = min(a32_load_acq(&x.sb.ranked), frt_most(&x.sb.ranked_cells, x.tasks_max), tasks_most)
    for k in range(n):  # a heap: the first is next, the others are near
        _spilled_of_cell(x, x.ranked[k].cell, elsewhere, found)
    cells = a32_load_acq(&x.sb.ring_cells)
    if cells == 0 or cells & (cells - 1) or cells > x.ring_max:
        return found
    head = a64_load_acq(&x.sb.ring_head)
    for k in range(min(a64_load_acq(&x.sb.ring_tail) - head, <uint64_t>min(tasks_most, cells))):
        _spilled_of_cell(x, x.ring[(head + k) & (cells - 1)], elsewhere, found)
    return found


def wanted_by(Client client, tasks):
    """List the arguments of tasks, (index, id) of each, whose bytes only other nodes have: rows as of `wanted_next`."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    cdef uint64_t id
    cdef list found = []
    client.ensure()
    for t, id in tasks:
        if t < frt_tasks(x) and x.tasks[t].id == id:
            _spilled_of(x, t, True, found)
    return found


cdef int _spilled_of_cell(frt_ctx *x, uint64_t cell, bint elsewhere, list found) except -1:
    """Append the arguments of a task that a cell of the queue names."""
    cdef uint32_t t = <uint32_t>cell
    if t < frt_tasks(x) and queue_means(x, cell, a64_load_acq(x.task_words + t)):
        _spilled_of(x, t, elsewhere, found)
    return 0


cdef int _spilled_of(frt_ctx *x, uint32_t t, bint elsewhere, list found) except -1:
    """Append the arguments in files, or `elsewhere`, of a task."""
    cdef frt_body body
    cdef frt_refslot slot
    cdef frt_entry *entry
    cdef uint32_t k
    if not frt_task_body(x, t, &body):
        return 0
    for k in range(min(body.ndeps, <uint32_t>ARGUMENTS_MAX)):
        slot = body.refs[k]
        if slot.index >= frt_objects(x) or frt_word_state(a64_load_acq(frt_state(x, slot.index))) != FRT_OBJ_SPILLED:
            continue
        entry = x.entries + slot.index
        if a64_load_rlx(&entry.objref) == slot.objref and (elsewhere or entry.nrefs == 0) and \
                (a8_load_sc(&entry.flags) & FRT_ENTRY_FILE == 0) == elsewhere:
            found.append((slot.index, slot.objref, a64_load_rlx(&entry.bytes)))
    return 0


def is_spilled(Client client, Ref ref):
    """Whether the value's bytes are only in a file."""
    client.ensure()
    ref_use(client, ref)
    return frt_word_state(a64_load_acq(frt_state(&client.x, ref.index))) in (FRT_OBJ_SPILLED, FRT_OBJ_RESTORING)


def wait_restored(Client client, Ref ref, double timeout_s):
    """Wait until the value's bytes are in memory; False after the timeout."""
    cdef frt_ctx *x = &client.x
    cdef int64_t look, deadline = _deadline(timeout_s)
    cdef int rc = FRT_TIMEOUT
    client.ensure()
    ref_use(client, ref)
    while rc == FRT_INTERRUPTED or rc == FRT_TIMEOUT:
        look = frt_now_ns() + SIGNALS_NS
        with nogil:
            rc = wait_resident(x, ref.index, look if look < deadline else deadline)
        PyErr_CheckSignals()
        client.ensure()
        if rc == FRT_TIMEOUT and frt_now_ns() >= deadline:
            return False
    check(rc)
    return True


cdef int64_t _deadline(double timeout_s) noexcept:
    return frt_now_ns() + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)


def rounds(Client client):
    """How many rounds of spilling have ended."""
    client.ensure()
    return a32_load_acq(&client.x.sb.spill_rounds)


def end_round(Client client, uint64_t freed, str error=""):
    """Publish that a round of spilling has ended and how much it freed, and wake the clients that wait for room."""
    cdef frt_ctx *x = &client.x
    cdef bytes text = error.encode("utf-8", "replace")[:127]
    cdef uint32_t c
    client.ensure()
    memset(x.sb.spill_error, 0, 128)
    for c in range(<uint32_t>len(text)):
        x.sb.spill_error[c] = text[c]
    x.sb.spill_freed = freed
    a32_store_sc(&x.sb.spill_rounds, x.sb.spill_rounds + 1)
    for c in range(frt_clients(x)):
        if frt_word_state(x.clients[c].word) == FRT_CLIENT_LIVE:
            client_wake(x, c)


def last_round(Client client):
    """The outcome of the last round: (bytes freed, error or "")."""
    client.ensure()
    cdef frt_superblock *sb = client.x.sb
    return sb.spill_freed, sb.spill_error[:strnlen(sb.spill_error, 128)].decode("utf-8", "replace")


def tick(Client client):
    """Increment the clock by which values record their last use. Only the daemon calls this."""
    client.ensure()
    client.x.sb.clock += 1


def totals(Client client):
    """A dict with the numbers of objects and bytes ever spilled, restored, and written to files for lack of room."""
    client.ensure()
    cdef frt_superblock *sb = client.x.sb
    return {"spilled_objects": sb.spilled_objects, "spilled_bytes": sb.spilled_bytes,
            "restored_objects": sb.restored_objects, "restored_bytes": sb.restored_bytes,
            "mapped_objects": sb.mapped_objects, "mapped_bytes": sb.mapped_bytes}


def directory(Client client):
    """The folder with the files of spilled values; "" when spilling is off."""
    client.ensure()
    cdef frt_superblock *sb = client.x.sb
    return sb.spill_dir[:strnlen(sb.spill_dir, 256)].decode("utf-8", "surrogateescape")


def wait_round(Client client, uint32_t seen, double timeout_s):
    """Wait until the number of ended rounds differs from `seen`; False after the timeout."""
    cdef frt_ctx *x = &client.x
    cdef int64_t deadline = _deadline(timeout_s)
    cdef int rc = FRT_OK
    client.ensure()
    while rc != FRT_TIMEOUT and a32_load_sc(&x.sb.spill_rounds) == seen:
        client.ensure()
        with nogil:
            rc = wait_news(x, &x.sb.spill_rounds, seen, deadline)
        PyErr_CheckSignals()
    return a32_load_sc(&x.sb.spill_rounds) != seen


def nap(Client client, double timeout_s):
    """Sleep for `timeout_s`, also through wakes; for `outlook` of other clients this client is asleep."""
    cdef frt_ctx *x = &client.x
    cdef int64_t deadline = _deadline(timeout_s)
    cdef int rc = FRT_OK
    while rc != FRT_TIMEOUT:
        client.ensure()
        with nogil:
            rc = wait_nap(x, a32_load_sc(&x.clients[x.me].wake), deadline)
        PyErr_CheckSignals()


cdef bint _is_others(frt_ctx *x, uint32_t i, bint unfinished) noexcept:
    """Whether another client could free the block of entry i, by dropping its holds or by sealing the value."""
    cdef uint64_t bits, word = a64_load_acq(frt_state(x, i))
    cdef int state = frt_word_state(word)
    cdef uint32_t w, task = a32_load_rlx(&x.entries[i].task)
    for w in range(frt_words(x)):
        bits = a64_load_rlx(frt_bits(x, i, FRT_REFS, w)) | a64_load_rlx(frt_bits(x, i, FRT_PINS, w))
        if bits & ~(x.me_bit if w == x.me_word else 0):
            return True
    if state == FRT_OBJ_PENDING:  # a half-written result: does another client run its task?
        return not 0 < task <= frt_tasks(x) or frt_word_client(a64_load_acq(x.task_words + task - 1)) != x.me
    if state != FRT_OBJ_SEALED:
        return frt_word_client(word) != x.me
    return unfinished and a32_load_rlx(&x.entries[i].counted) != 0


def outlook(Client client):
    """Report how much memory other clients may free, and which clients run code.

    Returns:
        (others, awake, mark, failed): bytes that another client, or a task that has not ended, keeps in use; the
        indices of the other drivers, workers and actors that do not sleep in the arena, and of tools that forward tasks
        to other nodes; a number that changes when any block of memory gets another object; the number of `fail_first`.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t i, c
    cdef uint64_t room, word, others = 0, mark = 0
    cdef bint unfinished = False
    cdef set awake = set()
    client.ensure()
    for i in range(frt_tasks(x)):
        word = a64_load_acq(x.task_words + i)
        if frt_word_state(word) <= FRT_TASK_RESERVED:
            continue
        unfinished = True
        c = frt_word_client(word)
        if frt_word_state(word) >= FRT_TASK_CLAIMED and c < x.clients_max and x.clients[c].kind == FRT_KIND_TOOL:
            awake.add(c)
    for c in range(frt_clients(x)):
        if c != x.me and frt_word_state(x.clients[c].word) == FRT_CLIENT_LIVE and not a32_load_sc(
                &x.clients[c].sleepers) and x.clients[c].kind in (FRT_KIND_DRIVER, FRT_KIND_WORKER, FRT_KIND_ACTOR):
            awake.add(c)
    for i in range(frt_objects(x)):
        room = arena_block_bytes(x, x.entries[i].offset) if x.entries[i].offset else 0
        if room:
            mark += (x.entries[i].objref + 1) * <uint64_t>0x9E3779B97F4A7C15
            if _is_others(x, i, unfinished):
                others += room
    return others, awake, mark, a32_load_sc(&x.sb.rooms_failed)


def fail_first(Client client, uint32_t failed):
    """Claim to be the next process whose wait for room fails, so that the others can use what it frees.

    Args:
        failed: from `outlook`.
    Returns:
        False when another one has failed since then.
    """
    client.ensure()
    return a32_cas_sc(&client.x.sb.rooms_failed, failed, failed + 1)


def size(Client client, uint32_t i):
    """The size of entry i's value in bytes; a hint, read without a hold."""
    client.ensure()
    return client.x.entries[i].bytes if i < frt_objects(&client.x) else 0
