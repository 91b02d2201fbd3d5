# cython: language_level=3, freethreading_compatible=True
"""Generators: a task that yields puts its items into a stream, and readers take them while it still runs.

Producer and readers share the stream's list in the arena (`stream_items`): an item costs a put and the links lock
twice, and a wake only when a reader sleeps. The task's only result is the end of the stream.
"""
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.wait cimport wait_nap, wait_spin_on
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.objects cimport *
from fastrt._core.objects.references cimport links_add_item, links_take_item, task_is_mine, task_result
from fastrt._core.objects.scalar cimport scalar_size, scalar_write
from fastrt.errors import FastrtError

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    PyObject *PyIter_Next(object) except? NULL

STREAM = FRT_TASK_STREAM
# The readers' wishes, for `Producer.wanted`.
NOTHING, END, ITEMS = 0, 1, 2
cdef uint32_t _ELSEWHERE = 0xffffffff
ELSEWHERE = _ELSEWHERE  # the limit of a stream that is filled with another node's items, until it is closed

cdef enum:
    KIND_STREAM = 15  # never read as a value
    NOTICE_NS = 50000000
    SPINS_PER_LOOK = 32
    NO_STREAM = 0xFFFFFFFF
    ITEMS_PER_LOOK = 64  # between two looks at signals, and at other threads that want to run


def create(Client client, uint32_t limit, uint64_t produced=0):
    """Make a stream without items.

    Args:
        limit: unread items from which on its task waits; 0: it never waits.
        produced: how many items an earlier attempt has produced on another node; all of them were read.
    Returns:
        A reference to the stream, for `submit` and for readers.
    Raises:
        ObjectStoreFullError: the table of objects is full.
    """
    cdef frt_ctx *x = &client.x
    cdef int i
    client.ensure()
    i = check(object_new(x))
    memset(x.entries[i].inlined, 0, sizeof(frt_stream))
    frt_stream_of(x, i).limit = limit
    frt_stream_of(x, i).head, frt_stream_of(x, i).produced = produced << 32, produced
    x.entries[i].bytes, x.entries[i].kind = sizeof(frt_stream), KIND_STREAM
    x.entries[i].flags = FRT_ENTRY_STREAM
    object_seal_new(x, i)
    return ref_wrap(client, i)


# ---- the reader's side ----

cdef frt_stream *generator_stream(Client client, Ref stream) except NULL:
    client.ensure()
    ref_use(client, stream)
    if not client.x.entries[stream.index].flags & FRT_ENTRY_STREAM:
        raise FastrtError(f"{stream!r} is no stream's")
    return frt_stream_of(&client.x, stream.index)


cdef void generator_tell(frt_ctx *x, uint32_t stream) noexcept nogil:
    """Wake readers that sleep."""
    if frt_any(x, stream, FRT_WAITS):
        object_tell(x, stream)


def take(Client client, Ref stream, Ref end, timeout_s, double spin_s):
    """Take the next item of a stream.

    Args:
        stream, end: references to it, and to its task's result.
        timeout_s: how long to wait for one, in seconds; None: no limit.
        spin_s: how much of it to spend spinning.
    Returns:
        A reference to the item; `end` when the stream has ended with an error, None when it has ended without one;
        False after the timeout.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_stream *s = generator_stream(client, stream)
    cdef int64_t now, deadline, spin
    cdef bint over
    cdef int i, rc
    ref_use(client, end)
    deadline = 1 << 62
    if timeout_s is not None:
        deadline = frt_now_ns() + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9) if timeout_s else 0
    spin = <int64_t>(spin_s * 1e9)
    while True:
        over = _is_over(x, s, end.index)  # before the look at the list: the last item came before that
        i = _take(x, stream.index)
        if i >= 0:
            return ref_wrap(client, i)
        if i != FRT_NOT_FOUND:
            check(i)
        if over:
            return end if x.entries[end.index].flags & FRT_ENTRY_ERROR else None
        if s.limit == _ELSEWHERE:
            a64_or_sc(frt_mine(x, stream.index, FRT_WAITS), x.me_bit)  # the uplink fetches what a reader awaits
        now = frt_now_ns()
        if now >= deadline and not spin:
            return False
        with nogil:
            rc = _wait_item(x, s, stream.index, end.index, min(deadline, now + NOTICE_NS), spin)
        spin = 0
        if rc != FRT_OK:
            PyErr_CheckSignals()
            client.ensure()
            if rc == FRT_CORRUPT:
                check(rc)


cdef int _take(frt_ctx *x, uint32_t s) except -100:
    """Take the first item, if there is one, with a hold of this process: its entry, or a negative code."""
    cdef frt_stream *stream = frt_stream_of(x, s)
    cdef uint64_t head
    cdef uint32_t i
    cdef uint32_t left = x.objects_max
    cdef int rc
    while left:
        head = a64_load_sc(&stream.head)
        if <uint32_t>head == 0:
            return FRT_NOT_FOUND
        i = <uint32_t>head - 1
        # Held first, taken second: another reader may take it meanwhile, and the entry be used again. The head decides.
        if object_acquire(x, i, a64_load_rlx(&x.entries[i].objref) if i < x.objects_max else 0, False) != FRT_OK:
            left -= 1
            continue
        rc = links_take_item(x, s, head)
        if rc == FRT_OK:
            if frt_any(x, s, FRT_WAITS):
                object_tell(x, s)
            return <int>i
        object_release(x, i, False)
        if rc != FRT_NOT_FOUND:
            return rc
    return frt_broken(x, "the list of a stream's items begins with one that is not there")


cdef int _wait_item(frt_ctx *x, frt_stream *stream, uint32_t s, uint32_t end, int64_t deadline,
                    int64_t spin) noexcept nogil:
    """Wait until there is an item, or the stream has ended: FRT_OK, FRT_TIMEOUT or FRT_INTERRUPTED."""
    cdef int64_t started = frt_now_ns()
    cdef uint32_t seen
    cdef int _k
    if spin:
        while wait_spin_on(started, spin):
            for _k in range(SPINS_PER_LOOK):
                if <uint32_t>a64_load_sc(&stream.head) or _is_over(x, stream, end):
                    return FRT_OK
                a_relax()
    seen = a32_load_sc(&x.clients[x.me].wake)
    a64_or_sc(frt_mine(x, s, FRT_WAITS), x.me_bit)
    a64_or_sc(frt_mine(x, end, FRT_WAITS), x.me_bit)
    if <uint32_t>a64_load_sc(&stream.head) or _is_over(x, stream, end):
        return FRT_OK
    return wait_nap(x, seen, deadline)


cdef inline bint _is_over(frt_ctx *x, frt_stream *stream, uint32_t end) noexcept nogil:
    """Return whether no more items come. The end of another node's stream may arrive before its last items."""
    return object_is_sealed(x, end) and a32_load_sc(&stream.limit) != _ELSEWHERE


def is_ready(Client client, Ref stream, Ref end):
    """Return whether `take` would not have to wait."""
    cdef frt_stream *s = generator_stream(client, stream)
    ref_use(client, end)
    return <uint32_t>a64_load_sc(&s.head) != 0 or _is_over(&client.x, s, end.index)


def wait_some(Client client, list things, Py_ssize_t num_returns, timeout_s, double spin_s):
    """Wait until so many of some references and streams are ready, or until the timeout.

    Args:
        things: Refs, and pairs as `take` has them, of streams: these are ready when `take` would not have to wait.
        num_returns: from 1 to len(things).
        timeout_s: seconds; None: no limit.
        spin_s: how much of it to spend spinning before sleeping.
    Returns:
        The numbers of the first `num_returns` of `things` that are ready; fewer after the timeout.
    """
    cdef frt_ctx *x = &client.x
    cdef Py_ssize_t k
    cdef uint32_t n = <uint32_t>len(things)
    cdef uint32_t want = <uint32_t>num_returns
    cdef int64_t now, deadline, spin = <int64_t>(spin_s * 1e9)
    cdef uint32_t *all_of
    cdef list ready
    cdef int rc
    client.ensure()
    things = things[:]  # keeps them; another thread may change the caller's list while we sleep
    deadline = 1 << 62
    if timeout_s is not None:
        deadline = frt_now_ns() + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
    all_of = <uint32_t *>malloc(2 * len(things) * sizeof(uint32_t))
    if all_of == NULL:
        raise MemoryError()
    try:
        for k in range(len(things)):
            _note(client, things[k], all_of + 2 * k)
        while True:
            ready = [k for k in range(len(things)) if _is_ready(x, all_of + 2 * k)][:num_returns]
            now = frt_now_ns()
            if len(ready) == num_returns or timeout_s == 0 or now >= deadline:
                return ready
            with nogil:
                rc = _wait_some(x, all_of, n, want, min(deadline, now + spin + NOTICE_NS), spin)
            spin = 0
            PyErr_CheckSignals()
            client.ensure()
            if rc == FRT_CORRUPT:
                check(rc)
    finally:
        free(all_of)


cdef int _note(Client client, thing, uint32_t *at) except -1:
    """Write down which entries to look at: two for a stream."""
    cdef Ref ref
    if isinstance(thing, tuple):
        generator_stream(client, thing[0])
        at[0] = (<Ref>thing[0]).index
        ref = thing[1]
    else:
        at[0] = NO_STREAM
        ref = thing
    ref_use(client, ref)
    at[1] = ref.index
    return 0


cdef inline bint _is_ready(frt_ctx *x, const uint32_t *at) noexcept nogil:
    if at[0] != NO_STREAM and <uint32_t>a64_load_sc(&frt_stream_of(x, at[0]).head) != 0:
        return True
    return frt_word_state(a64_load_sc(frt_state(x, at[1]))) > FRT_OBJ_PENDING


cdef uint32_t _count_ready(frt_ctx *x, const uint32_t *all_of, uint32_t n, uint32_t want, bint mark) noexcept nogil:
    """Count the ready ones, up to `want`; with `mark`, ask the others to wake this client."""
    cdef uint32_t k, ready = 0
    cdef const uint32_t *at
    for k in range(n):
        at = all_of + 2 * k
        if mark and not _is_ready(x, at):
            if at[0] != NO_STREAM:
                a64_or_sc(frt_mine(x, at[0], FRT_WAITS), x.me_bit)
            a64_or_sc(frt_mine(x, at[1], FRT_WAITS), x.me_bit)
        ready += _is_ready(x, at)
        if ready == want:
            break
    return ready


cdef int _wait_some(frt_ctx *x, const uint32_t *all_of, uint32_t n, uint32_t want, int64_t deadline,
                    int64_t spin) noexcept nogil:
    """Wait until `want` are ready: FRT_OK, FRT_TIMEOUT or FRT_INTERRUPTED."""
    cdef int64_t started = frt_now_ns()
    cdef uint32_t seen
    cdef int rc
    if spin:
        while wait_spin_on(started, spin):
            if _count_ready(x, all_of, n, want, False) == want:
                return FRT_OK
            a_relax()
    while True:
        seen = a32_load_sc(&x.clients[x.me].wake)
        if _count_ready(x, all_of, n, want, True) == want:
            return FRT_OK
        rc = wait_nap(x, seen, deadline)
        if rc != FRT_OK:
            return FRT_OK if _count_ready(x, all_of, n, want, False) == want else rc


def is_stream(Client client, Ref ref):
    """Return whether an object is a stream."""
    client.ensure()
    ref_use(client, ref)
    return client.x.entries[ref.index].flags & FRT_ENTRY_STREAM != 0


def info(Client client, Ref stream):
    """Return a stream's counts: {taken, produced, limit, unread}; all but `produced` modulo 2^32."""
    cdef frt_stream *s = generator_stream(client, stream)
    cdef uint64_t head = a64_load_sc(&s.head)
    return {"taken": <uint32_t>(head >> 32), "produced": s.produced, "limit": s.limit,
            "unread": <uint32_t>s.produced - <uint32_t>(head >> 32)}


# ---- the task's side ----

cdef class Producer:
    """Fills the stream of a task that this client runs.

    Attributes:
        skip: how many more items to leave out, because an earlier attempt has produced them.

    Args:
        client: which runs the task.
        task: its index.
    """

    def __init__(self, Client client, uint32_t task):
        cdef frt_body body
        cdef frt_refslot slot
        cdef uint32_t most
        client.ensure()
        if not task_is_mine(&client.x, task) or not client.x.tasks[task].flags & FRT_TASK_STREAM:
            raise FastrtError(f"task {task} is not this client's to run, or has no stream")
        if not frt_task_body(&client.x, task, &body) or body.nrefs == 0:
            check(FRT_CORRUPT)
        slot = body.refs[body.nrefs - 1]
        most = frt_objects(&client.x)
        if slot.index >= most or not client.x.entries[slot.index].flags & FRT_ENTRY_STREAM:
            check(FRT_CORRUPT)
        self.client, self.task, self.index = client, task, slot.index
        self.stream = frt_stream_of(&client.x, slot.index)
        self.skip = self.stream.produced

    cdef int _check(self) except -1:
        self.client.ensure()
        if not task_is_mine(&self.client.x, self.task):
            raise FastrtError(f"task {self.task} is not this client's any more")
        return 0

    @property
    def wanted(self):
        """ITEMS while a reader can take them, END while only the task's result is referenced, else NOTHING."""
        self._check()
        return _wanted(self)

    @property
    def full(self):
        """Whether the number of unread items has reached the limit: the task should wait."""
        self._check()
        return _full(self)

    @property
    def taken(self):
        """The number of items that were taken, modulo 2^32."""
        self._check()
        return <uint32_t>(a64_load_sc(&self.stream.head) >> 32)

    @property
    def read(self):
        """The number of items that were read, modulo 2^32: `taken`, less those that are on the way to another node."""
        self._check()
        return <uint32_t>(a64_load_sc(&self.stream.head) >> 32) - a32_load_sc(&self.stream.away)

    @property
    def limit(self):
        """The number of unread items from which on the task waits; 0: it never waits."""
        self._check()
        return self.stream.limit

    def skips(self):
        """Return whether an earlier attempt has produced the next item, and count it as skipped."""
        if self.skip == 0:
            return False
        self.skip -= 1
        return True

    def add(self, value):
        """Add a scalar; False when the value is of another kind (nothing happened).

        Raises:
            ObjectStoreFullError: there is no room.
        """
        self._check()
        return _add(self, value)

    def add_ref(self, Ref ref):
        """Add a value that has been put already."""
        self._check()
        ref_use(self.client, ref)
        check(links_add_item(&self.client.x, self.index, ref.index))
        _tell(self)

    def wait(self, timeout_s, double spin_s):
        """Wait for room, or until there are no readers; False after the timeout (None: no limit)."""
        self._check()
        return _wait_room(self, timeout_s, spin_s)

    def run(self, iterator, put, wait):
        """Add all items of an iterator.

        It ends early, and closes the iterator, when neither items nor the result are wanted any more. Items that no
        reader can take are not kept.

        Args:
            iterator: its items.
            put: called with an item that is no scalar, or found no room; it must add the item.
            wait: called where there is no room; it must return when there is room, or no reader any more.
        Raises:
            Exception: what the iterator raises.
        """
        cdef PyObject *got
        cdef object item
        cdef uint32_t count = 0
        cdef int wanted
        while True:
            wanted = _wanted(self)
            if wanted == 0:
                if hasattr(iterator, "close"):
                    iterator.close()
                return
            got = PyIter_Next(iterator)
            if got == NULL:
                return
            item = <object>got
            Py_XDECREF(got)
            if self.skip:
                self.skip -= 1
                continue
            if wanted == 2:
                if not _add_soon(self, item):
                    put(item)
                if self.stream.limit and _full(self):
                    wait()
            item = None
            count += 1
            if count % ITEMS_PER_LOOK == 0:
                PyErr_CheckSignals()
                self._check()
                with nogil:
                    pass


cdef int _wanted(Producer self) noexcept:
    """Return the wishes of all readers, on this node and on others."""
    cdef int here = _wanted_here(self)
    cdef uint32_t elsewhere = a32_load_sc(&self.stream.elsewhere)
    return here if elsewhere == 0 or here < <int64_t>elsewhere - 1 else <int>elsewhere - 1


cdef int _wanted_here(Producer self) noexcept:
    """Return the wishes of the readers on this node, by the references that they hold."""
    cdef frt_ctx *x = &self.client.x
    cdef int end
    # The task itself counts once.
    if frt_any(x, self.index, FRT_REFS) or a32_load_sc(&x.entries[self.index].counted) > 1:
        return 2
    end = task_result(x, self.task, 0)
    if end >= 0 and (frt_any(x, <uint32_t>end, FRT_REFS) or a32_load_sc(&x.entries[end].counted) != 0):
        return 1
    return 0


cdef bint _full(Producer self) noexcept nogil:
    cdef uint32_t unread = <uint32_t>self.stream.produced - <uint32_t>(a64_load_sc(&self.stream.head) >> 32)
    unread += a32_load_sc(&self.stream.away)
    return self.stream.limit != 0 and unread >= self.stream.limit


cdef void _tell(Producer self) noexcept nogil:
    """Wake readers that sleep."""
    generator_tell(&self.client.x, self.index)


cdef bint _add_soon(Producer self, object value) except -1:
    try:
        return _add(self, value)
    except MemoryError:
        return False  # the caller waits for room


cdef bint _add(Producer self, object value) except -1:
    cdef frt_ctx *x = &self.client.x
    cdef uint16_t kind = 0
    cdef Py_ssize_t n = scalar_size(value, &kind)
    cdef int i, rc = FRT_OK
    cdef char *room
    if n < 0:
        return False
    i = check(object_new(x))
    room = object_room(x, i, n, 0, &rc)
    if room != NULL:
        scalar_write(value, kind, room, n)
        x.entries[i].kind = kind
        rc = links_add_item(x, self.index, i)
    if rc != FRT_OK:
        object_discard(x, i)
        check(rc)
    _tell(self)
    return True


cdef bint _wait_room(Producer self, timeout_s, double spin_s) except -1:
    """Wait until the stream is not full, or items are not wanted any more; False after the timeout."""
    cdef int64_t now = frt_now_ns()
    cdef int64_t deadline = 1 << 62
    cdef int64_t spin = <int64_t>(spin_s * 1e9)
    cdef int rc
    if timeout_s is not None:
        deadline = now + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
    while _full(self) and _wanted(self) == 2:
        if now >= deadline:
            return False
        with nogil:
            rc = _nap_full(self, min(deadline, now + NOTICE_NS), spin)
        spin = 0
        now = frt_now_ns()
        PyErr_CheckSignals()
        self._check()
        if rc == FRT_CORRUPT:
            check(rc)
    return True


cdef int _nap_full(Producer self, int64_t deadline, int64_t spin) noexcept nogil:
    cdef frt_ctx *x = &self.client.x
    cdef int64_t started = frt_now_ns()
    cdef uint32_t seen
    cdef int _k
    if spin:
        while wait_spin_on(started, spin):
            for _k in range(SPINS_PER_LOOK):
                if not _full(self):
                    return FRT_OK
                a_relax()
    seen = a32_load_sc(&x.clients[x.me].wake)
    a64_or_sc(frt_mine(x, self.index, FRT_WAITS), x.me_bit)
    return wait_nap(x, seen, deadline) if _full(self) else FRT_OK
