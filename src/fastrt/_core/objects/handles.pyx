# cython: language_level=3, freethreading_compatible=True
"""Python's handles on the object table: references, pinned views, and values being written.

Ref     one reference of this process; the entry lives at least as long.
Pin     the bytes of a sealed value, exported read-only; they stay in place while any view of them lives.
Writer  the memory of a value that is not sealed yet; if it is dropped unsealed, the memory is freed. If an array over
        that memory stays in use after the seal, the Writer pins the value.
Each belongs to the client that made it. After `close`, and in a forked child, a handle ends without touching the
segment; after `leave` only views and unsealed values still release theirs. None can be part of a cycle, and the
garbage collector must not clear them: each needs its fields when it ends.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer

from fastrt.errors import FastrtError, StaleReferenceError

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.pool cimport pool_flush
from fastrt._core.memory.trace cimport *
from fastrt._core.memory.wait cimport spin_sealed, wait_any, wait_sealed
from fastrt._core.objects.objects cimport *
from fastrt._core.objects.references cimport task_is_mine, task_result
from fastrt._core.objects.scalar cimport KIND_SCALARS_END, scalar_read, scalar_size, scalar_write
from fastrt._core.objects.unread_list cimport unread_notify, unread_read, unread_waits

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from *:
    """
    static inline PyObject *frt_instance(PyObject *type, PyObject *none) {
        PyObject *o = ((PyTypeObject *)type)->tp_new((PyTypeObject *)type, none, NULL);
        /* The garbage collector tracks instances of Python classes, although a Ref cannot be in a cycle: with a
           million Refs alive, a put took 1,100 ns instead of 400. */
        if (o && PyObject_IS_GC(o)) PyObject_GC_UnTrack(o);
        return o;
    }
    """
    object frt_instance(object type, tuple none)

cdef type _ref_class = None
cdef tuple _NO_ARGS = ()

# Values up to this size are copied out of the arena, not pinned: a copy is cheaper than the pin's object and its two
# atomic operations.
cdef enum:
    COPY_BYTES_MAX = 1024


@cython.no_gc
cdef class Ref:
    """One reference of this process to an object. The base of `fastrt.ObjectRef`."""

    def __dealloc__(self):
        if self.client is not None and self.client.usable():
            object_release(&self.client.x, self.index, False)
            if unread_waits():
                unread_notify()

    def __hash__(self):
        return <Py_ssize_t>(self.objref ^ (self.objref >> 17))

    def __eq__(self, other):
        # Each session counts its objrefs from 1: the same number in another session is another object.
        if not isinstance(other, Ref) or self.objref != (<Ref>other).objref:
            return False
        if self.client is (<Ref>other).client:
            return True
        mine, theirs = self.owner, other.owner
        return mine is not None and theirs is not None and mine.segment.name == theirs.segment.name

    # Without these, Cython would make a copy that shares this reference's hold.
    def __reduce__(self):
        raise TypeError("only the store can pickle a reference; pass it to put() or to a task")

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    @property
    def owner(self):
        """The `Client` that this reference belongs to."""
        with cython.critical_section(self):  # `ref_use` in another thread may drop the one that is read here
            return self.client


def set_ref_class(type cls):
    """Set the class of all references that the core makes: a subclass of Ref without a `__new__`."""
    global _ref_class
    if not issubclass(cls, Ref):
        raise TypeError(f"{cls.__name__} is not a subclass of Ref")
    _ref_class = cls


cdef type ref_class():
    return _ref_class if _ref_class is not None else Ref


cdef Ref ref_wrap(Client client, uint32_t index):
    """Make a Ref for a hold that is already taken."""
    cdef Ref ref = frt_instance(ref_class(), _NO_ARGS)
    ref.client = client
    ref.index = index
    ref.objref = a64_load_rlx(&client.x.entries[index].objref)
    return ref


cdef int ref_use(Client client, Ref ref) except -1:
    """Check that `ref` belongs to `client`; a reference inherited by fork takes a hold for this process now."""
    if ref is None:
        raise TypeError("None is not a reference")
    if ref.client is client:
        return 0
    with cython.critical_section(ref):
        if ref.client is client:  # another thread has come first
            return 0
        if ref.client is None or ref.client.segment is not client.segment and \
                ref.client.segment.name != client.segment.name:
            raise StaleReferenceError(f"{ref!r} belongs to a session that has ended; its value is gone")
        if ref.client.usable():
            raise FastrtError(f"{ref!r} belongs to another client of this process")
        check(object_acquire(&client.x, ref.index, ref.objref, False))
        ref.client = client
    return 0


def use(Client client, Ref ref):
    """Check that `ref` is usable through `client`.

    Raises:
        StaleReferenceError: it belongs to an ended session, or its object is gone.
    """
    client.ensure()
    ref_use(client, ref)


def acquire(Client client, uint64_t objref, uint32_t index):
    """Make a reference to an object that another process of this node has named by (objref, index).

    Raises:
        StaleReferenceError: the object does not exist any more.
    """
    client.ensure()
    if index >= frt_objects(&client.x):
        raise StaleReferenceError(f"object {objref:#x} is not in this session's table")
    if object_acquire(&client.x, index, objref, False) != FRT_OK:
        raise StaleReferenceError(f"object {objref:#x} is gone: the last reference to it was dropped")
    return ref_wrap(client, index)


cdef void _flush_if_left(Client client) noexcept:
    """Return the record that was just freed to the pool if the client has left: no later call will use it."""
    if a32_load_rlx(&client.has_left):
        pool_flush(&client.x)


def is_ready(Client client, Ref ref):
    """Whether the object has its value."""
    client.ensure()
    ref_use(client, ref)
    return object_is_sealed(&client.x, ref.index)


# ---- waiting ----

cdef int64_t _deadline(object timeout_s) except -1:
    return (1 << 62) if timeout_s is None else frt_now_ns() + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)


def wait_all(Client client, list refs, timeout_s, double spin_s):
    """Wait until every one of `refs` is ready.

    The last reference is waited for first: results come roughly in the order of submission, so most waits for a long
    list sleep once. A failed result ends the wait early, within 50 ms.

    Args:
        refs: a list of Refs; duplicates are allowed.
        timeout_s: in seconds; None waits without limit.
        spin_s: how many seconds of it to spin before sleeping.
    Returns:
        True when all are ready, or one is an error; False after the timeout.
    """
    cdef frt_ctx *x = &client.x
    cdef Py_ssize_t k
    cdef Ref ref
    cdef int rc
    cdef int64_t now, deadline = _deadline(timeout_s)
    cdef int64_t spin = <int64_t>(spin_s * 1e9)
    cdef uint64_t slept = 0
    client.ensure()
    refs = refs[:]  # another thread may change the caller's list while we sleep
    try:
        for k in range(len(refs) - 1, -1, -1):
            ref = refs[k]
            ref_use(client, ref)
            while not object_is_sealed(x, ref.index):
                if slept == 0 and deadline > 0:
                    slept = frt_trace_begin(x, FRT_TRACE_WAIT, ref.objref, 0, 0)
                now = frt_now_ns() + 50000000
                with nogil:
                    rc = wait_sealed(x, ref.index, now if now < deadline else deadline, spin)
                spin = 0
                if rc == FRT_INTERRUPTED:
                    PyErr_CheckSignals()
                elif rc == FRT_TIMEOUT:
                    PyErr_CheckSignals()  # a signal that came before the sleep did not end it
                    client.ensure()
                    if _any_failed(client, refs):
                        return True
                    if frt_now_ns() >= deadline and not object_is_sealed(x, ref.index):
                        return False
                else:
                    client.ensure()  # if the session is broken, this raises the better message
                    check(rc)
        return True
    finally:
        if slept and client.usable():
            frt_trace_end(x, slept)


cdef bint _any_failed(Client client, list refs) except -1:
    cdef Ref ref
    for ref in refs:
        ref_use(client, ref)
        if object_is_sealed(&client.x, ref.index) and client.x.entries[ref.index].flags & FRT_ENTRY_ERROR:
            return True
    return False


def wait_some(Client client, list refs, Py_ssize_t num_returns, timeout_s, double spin_s):
    """Wait until `num_returns` of `refs` are ready, or until the timeout.

    Args:
        refs, timeout_s, spin_s: as for `wait_all`.
        num_returns: from 1 to len(refs).
    Returns:
        (ready, others): two lists in the order of `refs`; at most `num_returns` in the first.
    """
    cdef frt_ctx *x = &client.x
    cdef Py_ssize_t n
    cdef Py_ssize_t k
    cdef uint32_t *entries
    cdef int64_t look, deadline, spin
    cdef uint64_t slept
    cdef int rc
    client.ensure()
    if FRT_NO_GIL:
        refs = refs[:]  # another thread may change the caller's list now, and not only while we sleep
    n = len(refs)
    for ref in refs:
        if not isinstance(ref, Ref):
            raise TypeError(f"wait takes a list of ObjectRefs; this one has a {type(ref).__name__}")
    if _count_ready(client, refs, num_returns) < num_returns and timeout_s != 0:
        deadline, spin = _deadline(timeout_s), <int64_t>(spin_s * 1e9)
        refs = refs[:]  # another thread may change the caller's list while we sleep
        entries = <uint32_t *>malloc(n * sizeof(uint32_t))
        if entries == NULL:
            raise MemoryError()
        slept = frt_trace_begin(x, FRT_TRACE_WAIT, 0, 0, 0)
        try:
            for k in range(n):
                entries[k] = (<Ref>refs[k]).index
            rc = FRT_INTERRUPTED
            while rc == FRT_INTERRUPTED or rc == FRT_TIMEOUT and frt_now_ns() < deadline:
                look = frt_now_ns() + spin + 50000000
                with nogil:
                    rc = wait_any(x, entries, <uint32_t>n, <uint32_t>num_returns, look if look < deadline else deadline,
                                  spin)
                spin = 0
                PyErr_CheckSignals()  # also for signals that came before the sleep and did not end it
                client.ensure()
            if rc != FRT_TIMEOUT:
                check(rc)
        finally:
            free(entries)
            if slept and client.usable():
                frt_trace_end(x, slept)
    return _split(client, refs, num_returns)


cdef Py_ssize_t _count_ready(Client client, list refs, Py_ssize_t enough) except -1:
    """How many of `refs` are ready, counting no further than `enough`; each one read is checked by `ref_use`."""
    cdef Py_ssize_t ready = 0
    cdef Ref ref
    for ref in refs:
        ref_use(client, ref)
        if object_is_sealed(&client.x, ref.index):
            ready += 1
            if ready == enough:
                break
    return ready


cdef tuple _split(Client client, list refs, Py_ssize_t most):
    """The first `most` ready references, and the others; by a slice if the ready ones come first, as they often do."""
    cdef list ready = []
    cdef list others
    cdef Py_ssize_t k = 0
    cdef Py_ssize_t n = len(refs)
    for k in range(n):
        if len(ready) == most or not object_is_sealed(&client.x, (<Ref>refs[k]).index):
            break
        ready.append(refs[k])
    if len(ready) == most:
        return ready, refs[most:]
    others = []
    for k in range(k, n):
        if len(ready) < most and object_is_sealed(&client.x, (<Ref>refs[k]).index):
            ready.append(refs[k])
        else:
            others.append(refs[k])
    return ready, others


# ---- reading ----

@cython.no_gc
@cython.freelist(64)
cdef class Pin:
    """A sealed value's bytes, exported read-only through the buffer protocol. The view owns the pin."""

    def __dealloc__(self):
        if self.client is not None and self.client.may_let_go():
            object_release(&self.client.x, self.index, True)
            _flush_if_left(self.client)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <void *>self.data, self.nbytes, 1, flags)

    def __len__(self):
        return self.nbytes


def read(Client client, Ref ref, bint raw=False):
    """Read a sealed value: its kind, its error flag and its bytes.

    Args:
        raw: return the encoded bytes for every kind, for a copy in another store.
    Returns:
        (kind, is_error, value): for scalar kinds the value itself; otherwise `bytes` (a copy, for small values)
        or a `Pin` (a view that keeps the memory in place); with `raw` always a `Pin`. None when the bytes are not in
        memory: restore them and read again.
    Raises:
        FastrtError: the value is not ready.
        StaleReferenceError: the reference belongs to an ended session.
        ArenaCorrupt: the table names bytes outside the segment.
    """
    cdef frt_entry *entry
    cdef const char *data
    cdef uint64_t nbytes
    cdef uint16_t kind
    cdef Pin pin = None
    cdef int rc, state
    client.ensure()
    ref_use(client, ref)
    entry = client.x.entries + ref.index
    state = frt_word_state(a64_load_acq(frt_state(&client.x, ref.index)))
    if state <= FRT_OBJ_PENDING:
        raise FastrtError(f"{ref!r} is not ready yet; wait for it first")
    if state == FRT_OBJ_SPILLED or state == FRT_OBJ_RESTORING:  # a lost remote value may become a small error
        return None
    if raw or entry.bytes > COPY_BYTES_MAX:
        # A value that may be spilled is pinned before any other field of its entry is read.
        rc = object_acquire(&client.x, ref.index, ref.objref, True)
        if rc == FRT_SPILLED:
            return None
        check(rc)
        pin = Pin.__new__(Pin)
        pin.client, pin.index = client, ref.index
        a32_store_rlx(&entry.used, client.x.sb.clock)  # by all its readers
        if entry.bytes >= FRT_TRACE_BYTES_MIN:
            frt_trace_point(&client.x, FRT_TRACE_GET, ref.objref, <uint32_t>((entry.bytes + 1023) >> 10), 0)
    data = object_view(&client.x, ref.index, &nbytes)
    if data == NULL:
        check(FRT_CORRUPT)
    error = (entry.flags & FRT_ENTRY_ERROR) != 0
    if error:
        unread_read(&client.x, ref.index)
    kind = entry.kind
    if kind < KIND_SCALARS_END and not raw:
        return kind, error, scalar_read(kind, data, nbytes)
    if pin is None:
        return kind, error, data[:nbytes]
    pin.data, pin.nbytes = data, nbytes
    return kind, error, pin


cpdef object read_scalar(Client client, Ref ref, missing, double spin_s=0.0):
    """Read a value if it is sealed, a small scalar and no error; otherwise return `missing`. The fast path of `get`.

    If the value is not sealed, spin for it for up to `spin_s`: in a cold cache a return to Python and another call
    cost 10 us more than this wait.
    """
    cdef frt_entry *entry
    cdef const char *data
    cdef uint64_t nbytes
    cdef uint16_t kind
    cdef int64_t spin = <int64_t>(spin_s * 1e9)
    if ref.client is not client or not client.usable():
        return missing
    entry = client.x.entries + ref.index
    if spin and not object_is_sealed(&client.x, ref.index):
        with nogil:
            spin_sealed(&client.x, ref.index, spin)
    if not object_is_sealed(&client.x, ref.index):
        return missing
    kind = entry.kind  # read after the seal: the kind of an unsealed entry looks like None
    if kind >= KIND_SCALARS_END or entry.flags & FRT_ENTRY_ERROR:
        return missing
    data = object_view(&client.x, ref.index, &nbytes)
    if data == NULL or nbytes >= FRT_SPILL_BYTES_MIN:  # the bytes may be in a file, or on their way to one
        return missing
    return scalar_read(kind, data, nbytes)


def read_scalars(Client client, list refs, missing):
    """Call `read_scalar` for each of a list of ready references."""
    return [read_scalar(client, ref, missing) for ref in refs]


def contained(Client client, Ref ref):
    """Make references to the objects that a sealed value contains, in the order in which they were written."""
    cdef frt_refslot *slots
    cdef uint32_t k, n
    client.ensure()
    ref_use(client, ref)
    slots = frt_entry_refs(&client.x, ref.index, &n)
    if n != client.x.entries[ref.index].nrefs:
        check(FRT_CORRUPT)
    refs = []
    for k in range(n):
        refs.append(acquire(client, slots[k].objref, slots[k].index))
    return refs


def describe(Client client, Ref ref):
    """The fields of an object's entry as a dict, for listings and tests."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    ref_use(client, ref)
    cdef frt_entry *entry = x.entries + ref.index
    return {
        "objref": entry.objref, "index": ref.index, "bytes": entry.bytes, "kind": entry.kind,
        "ready": object_is_sealed(x, ref.index), "inline": entry.offset == 0, "counted": entry.counted,
        "contains": entry.nrefs, "error": bool(entry.flags & FRT_ENTRY_ERROR),
        "remote": bool(entry.flags & FRT_ENTRY_REMOTE),
        "refs": [c for c in range(frt_clients(x)) if frt_bits(x, ref.index, FRT_REFS, c >> 6)[0] >> (c & 63) & 1],
        "pins": [c for c in range(frt_clients(x)) if frt_bits(x, ref.index, FRT_PINS, c >> 6)[0] >> (c & 63) & 1],
    }


# ---- writing ----

def put_scalar(Client client, value):
    """Store a scalar: its Ref, or None when the value is not a scalar. The fast path of `put`."""
    cdef uint16_t kind = 0
    cdef Py_ssize_t n = scalar_size(value, &kind)
    cdef int i, rc = FRT_OK
    cdef char *room
    if n < 0:
        return None
    client.ensure()
    i = check(object_new(&client.x))
    room = object_room(&client.x, i, n, 0, &rc)
    if room == NULL:
        object_discard(&client.x, i)
        check(rc)
    scalar_write(value, kind, room, n)
    client.x.entries[i].kind = kind
    object_seal_new(&client.x, i)
    return ref_wrap(client, i)


@cython.no_gc
cdef class Writer:
    """The memory of a value being written. Write through the buffer protocol, then call `seal`.

    If it is dropped without a seal, its memory is freed. For a task's result this happens only when the result is
    written again: by the time the last traceback drops this Writer, another process may have written the result.
    """

    def __dealloc__(self):
        if self.client is None or not self.client.may_let_go():
            return
        if self.pinned:
            object_release(&self.client.x, self.index, True)
        elif not self.done and self.task < 0:
            object_discard(&self.client.x, self.index)
        _flush_if_left(self.client)

    cdef int _check_open(self) except -1:
        if self.client is None:
            raise TypeError("a Writer cannot be made directly; call create() or result()")
        self.client.ensure()
        if self.done:
            raise BufferError("the value is sealed and cannot change any more")
        return 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        self._check_open()
        PyBuffer_FillInfo(view, self, self.data, self.nbytes, 0, flags)

    def __len__(self):
        return self.nbytes

    def copy(self, Py_ssize_t offset, source):
        """Copy the bytes of a contiguous buffer to `offset`; without the GIL from 64 KiB on.

        Raises:
            ValueError: the bytes do not fit.
        """
        cdef Py_buffer view
        self._check_open()
        PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
        try:
            if offset < 0 or view.len > self.nbytes - offset:
                raise ValueError(f"{view.len} bytes at {offset} do not fit into {self.nbytes}")
            if view.len < 65536:
                frt_copy(self.data + offset, view.buf, view.len)
            else:
                with nogil:
                    frt_copy(self.data + offset, view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    @cython.critical_section
    cpdef object seal(self, refs=()):
        """Make the value immutable and visible.

        Args:
            refs: the references that the value contains, as many as `nrefs` of `create` or `result`.
        Returns:
            A Ref to it; None for the result of a task.
        """
        self._check_open()
        writer_contain(self, refs)
        self.done = True
        frt_trace_end(&self.client.x, self.traced)
        if self.task >= 0:
            object_seal_pending(&self.client.x, self.index)
            return None
        object_seal_new(&self.client.x, self.index)
        return ref_wrap(self.client, self.index)

    @cython.critical_section
    def seal_in_place(self):
        """Seal a value without contained references, and keep its bytes where they are while this Writer lives.

        The pin is set before the seal, so the value cannot be spilled in between. A second call makes another
        reference.

        Returns:
            A Ref.
        """
        cdef frt_ctx *x = &self.client.x
        if self.pinned:
            self.client.ensure()
            return acquire(self.client, self.objref, self.index)
        self._check_open()
        if self.task >= 0 or x.entries[self.index].nrefs:
            raise BufferError("only a new value without contained references is sealed in place")
        self.objref = x.entries[self.index].objref
        object_hold_new(x, self.index, True)
        self.pinned = True
        return self.seal()

    @property
    def owner(self):
        """The `Client` that this memory belongs to."""
        return self.client


cdef int writer_contain(Writer w, refs) except -1:
    """Write and count the references that the value contains."""
    cdef Ref ref
    cdef uint32_t n, k
    cdef frt_refslot *slots = frt_entry_refs(&w.client.x, w.index, &n)
    if len(refs) != n:
        raise ValueError(f"{len(refs)} contained references given, {n} were announced")
    for k, ref in enumerate(refs):
        ref_use(w.client, ref)
        slots[k].objref, slots[k].index, slots[k].extra = ref.objref, ref.index, 0
    return check(object_contain(&w.client.x, w.index))


cdef Writer _writer(Client client, uint32_t i, int task, uint64_t nbytes, uint32_t nrefs, uint16_t kind, bint error):
    cdef int rc = FRT_OK
    cdef Writer w = Writer.__new__(Writer)
    with nogil:  # the store may grow here, and the kernel commits memory at 1 GB/s
        w.data = object_room(&client.x, i, nbytes, nrefs, &rc)
    if w.data == NULL:
        if task < 0:
            object_discard(&client.x, i)
        check(rc)
    client.x.entries[i].kind = kind
    if error:
        a8_or_sc(&client.x.entries[i].flags, FRT_ENTRY_ERROR)  # another process may mark it as read at any time
    w.client, w.index, w.task, w.nbytes = client, i, task, nbytes
    if nbytes >= FRT_TRACE_BYTES_MIN:
        w.traced = frt_trace_begin(&client.x, FRT_TRACE_PUT, client.x.entries[i].objref,
                                   <uint32_t>((nbytes + 1023) >> 10), 0)
    return w


def create(Client client, uint64_t nbytes, uint16_t kind, uint32_t nrefs=0, bint error=False):
    """Allocate memory for a new value.

    Args:
        nbytes: its size.
        kind: how it is encoded, a number >= 16 that the store chooses.
        nrefs: how many references it will contain.
        error: whether `get` raises it.
    Returns:
        A `Writer`.
    Raises:
        ObjectStoreFullError: there is no room.
    """
    client.ensure()
    return _writer(client, check(object_new(&client.x)), -1, nbytes, nrefs, kind, error)


def result(Client client, uint32_t t, uint32_t k, uint64_t nbytes, uint16_t kind, uint32_t nrefs=0, bint error=False):
    """Allocate memory for result `k` of task `t`, which this client runs or ends; None when it is sealed already.

    Raises:
        ObjectStoreFullError: there is no room.
    """
    cdef int i
    client.ensure()
    if not task_is_mine(&client.x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    if k >= client.x.tasks[t].nreturns:
        raise IndexError(f"task {t} has {client.x.tasks[t].nreturns} results")
    i = task_result(&client.x, t, k)
    if i < 0:
        return None
    check(object_empty(&client.x, i))
    return _writer(client, i, <int>t, nbytes, nrefs, kind, error)
