# cython: language_level=3, freethreading_compatible=True
"""Queues of values directly in the arena: a put or get is a lock, a copy and perhaps a wake.

fifo.h describes the structures and the state after a death. The caller does the parts that need Python: it attaches to
a segment that another process has made, makes a larger one, and encodes values other than scalars and bytes. A call's
result says when one of these is needed. No thread sleeps with the lock held, and only the waits release the GIL.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from fastrt.errors import FastrtError

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Pin, Ref
from fastrt._core.objects.scalar cimport KIND_SCALARS_END, scalar_read, scalar_size, scalar_write

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from "fifo.h" nogil:
    uint64_t FRT_FIFO_MAGIC
    uint32_t FRT_FIFO_FILLER
    void frt_futex_wake_one(uint32_t *word)
    void frt_fifo_redo(frt_fifo *q)
    void frt_fifo_commit(frt_fifo *q)

cdef enum:
    NAP_NS = 250000000  # the longest delay of a sleeper whose waker was killed before the wake

OK, FULL, GROW, MOVED, CLOSED = 0, 1, 2, 3, 4
ROOT_BYTES = sizeof(frt_fifo)
SEGMENT_BYTES = sizeof(frt_fifo_segment)  # before the ring


cdef inline bint _same(frt_fifo_name *a, frt_fifo_name *b) noexcept:
    return a.objref == b.objref and a.index == b.index


cdef inline uint64_t _whole(Py_ssize_t nbytes) noexcept:
    """The bytes that a value takes in the ring, with its head."""
    return (sizeof(frt_fifo_head) + nbytes + 7) & ~<uint64_t>7


def write_segment(room):
    """Make the writable bytes of a new object an empty segment."""
    cdef Py_buffer view
    cdef frt_fifo_segment *segment
    PyObject_GetBuffer(room, &view, PyBUF_WRITABLE)
    try:
        if <size_t>view.len < sizeof(frt_fifo_segment) + 64 or view.len % 8:
            raise ValueError(f"a segment cannot have {view.len} bytes; it needs at least "
                             f"{sizeof(frt_fifo_segment) + 64}, and a multiple of 8")
        segment = <frt_fifo_segment *>view.buf
        memset(segment, 0, sizeof(frt_fifo_segment))
        segment.magic = FRT_FIFO_MAGIC
        segment.capacity = view.len - sizeof(frt_fifo_segment)
    finally:
        PyBuffer_Release(&view)


def write_root(room, uint64_t most, Ref segment):
    """Make the writable bytes of a new object the root of an empty queue for `most` values (0: no limit)."""
    cdef Py_buffer view
    cdef frt_fifo *q
    PyObject_GetBuffer(room, &view, PyBUF_WRITABLE)
    try:
        if <size_t>view.len != sizeof(frt_fifo):
            raise ValueError(f"{view.len} bytes; the root of a queue has {sizeof(frt_fifo)}")
        q = <frt_fifo *>view.buf
        memset(q, 0, sizeof(frt_fifo))
        if frt_lock_init(&q.lock) != 0:
            raise OSError("the queue's lock cannot be initialised")
        q.magic, q.most = FRT_FIFO_MAGIC, most
        q.state.head_in.objref = q.state.tail_in.objref = segment.objref
        q.state.head_in.index = q.state.tail_in.index = segment.index
    finally:
        PyBuffer_Release(&view)


cdef class Fifo:
    """One process's handle on a queue.

    Args:
        client: this process's attachment.
        root: the root object's bytes.
    Raises:
        FastrtError: the object is not a queue.
    """

    def __cinit__(self, Client client, Pin root):
        client.ensure()
        self.client, self.root, self.left = client, root, []
        if root.nbytes != sizeof(frt_fifo) or (<uint64_t>root.data) & 63:
            raise FastrtError("this object is not a queue")
        self.q = <frt_fifo *>self._writable(root)
        if self.q.magic != FRT_FIFO_MAGIC:
            raise FastrtError("this object is not a queue")

    cdef char *_writable(self, Pin pin) except NULL:
        """The address of a pin's bytes in the read-write mapping."""
        cdef frt_ctx *x = &self.client.x
        return x.base + (pin.data - <const char *>x.view)

    cdef frt_fifo_segment *_segment(self, Pin pin) except NULL:
        cdef frt_fifo_segment *segment = <frt_fifo_segment *>self._writable(pin)
        if segment.magic != FRT_FIFO_MAGIC or segment.capacity != pin.nbytes - sizeof(frt_fifo_segment):
            check(FRT_CORRUPT)
        return segment

    cdef int _lock(self) except -1:
        cdef int rc
        self.client.ensure()
        rc = frt_lock_take(&self.q.lock)
        if rc == FRT_LOCK_ORPHANED:
            frt_fifo_redo(self.q)
            frt_lock_mend(&self.q.lock)
        elif rc != FRT_LOCKED:
            check(rc)
        return 0

    def place(self, bint tail):
        """The name (objref, index) of the segment that is filled (`tail`) or drained now."""
        cdef frt_fifo_name name
        self._lock()
        name = self.q.state.tail_in if tail else self.q.state.head_in
        frt_lock_give(&self.q.lock)
        return name.objref, name.index

    def use(self, bint tail, uint64_t objref, uint32_t index, Pin segment):
        """Fill (`tail`) or drain a segment from now on."""
        self._segment(segment)
        self._lock()
        if tail:
            self.tail_pin, self.tail_in.objref, self.tail_in.index = segment, objref, index
        else:
            self.head_pin, self.head_in.objref, self.head_in.index = segment, objref, index
        frt_lock_give(&self.q.lock)

    def put(self, value):
        """Put a scalar, or bytes or text.

        Returns:
            OK; FULL: the queue has its most values; GROW: no room, make a larger segment; MOVED: `use` the segment at
            `place(True)` first; CLOSED; None when the value is of another type.
        """
        cdef uint16_t kind = 0
        cdef Py_ssize_t n = scalar_size(value, &kind)
        return None if n < 0 else self._put(value, kind, NULL, n)

    def put_bytes(self, uint32_t kind, bytes data):
        """Put an encoded value; `kind` is a number from 16 on. Returns as `put`."""
        return self._put(None, kind, data, len(data))

    cdef int _put(self, object value, uint32_t kind, const char *data, Py_ssize_t nbytes) except -1:
        cdef frt_fifo *q = self.q
        cdef frt_fifo_segment *segment
        cdef frt_fifo_head *head
        cdef uint64_t at, rest, used, wanted = _whole(nbytes)
        if nbytes >= 1 << 31:
            return 2  # GROW
        self._lock()
        try:
            if q.closed:
                return 4
            if q.most and q.state.nput - q.state.ngot >= q.most:
                return 1
            if self.tail_pin is None or not _same(&q.state.tail_in, &self.tail_in):
                return 3
            segment = self._segment(self.tail_pin)
            used = q.state.tail - (q.state.head if _same(&q.state.head_in, &q.state.tail_in) else 0)
            if used > segment.capacity:
                check(FRT_CORRUPT)
            at = q.state.tail % segment.capacity
            rest = segment.capacity - at
            if wanted + (0 if wanted <= rest else rest) > segment.capacity - used:
                return 2
            q.plan = q.state
            if wanted > rest:
                (<frt_fifo_head *>(<char *>(segment + 1) + at)).bytes = FRT_FIFO_FILLER
                q.plan.tail += rest
                at = 0
            head = <frt_fifo_head *>(<char *>(segment + 1) + at)
            head.bytes, head.kind = <uint32_t>nbytes, kind
            if data != NULL:
                memcpy(head + 1, data, nbytes)
            else:
                scalar_write(value, <uint16_t>kind, <char *>(head + 1), nbytes)
            q.plan.tail += wanted
            q.plan.nput += 1
            frt_fifo_commit(q)
            a32_add_sc(&q.puts, 1)
        finally:
            frt_lock_give(&q.lock)
        if a32_load_sc(&q.getters):
            frt_futex_wake_one(&q.puts)
        return 0

    def get(self):
        """Take the oldest value.

        Returns:
            (kind, value): for a kind below 16 (a scalar) the value itself, otherwise its bytes; None when the queue is
            empty; MOVED: `use` the segment at `place(False)` first; CLOSED.
        """
        cdef frt_fifo *q = self.q
        cdef frt_fifo_segment *segment
        cdef frt_fifo_head *head
        cdef uint64_t at, end
        cdef object value
        cdef uint32_t kind
        self._lock()
        try:
            if q.closed:
                return 4
            if self._follow_segments():
                return 3
            if q.state.nput == q.state.ngot:
                return None
            segment = self._segment(self.head_pin)
            end = q.state.tail if _same(&q.state.head_in, &q.state.tail_in) else segment.end
            q.plan = q.state
            at = q.state.head % segment.capacity
            head = <frt_fifo_head *>(<char *>(segment + 1) + at)
            if head.bytes == FRT_FIFO_FILLER:
                q.plan.head += segment.capacity - at
                at = 0
                head = <frt_fifo_head *>(segment + 1)
            q.plan.head += _whole(head.bytes)
            if at + _whole(head.bytes) > segment.capacity or q.plan.head > end:
                check(FRT_CORRUPT)
            kind = head.kind
            if kind < KIND_SCALARS_END:
                value = scalar_read(<uint16_t>kind, <const char *>(head + 1), head.bytes)
            else:
                value = (<const char *>(head + 1))[:head.bytes]
            q.plan.ngot += 1
            frt_fifo_commit(q)
            a32_add_sc(&q.gets, 1)
        finally:
            frt_lock_give(&q.lock)
        if a32_load_sc(&q.putters):
            frt_futex_wake_one(&q.gets)
        return kind, value

    cdef int _follow_segments(self) except -1:
        """Under the lock: go on to the next segment if this one is drained. 1: this process has not pinned it."""
        cdef frt_fifo *q = self.q
        cdef frt_fifo_segment *segment
        while True:
            if self.head_pin is None or not _same(&q.state.head_in, &self.head_in):
                return 1
            if _same(&q.state.head_in, &q.state.tail_in):
                return 0
            segment = self._segment(self.head_pin)
            if q.state.head < segment.end:
                return 0
            q.plan = q.state
            q.plan.head_in, q.plan.head = segment.next, 0
            frt_fifo_commit(q)
            self.left.append(self.head_in.objref)

    def drained(self):
        """The objrefs of segments that this process has drained since the last call; they are not needed any more."""
        left, self.left = self.left, []
        return left

    def grow(self, Ref segment):
        """Fill a new, empty segment from now on.

        Returns:
            False when another process has replaced the segment meanwhile.
        """
        cdef frt_fifo *q = self.q
        cdef frt_fifo_segment *old
        self._lock()
        try:
            if self.tail_pin is None or not _same(&q.state.tail_in, &self.tail_in):
                return False
            old = self._segment(self.tail_pin)
            old.next.objref, old.next.index, old.end = segment.objref, segment.index, q.state.tail
            q.plan = q.state
            q.plan.tail_in, q.plan.tail = old.next, 0
            frt_fifo_commit(q)
            return True
        finally:
            frt_lock_give(&q.lock)

    def capacity(self):
        """Bytes of the ring that this process fills."""
        return 0 if self.tail_pin is None else self._segment(self.tail_pin).capacity

    def room(self):
        """How many more values fit; -1: no limit."""
        cdef int64_t left
        self._lock()
        left = <int64_t>(self.q.most - (self.q.state.nput - self.q.state.ngot)) if self.q.most else -1
        frt_lock_give(&self.q.lock)
        return left

    def size(self):
        """The queue's state: (values in it, most values or 0, whether it is closed)."""
        cdef uint64_t count
        self._lock()
        count = self.q.state.nput - self.q.state.ngot
        frt_lock_give(&self.q.lock)
        return count, self.q.most, self.q.closed != 0

    def close(self):
        """Close the queue: no put or get succeeds any more, and all sleepers wake."""
        self._lock()
        a32_store_sc(&self.q.closed, 1)
        a32_add_sc(&self.q.puts, 1)
        a32_add_sc(&self.q.gets, 1)
        frt_lock_give(&self.q.lock)
        frt_futex_wake(&self.q.puts)
        frt_futex_wake(&self.q.gets)

    def wait_item(self, double timeout_s):
        """Sleep while the queue is empty: until a put, the timeout, or the end of a nap. The caller checks again."""
        cdef uint32_t seen = a32_load_sc(&self.q.puts)
        count, _, closed = self.size()
        if count == 0 and not closed:
            self._wait(&self.q.puts, &self.q.getters, seen, timeout_s)

    def wait_room(self, double timeout_s):
        """Sleep while the queue is full: until a get, the timeout, or the end of a nap. The caller checks again."""
        cdef uint32_t seen = a32_load_sc(&self.q.gets)
        count, most, closed = self.size()
        if most and count >= most and not closed:
            self._wait(&self.q.gets, &self.q.putters, seen, timeout_s)

    def wait_get(self, double timeout_s):
        """Sleep until a get, the timeout, or the end of a nap."""
        self._wait(&self.q.gets, &self.q.putters, a32_load_sc(&self.q.gets), timeout_s)

    cdef int _wait(self, uint32_t *word, uint32_t *sleepers, uint32_t seen, double timeout_s) except -1:
        cdef int64_t nap = <int64_t>(min(max(timeout_s, 0.0), 1.0) * 1e9)
        with nogil:
            # A putter changes the word and then reads the sleepers; here it is the other way round.
            a32_add_sc(sleepers, 1)
            if a32_load_sc(word) == seen:
                frt_futex_wait(word, seen, nap if nap < NAP_NS else NAP_NS)
            a32_sub_sc(sleepers, 1)
        PyErr_CheckSignals()
        self.client.ensure()
        return 0
