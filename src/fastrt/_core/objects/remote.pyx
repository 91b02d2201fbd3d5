# cython: language_level=3, freethreading_compatible=True
"""Remote values: sealed objects whose bytes another node keeps. Memory here may have a copy of them.

    PENDING -> SPILLED(me) -> RESTORING(me) -> SEALED -> SPILLING(c) -> RESTORING(c) -> SPILLED(c)

`seal_result` makes the first step, `fetch` the next two, `drop_copy` the rest. So for everyone who waits or reads, a
remote value is a spilled one without a file: it is ready, and a read asks the daemon for its bytes. The entry says
where they can be fetched (frt_source), so the information survives the process that fetches.

FRT_ENTRY_REMOTE marks a copy in memory. A SPILLED value without FRT_ENTRY_FILE is remote by that alone, so that a
process that dies after it has cleared the mark leaves no value that nothing could bring back.

When the source is lost, `detach` makes the copy here an ordinary value. It clears FRT_ENTRY_REMOTE first, then reads
the state and swaps SPILLING back, as a pin does. `drop_copy` makes the state SPILLING first and reads the flag second.
So either it sees the flag cleared, or its swap to RESTORING fails, or `detach` sees that the copy goes. A value without
a copy stays remote until `replace` fills it with the value that was made again, or with an error. Only values without
contained refs are remote.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer

import time

from fastrt.errors import FastrtError

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastrt._core.memory.arena cimport arena_alloc, arena_block_bytes, arena_free
from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.objects cimport (
    object_acquire,
    object_empty,
    object_maybe_delete,
    object_seal_remote,
    object_tell,
)
from fastrt._core.objects.references cimport task_is_mine, task_result

cdef enum:
    NODE_BYTES = 16

_RETRY_S = 0.001  # between two looks at an entry that another client is about to change


cdef inline bint _is_copy(frt_entry *entry) noexcept nogil:
    cdef uint8_t flags = a8_load_sc(&entry.flags)
    return flags & FRT_ENTRY_REMOTE != 0 and flags & FRT_ENTRY_FILE == 0


cdef inline bint _is_missing(frt_entry *entry, uint64_t word) noexcept nogil:
    """Whether a value with this state word is remote, and its bytes are not here."""
    cdef int what = frt_word_state(word)
    return (what == FRT_OBJ_SPILLED or what == FRT_OBJ_RESTORING) and a8_load_sc(&entry.flags) & FRT_ENTRY_FILE == 0


cdef class Fill:
    """The memory of a remote value while its bytes arrive. Write through the buffer protocol, then call `seal`.

    If it is dropped without a seal, its memory is freed and the value stays remote.
    """

    def __dealloc__(self):
        if self.client is not None and not self.done and self.client.may_let_go():
            self._abort()

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.client is None or self.done:
            raise BufferError("the value is sealed and cannot change any more")
        PyBuffer_FillInfo(view, self, self.data, self.nbytes, 0, flags)

    def __len__(self):
        return self.nbytes

    cdef void _abort(self) noexcept:
        cdef frt_ctx *x = &self.client.x
        cdef uint64_t *state = frt_state(x, self.index)
        cdef uint32_t gen = frt_word_gen(a64_load_sc(state))
        self.done = True
        arena_free(x, self.index + 1, &x.entries[self.index].offset)
        a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, gen))
        object_maybe_delete(x, self.index)

    @cython.critical_section
    def abort(self):
        """Free the memory; the value stays remote. Nothing may be written into the memory any more."""
        if not self.done:
            self.client.ensure()
            self._abort()

    def copy(self, Py_ssize_t offset, source):
        """Copy the bytes of a contiguous buffer to `offset`.

        Raises:
            ValueError: the bytes do not fit.
        """
        cdef Py_buffer view
        if self.done:
            raise BufferError("the value is sealed and cannot change any more")
        PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
        try:
            if offset < 0 or view.len > self.nbytes - offset:
                raise ValueError(f"{view.len} bytes at {offset} do not fit into {self.nbytes}")
            with nogil:
                memcpy(self.data + offset, view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    @cython.critical_section
    def seal(self, refs=()):
        """Make the bytes visible to those who wait for them."""
        if refs:
            raise ValueError("a remote value contains no references")
        if self.done:
            raise BufferError("the value is sealed already")
        self.client.ensure()
        self.done = True
        _publish(self)


cdef void _publish(Fill fill) noexcept:
    cdef frt_ctx *x = &fill.client.x
    cdef frt_entry *entry = x.entries + fill.index
    cdef uint64_t *state = frt_state(x, fill.index)
    cdef uint32_t gen = frt_word_gen(a64_load_sc(state))
    if fill.replaces:
        entry.kind = fill.kind
        a64_store_rlx(&entry.bytes, fill.nbytes)
        if fill.error:
            a8_or_sc(&entry.flags, FRT_ENTRY_ERROR)
        a8_and_sc(&entry.flags, <uint8_t>~<unsigned>FRT_ENTRY_REMOTE)
    entry.used = x.sb.clock
    a64_store_sc(state, frt_word(FRT_OBJ_SEALED, 0, gen))  # commit
    object_tell(x, fill.index)
    object_maybe_delete(x, fill.index)


cdef Fill _begin(Client client, uint32_t i, uint64_t objref, uint64_t nbytes):
    """Take a remote value without bytes here, and allocate nbytes for it; None when it is not one (any more)."""
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry = x.entries + i
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word = a64_load_sc(state)
    cdef Fill fill
    cdef int rc
    if frt_word_state(word) != FRT_OBJ_SPILLED or a64_load_rlx(&entry.objref) != objref or \
            not _is_missing(entry, word) or not a64_cas_sc(
                state, word, frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word))):
        return None
    with nogil:
        rc = arena_alloc(x, nbytes if nbytes else 1, i + 1, &entry.offset)
    if rc != FRT_OK:
        a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(word)))
        object_maybe_delete(x, i)
        check(rc)
    fill = Fill.__new__(Fill)
    fill.client, fill.index, fill.nbytes = client, i, nbytes
    fill.data = x.base + entry.offset
    return fill


def seal_result(Client client, uint32_t t, uint32_t k, uint64_t nbytes, uint16_t kind, str node, uint64_t objref):
    """Seal a result as a remote value.

    Args:
        t, k: the task, which this client runs or ends, and the place of the result.
        nbytes, kind: of the value.
        node: the session of the node that has named it, 32 hex digits.
        objref: its number there.
    Returns:
        A reference to it; None when it is sealed already.
    """
    cdef frt_ctx *x = &client.x
    cdef int i
    cdef Ref ref
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    i = task_result(x, t, k)
    if i < 0:
        return None
    check(object_empty(x, i))
    check(object_acquire(x, i, x.entries[i].objref, False))
    ref = ref_wrap(client, i)
    _set_source(x.entries + i, node, objref)
    x.entries[i].kind = kind
    a64_store_rlx(&x.entries[i].bytes, nbytes)
    a8_or_sc(&x.entries[i].flags, FRT_ENTRY_REMOTE)
    object_seal_remote(x, i)
    return ref


def result_objref(Client client, uint32_t t, uint32_t k):
    """Return the number of a result of a task that this client runs or ends; 0 when it is sealed already."""
    cdef frt_ctx *x = &client.x
    cdef int i
    client.ensure()
    if not task_is_mine(x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    i = task_result(x, t, k)
    return 0 if i < 0 else x.entries[i].objref


def point_at(Client client, Ref ref, str node, uint64_t objref):
    """Give a remote value another source, because the one that it had is lost.

    Args:
        node, objref: as for `seal_result`.
    Returns:
        False when it is no remote value (any more).
    """
    cdef frt_entry *entry
    client.ensure()
    ref_use(client, ref)
    entry = client.x.entries + ref.index
    if not _is_copy(entry) and not _is_missing(entry, a64_load_acq(frt_state(&client.x, ref.index))):
        return False
    (<frt_source *>entry.inlined).objref = 0  # after a death half-way no node knows the source
    _set_source(entry, node, objref)
    return True


def mark(Client client, Ref ref, str node, uint64_t objref):
    """Make a sealed value in memory the copy of a remote one.

    Args:
        ref: the value; it contains no references.
        node, objref: as for `seal_result`.
    Returns:
        False when it is not in memory any more.
    """
    cdef frt_entry *entry
    client.ensure()
    ref_use(client, ref)
    entry = client.x.entries + ref.index
    if entry.offset == 0 or entry.nrefs or a8_load_sc(&entry.flags) & FRT_ENTRY_FILE:
        return False
    if frt_word_state(a64_load_acq(frt_state(&client.x, ref.index))) != FRT_OBJ_SEALED:
        return False
    _set_source(entry, node, objref)
    a8_or_sc(&entry.flags, FRT_ENTRY_REMOTE)
    return True


cdef int _set_source(frt_entry *entry, str node, uint64_t objref) except -1:
    cdef frt_source *source = <frt_source *>entry.inlined
    cdef bytes session = bytes.fromhex(node)
    if len(session) != NODE_BYTES:
        raise ValueError(f"{node!r} is not a session: expected 32 hex digits")
    memcpy(source.node, <char *>session, NODE_BYTES)
    source.objref = objref
    return 0


def fetch(Client client, Ref ref):
    """Begin to fetch the bytes of a remote value.

    Returns:
        A `Fill`; None when the bytes are here, or another client is fetching or dropping them.
    Raises:
        ObjectStoreFullError: there is no room; the value stays remote.
    """
    client.ensure()
    ref_use(client, ref)
    return _begin(client, ref.index, ref.objref, client.x.entries[ref.index].bytes)


def replace(Client client, Ref ref, uint64_t nbytes, uint16_t kind, bint error=False):
    """Begin to fill a remote value whose source is lost with another value, or with an error.

    Returns:
        A `Fill`; None when there is a copy here.
    Raises:
        ObjectStoreFullError: there is no room; the value stays remote.
    """
    cdef Fill fill
    client.ensure()
    ref_use(client, ref)
    fill = _begin(client, ref.index, ref.objref, nbytes)
    if fill is not None:
        fill.replaces, fill.kind, fill.error = True, kind, error
    return fill


def detach(Client client, Ref ref):
    """Make the copy here of a remote value an ordinary value, because its source is lost.

    Returns:
        False when there is no copy here: the value stays remote, for `replace`.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef uint64_t *state
    cdef uint64_t word
    client.ensure()
    ref_use(client, ref)
    entry, state = x.entries + ref.index, frt_state(x, ref.index)
    while True:
        a8_and_sc(&entry.flags, <uint8_t>~<unsigned>FRT_ENTRY_REMOTE)
        word = a64_load_sc(state)
        if frt_word_state(word) == FRT_OBJ_SPILLING and not a64_cas_sc(state, word, frt_word(
                FRT_OBJ_SEALED, 0, frt_word_gen(word))):
            continue
        if not _is_missing(entry, word):
            return True
        if frt_word_state(word) == FRT_OBJ_SPILLED:
            return False
        time.sleep(_RETRY_S)  # it is being dropped


def drop_copy(Client client, uint32_t i, uint64_t objref):
    """Free the memory of a remote value's copy.

    Returns:
        The number of bytes freed; 0 when it is pinned, gone, or no copy of a remote value (any more).
    """
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef uint64_t *state
    cdef uint64_t word, spilling, restoring, dropped, room
    cdef int rc
    client.ensure()
    if i >= frt_objects(x):
        return 0
    entry, state = x.entries + i, frt_state(x, i)
    word = a64_load_sc(state)
    spilling = frt_word(FRT_OBJ_SPILLING, x.me, frt_word_gen(word))
    restoring = frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word))
    if frt_word_state(word) != FRT_OBJ_SEALED or a64_load_rlx(&entry.objref) != objref or \
            not _is_copy(entry) or not a64_cas_sc(state, word, spilling):
        return 0
    # A client that pins or detaches the value now swaps SPILLING back, as in `spill`.
    if frt_any(x, i, FRT_PINS) or not _is_copy(entry) or not a64_cas_sc(state, spilling, restoring):
        a64_cas_sc(state, spilling, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))
        object_maybe_delete(x, i)
        return 0
    room = arena_block_bytes(x, entry.offset)
    rc = arena_free(x, i + 1, &entry.offset)
    dropped = frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(word))
    if rc != FRT_OK:  # a stuck lock: the bytes are still in memory
        dropped, room = frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)), 0
    a64_store_sc(state, dropped)  # commit
    if not room:
        object_tell(x, i)
    object_maybe_delete(x, i)
    return room


def is_remote(Client client, uint32_t i, uint64_t objref):
    """Whether entry i is the object `objref` and another node keeps its value; a hint, read without a hold."""
    cdef frt_entry *entry = client.x.entries + i
    client.ensure()
    if i >= frt_objects(&client.x) or a64_load_rlx(&entry.objref) != objref:
        return False
    return _is_copy(entry) or _is_missing(entry, a64_load_acq(frt_state(&client.x, i)))


def is_missing(Client client, Ref ref):
    """Whether the value is remote and its bytes are not here."""
    client.ensure()
    ref_use(client, ref)
    return _is_missing(client.x.entries + ref.index, a64_load_acq(frt_state(&client.x, ref.index)))


cdef bint _only_mine(frt_ctx *x, uint32_t i) noexcept nogil:
    """Whether this process has a reference to entry i and no other process has one."""
    cdef uint64_t *mine = frt_mine(x, i, FRT_REFS)
    cdef uint64_t *bits
    cdef uint32_t w
    for w in range(frt_words(x)):
        bits = frt_bits(x, i, FRT_REFS, w)
        if a64_load_sc(bits) != (x.me_bit if bits == mine else 0):
            return False
    return True


def only_here(Client client, list refs):
    """Return the positions in a list of the references whose objects nothing holds but this process.

    The uplink asks for the objects of other nodes, which it releases there once nothing here uses them.

    A hold moves from a reference to a task or container, or back. It is looked for among the references twice, before
    and after the others, so one move is never missed.
    """
    cdef frt_ctx *x = &client.x
    cdef Ref ref
    client.ensure()
    found = []
    for k, ref in enumerate(refs):
        ref_use(client, ref)
        if _only_mine(x, ref.index) and a32_load_sc(&x.entries[ref.index].counted) == 0 and _only_mine(x, ref.index):
            found.append(k)
    return found


def sources(Client client):
    """List the remote values in the table.

    Returns:
        Tuples (index, objref, node, number there), node as 32 hex digits.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_source source
    cdef frt_entry *entry
    cdef uint32_t i
    cdef uint64_t word
    client.ensure()
    rows = []
    for i in range(frt_objects(x)):
        entry = x.entries + i
        word = a64_load_acq(frt_state(x, i))
        if frt_word_state(word) >= FRT_OBJ_SEALED and (_is_copy(entry) or _is_missing(entry, word)):
            memcpy(&source, entry.inlined, sizeof(source))
            rows.append((i, entry.objref, (<char *>source.node)[:NODE_BYTES].hex(), source.objref))
    return rows
