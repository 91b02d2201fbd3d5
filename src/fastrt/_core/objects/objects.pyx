# cython: language_level=3, freethreading_compatible=True
"""The life of an object table entry: new, filled, sealed, held, deleted.

Invariants: a sealed entry's bytes never change while it is held; an entry is alive exactly while a
ref or pin bit is set or its `counted` word is not zero; each step commits by one store of the state word.
layout.h ("Life of an entry") explains the order of reads and writes between holders and deleters.
Each process counts its holds of an entry: the first hold sets this client's bit, the last one clears it. A count and
its bit change together, with the GIL held or under the lock of this process's threads.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.arena cimport arena_alloc, arena_free
from fastrt._core.memory.clients cimport client_new_objref, client_wake
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.pool cimport pool_keep_object, pool_take_object
from fastrt._core.memory.segment cimport spill_remove
from fastrt._core.objects.mailbox cimport mailbox_release
from fastrt._core.objects.references cimport links_count, links_names, links_sealed, links_take_item, links_uncount
from fastrt._core.objects.unread_list cimport unread_keep


cdef int object_new(frt_ctx *x) noexcept nogil:
    """Take a free entry and give it a new objref; it is RESERVED(me): its index, or a negative code."""
    cdef int i = pool_take_object(x)
    cdef frt_entry *entry
    if i < 0:
        return i
    entry = x.entries + i
    # Atomic stores: a client that comes too late for the entry's previous object may be reading it.
    a64_store_rlx(&entry.objref, client_new_objref(x))
    a32_store_rlx(&entry.task, 0)
    a32_store_rlx(&entry.waiter, 0)
    entry.offset, entry.nrefs = 0, 0
    a64_store_rlx(&entry.bytes, 0)
    a8_store_rlx(&entry.flags, 0)
    entry.kind, entry.actor, entry.site, entry.used = 0, 0, 0, x.sb.clock
    return i


cdef char *object_room(frt_ctx *x, uint32_t i, uint64_t nbytes, uint32_t nrefs, int *rc) noexcept nogil:
    """Allocate memory for a value of nbytes and nrefs contained refs: in the entry if it fits, else in a block.

    The caller owns the entry (it is RESERVED(me), or PENDING and this client runs its task).
    NULL with rc set when there is no room.
    """
    cdef frt_entry *entry = x.entries + i
    cdef uint64_t total = nbytes
    if nrefs:
        total = ((nbytes + 7) & ~<uint64_t>7) + <uint64_t>nrefs * sizeof(frt_refslot)
    rc[0] = FRT_OK if nbytes <= x.total_bytes else FRT_TOO_LARGE  # also keeps `total` from wrapping around
    if rc[0] != FRT_OK:
        return NULL
    if total > FRT_INLINE_BYTES:
        rc[0] = arena_alloc(x, total, i + 1, &entry.offset)
        if rc[0] != FRT_OK:
            return NULL
    entry.nrefs = nrefs
    a64_store_rlx(&entry.bytes, nbytes)  # a sealer of the entry's last object may read it, as a hint
    return x.base + entry.offset if entry.offset else entry.inlined


cdef int object_contain(frt_ctx *x, uint32_t i) noexcept nogil:
    """Count the refs that the caller has written after the value. Before the seal."""
    cdef frt_entry *entry = x.entries + i
    cdef uint32_t n
    cdef frt_refslot *slots = frt_entry_refs(x, i, &n)
    if entry.nrefs == 0:
        return FRT_OK
    return links_count(x, slots, n, &entry.flags, FRT_ENTRY_COUNTED)


cdef void object_seal_new(frt_ctx *x, uint32_t i) noexcept nogil:
    """Seal an entry that no other process knows yet, with one reference of this process."""
    cdef uint64_t *state = frt_state(x, i)
    object_hold_new(x, i, False)
    a64_store_rel(state, frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(a64_load_rlx(state))))  # commit
    _drop_if_left(x, i)


cdef void object_seal_file(frt_ctx *x, uint32_t i) noexcept nogil:
    """Seal an entry as `object_seal_new` does, with its bytes in a file."""
    cdef uint64_t *state = frt_state(x, i)
    object_hold_new(x, i, False)
    a64_store_rel(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(a64_load_rlx(state))))  # commit
    _drop_if_left(x, i)


cdef inline void _drop_if_left(frt_ctx *x, uint32_t i) noexcept nogil:
    """Drop a value that was sealed while another thread has this client leave."""
    if frt_has_left_since(x):
        object_maybe_delete(x, i)


cdef void object_tell(frt_ctx *x, uint32_t i) noexcept nogil:
    """Wake the clients, and advance the tasks, that wait for a sealed entry. Safe to repeat."""
    cdef uint64_t *waits
    cdef uint64_t bits
    cdef uint32_t w
    for w in range(frt_words(x)):
        waits = frt_bits(x, i, FRT_WAITS, w)
        if a64_load_sc(waits):
            bits = a64_and_sc(waits, 0)
            while bits:
                client_wake(x, w * 64 + frt_lowest(bits))
                bits &= bits - 1
    links_sealed(x, i)


cdef void object_seal_pending(frt_ctx *x, uint32_t i) noexcept nogil:
    """Seal a task's result. If it has no holder any more it is deleted at once."""
    _seal_pending(x, i, FRT_OBJ_SEALED, 0)


cdef void object_seal_remote(frt_ctx *x, uint32_t i) noexcept nogil:
    """Seal a task's result whose bytes are in a file, or on another node; its entry says where."""
    _seal_pending(x, i, FRT_OBJ_SPILLED, x.me)


cdef void _seal_pending(frt_ctx *x, uint32_t i, unsigned sealed, unsigned client) noexcept nogil:
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word = a64_load_rlx(state)
    cdef frt_client *me = x.clients + x.me
    if frt_word_state(word) != FRT_OBJ_PENDING:
        return
    frt_threads_take(x)
    a32_store_rel(&me.sealing, i + 1)  # if this process dies first, recovery notifies the waiters
    a64_store_sc(state, frt_word(sealed, client, frt_word_gen(word)))  # commit
    object_tell(x, i)
    a32_store_rel(&me.sealing, 0)
    frt_threads_give(x)
    if not frt_any(x, i, FRT_REFS):
        object_maybe_delete(x, i)


cdef int object_empty(frt_ctx *x, uint32_t i) noexcept nogil:
    """Remove the value of an unsealed entry that the caller owns (a half-written result)."""
    cdef frt_entry *entry = x.entries + i
    cdef int rc = FRT_OK
    if entry.flags & FRT_ENTRY_COUNTED:
        rc = _release_children(x, i, NULL)
    if rc == FRT_OK and entry.offset:
        rc = arena_free(x, i + 1, &entry.offset)
    if entry.flags & FRT_ENTRY_FILE:
        spill_remove(x, entry.objref)
    entry.nrefs, entry.kind = 0, 0
    a64_store_rlx(&entry.bytes, 0)
    a8_store_rlx(&entry.flags, a8_load_rlx(&entry.flags) & FRT_ENTRY_READ)
    return rc


cdef int object_discard(frt_ctx *x, uint32_t i) noexcept nogil:
    """Return an unsealed entry that only the caller knows to the pool."""
    cdef int rc = object_empty(x, i)
    cdef uint64_t *state = frt_state(x, i)
    a64_store_rlx(&x.entries[i].objref, 0)
    a64_store_rel(state, frt_word(FRT_OBJ_RESERVED, x.me, frt_word_gen(a64_load_rlx(state)) + 1))
    pool_keep_object(x, i)
    return rc


cdef bint object_is_sealed(frt_ctx *x, uint32_t i) noexcept nogil:
    """Whether the entry has a value, in memory or in a file. Only for entries that the caller holds."""
    return frt_word_state(a64_load_acq(frt_state(x, i))) > FRT_OBJ_PENDING


cdef const char *object_view(frt_ctx *x, uint32_t i, uint64_t *nbytes) noexcept nogil:
    """The value's bytes in the read-only mapping (payload or entry), and their number; NULL if they lie outside."""
    cdef uint64_t offset = a64_load_rlx(&x.entries[i].offset)
    nbytes[0] = a64_load_rlx(&x.entries[i].bytes)
    if offset == 0:
        if nbytes[0] > FRT_INLINE_BYTES:
            return NULL
        return (<const char *>x.view) + (<char *>x.entries[i].inlined - x.base)
    return x.view + offset if frt_inside(x, offset, nbytes[0]) != NULL else NULL


# ---- holders against deleters ----

cdef int object_acquire(frt_ctx *x, uint32_t i, uint64_t objref, bint pin) noexcept nogil:
    """Take a hold for this process: a reference, or with `pin` a pin.

    FRT_OK; FRT_STALE when the object is gone; FRT_SPILLED for a pin when the bytes are not in memory. The bit is set
    first, the state is read second.
    """
    cdef uint32_t *held = (x.pins_held if pin else x.refs_held) + i
    cdef uint64_t *bits = frt_mine(x, i, FRT_PINS if pin else FRT_REFS)
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word
    cdef int what, rc
    if i >= x.objects_max:
        return FRT_STALE
    frt_threads_take(x)
    if held[0] or frt_has_left(x) and not pin:
        rc = FRT_STALE
        if held[0] and a64_load_rlx(&x.entries[i].objref) == objref:
            held[0] += 1
            rc = FRT_OK
        frt_threads_give(x)
        return rc
    a64_or_sc(bits, x.me_bit)
    word = a64_load_sc(state)
    while frt_word_state(word) == FRT_OBJ_DELETING or pin and frt_word_state(word) == FRT_OBJ_SPILLING:
        # Undecided, and this bit decides: the deleter or spiller, which may be dead, finds the word changed and checks
        # again.
        a64_cas_sc(state, word, frt_word_undeleted(word) if frt_word_state(word) == FRT_OBJ_DELETING
                   else frt_word(FRT_OBJ_SEALED, 0, frt_word_gen(word)))
        word = a64_load_sc(state)
    what = frt_word_state(word)
    rc = FRT_STALE
    if a64_load_rlx(&x.entries[i].objref) == objref:
        if what == FRT_OBJ_SEALED or what == FRT_OBJ_PENDING:
            rc = FRT_OK
        elif what >= FRT_OBJ_SPILLING:
            rc = FRT_SPILLED if pin else FRT_OK
    if rc == FRT_OK:
        held[0] = 1
    else:
        a64_and_sc(bits, ~x.me_bit)
    frt_threads_give(x)
    if rc != FRT_OK:
        object_maybe_delete(x, i)  # a deleter may have kept the object because of this bit
    return rc


cdef void object_release(frt_ctx *x, uint32_t i, bint pin) noexcept nogil:
    """Release one hold of this process; if it was the last hold of all, delete the object."""
    cdef uint32_t *held = (x.pins_held if pin else x.refs_held) + i
    cdef bint last = False
    frt_threads_take(x)
    if not frt_has_left(x) or held[0]:  # `leave`, in another thread, may have released it already
        held[0] -= 1
        last = held[0] == 0
    if last:
        a64_and_sc(frt_mine(x, i, FRT_PINS if pin else FRT_REFS), ~x.me_bit)
    frt_threads_give(x)
    if last:
        object_maybe_delete(x, i)


cdef inline bint _held(frt_ctx *x, uint32_t i) noexcept nogil:
    return frt_held(x, i) or a32_load_sc(&x.entries[i].counted) != 0


cdef bint _condemn(frt_ctx *x, uint32_t i) noexcept nogil:
    """Make a SEALED or SPILLED entry without a hold FREEING(me). False if it is held, or another client changes it."""
    cdef uint64_t *state = frt_state(x, i)
    cdef uint64_t word, deleting
    while True:
        word = a64_load_sc(state)
        if frt_word_state(word) != FRT_OBJ_SEALED and frt_word_state(word) != FRT_OBJ_SPILLED or _held(x, i):
            return False
        deleting = frt_word_deleting(x.me, word)
        if not a64_cas_sc(state, word, deleting):
            continue
        if not _held(x, i):
            if a64_cas_sc(state, deleting, frt_word(FRT_OBJ_FREEING, x.me, frt_word_gen(word))):
                return True
        else:
            a64_cas_sc(state, deleting, frt_word_undeleted(deleting))
        # Decide again: the holder that stopped this deletion may have let go when it could not delete.


cdef int _release_children(frt_ctx *x, uint32_t i, uint32_t *condemned) noexcept nogil:
    """Uncount the children of entry i; those without a hold now are condemned and put on the list `condemned`.

    The list is linked through the children's `task` fields (no reader needs them once an entry is sealed), so a chain
    of any length is deleted without recursion and without memory.
    """
    cdef frt_entry *entry = x.entries + i
    cdef frt_refslot slot
    cdef uint32_t k, n, child
    cdef frt_refslot *slots = frt_entry_refs(x, i, &n)
    cdef int rc = links_uncount(x, slots, n, &entry.flags, FRT_ENTRY_COUNTED)
    if rc != FRT_OK:
        return rc
    for k in range(n):
        slot = slots[k]
        child = slot.index
        if links_names(x, &slot):
            if condemned == NULL:
                object_maybe_delete(x, child)
            elif _condemn(x, child):
                a32_store_rlx(&x.entries[child].task, condemned[0])
                condemned[0] = child + 1
    return FRT_OK


cdef int _release_items(frt_ctx *x, uint32_t s, uint32_t *condemned) noexcept nogil:
    """Release a stream's unread items; those without another hold are condemned and listed, as above."""
    cdef uint64_t head = a64_load_acq(&frt_stream_of(x, s).head)
    cdef uint32_t item = <uint32_t>head
    cdef int rc = FRT_OK
    while item and rc == FRT_OK:
        rc = links_take_item(x, s, head)
        if rc == FRT_OK and _condemn(x, item - 1):
            a32_store_rlx(&x.entries[item - 1].task, condemned[0])
            condemned[0] = item
        head = a64_load_acq(&frt_stream_of(x, s).head)
        item = <uint32_t>head
    return rc


cdef void object_free(frt_ctx *x, uint32_t i) noexcept nogil:
    """Free an entry that is FREEING(me), and all entries that only it kept alive."""
    cdef uint32_t condemned = i + 1
    cdef frt_entry *entry
    cdef uint64_t *state
    a32_store_rlx(&x.entries[i].task, 0)
    while condemned:
        if condemned > x.objects_max:
            frt_broken(x, "the list of objects to free is damaged")
            return
        i = condemned - 1
        entry = x.entries + i
        condemned = a32_load_rlx(&entry.task)
        if entry.flags & (FRT_ENTRY_ERROR | FRT_ENTRY_ACTOR):
            unread_keep(x, i)
        if entry.nrefs and _release_children(x, i, &condemned) != FRT_OK:
            return  # a stuck lock: the entry stays FREEING(me), and recovery finds it
        if entry.flags & FRT_ENTRY_STREAM and _release_items(x, i, &condemned) != FRT_OK:
            return
        entry.nrefs = 0  # before the block is freed: recovery would otherwise read stale slots (harmless: names differ)
        if entry.offset and arena_free(x, i + 1, &entry.offset) != FRT_OK:
            return
        if entry.flags & FRT_ENTRY_FILE:
            spill_remove(x, entry.objref)
        if entry.flags & FRT_ENTRY_ACTOR:
            mailbox_release(x, i)
        a64_store_rlx(&entry.objref, 0)
        a8_store_rlx(&entry.flags, 0)
        frt_clear_waits(x, i)
        state = frt_state(x, i)
        a64_store_rel(state, frt_word(FRT_OBJ_RESERVED, x.me, frt_word_gen(a64_load_rlx(state)) + 1))  # commit
        pool_keep_object(x, i)


cdef void object_maybe_delete(frt_ctx *x, uint32_t i) noexcept nogil:
    """Delete a sealed entry if it has no holder."""
    if _condemn(x, i):
        object_free(x, i)
    elif a8_load_rlx(&x.entries[i].flags) & FRT_ENTRY_STREAM:  # harmless if the entry is another stream by now
        object_tell(x, i)  # the generator's task may wait for readers that no longer exist
