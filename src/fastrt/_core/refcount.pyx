# cython: language_level=3
"""The scheduler's reference counts: of references that it made itself, dense from 0, their aliases and contents.

An alias and its target are one class. The class is canonical by the reference where its chain of aliases ends, which
is known once that one is ready. A class lives while any member has a count (a client's) or a hold (the scheduler's:
one for a producer to come, one per delivery in flight). When none has, all members are deallocated at once; then what
they contained is decremented, and so on down, by a list through the dead entries: depth and length cost no stack and
no memory.

A batch of changes is carried out whole or not at all. Large ones release the GIL; the table's lock is held over C
code only, never while a Python object is made, since that may run a finalizer which comes back here.

Invariants: the fields of all references exist; chains of aliases end, and only their ends may be
ready; the members of a class are in one ring and die together; a dead one never comes back; a class that lives has a
member that does.

Source: the scheduler of early Ray (ray-legacy, `reference_counts_` and its neighbours), with the two later repairs:
an object whose producer is to come, or that is on its way to a store, is not deallocated.
"""
from array import array

from fastrt.errors import ReferenceCountError

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_release_lock, WAIT_LOCK,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from fastrt._core.batch cimport Batch

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void *) noexcept nogil

cdef enum:
    # Below this a batch takes less time than giving the GIL away and taking it back.
    GIL_FREE_MIN = 2048
    # How far ahead of the reference being counted its count is fetched: in random order it is far from the last one.
    AHEAD = 24
    NOT_YET = -1

cdef enum:
    OK, UNKNOWN_REF, FREED_REF, BELOW_ZERO, ALIASED, READY, CIRCULAR, FULL, UNCOUNTED, NO_HOLD, NO_MEMORY

UNKNOWN = NIL
FREED = NIL

_KINDS = ("", "unknown", "freed", "negative", "aliased", "ready", "circular", "contained", "uncounted", "negative")
_WORDS = (
    "",
    "Reference {0} is unknown: {1} were made here, numbered from 0.",
    "Reference {0} is deallocated: its counts reached zero. Increment a reference before its last count is dropped.",
    "Reference {0} has no counts left to drop. Each decrement must match an increment, or the first count.",
    "Reference {0} is an alias of {2} already, and stays that.",
    "Reference {0} is an object of its own already, and cannot become an alias.",
    "Reference {0} would become an alias of itself.",
    "Reference {0} has its contents already; name all contained references in one call.",
    "Reference {0} is named as contained but has no count. Increment contained references before naming them.",
    "Reference {0} has no hold to release.",
)


cdef inline int enter(RefTable table) noexcept:
    """Lock the table, giving the GIL away only where another thread has it."""
    if not PyThread_acquire_lock(table.lock, NOWAIT_LOCK):
        with nogil:
            PyThread_acquire_lock(table.lock, WAIT_LOCK)
    return 0


cdef inline void leave(RefTable table) noexcept:
    PyThread_release_lock(table.lock)


cdef class RefTable:
    """Counts, aliases and contents of references. May be used by several threads.

    Raises:
        ReferenceCountError: by every method that changes something, when it cannot; then nothing is changed.
    """

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no lock for a table of references")

    def __dealloc__(self):
        cdef uint64_t r
        for r in range(self.length):
            free(self.contents_of[r])
        free(self.count_of)
        free(self.hold_of)
        free(self.target_of)
        free(self.parent_of)
        free(self.next_of)
        free(self.live_of)
        free(self.end_of)
        free(<void *>self.contents_of)
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    def __len__(self):
        """How many references were ever made here."""
        return self.length

    @property
    def alive(self):
        """How many references are not deallocated."""
        return self.length - self.freed_count

    @property
    def dangling(self):
        """How often a deallocated object contained a reference that nobody counted any more: a client's mistake."""
        return self.dangling_count

    cpdef uint64_t add(self, uint64_t n=1, uint64_t count=1, bint pending=True) except? 0:
        """Make references; returns the first.

        Args:
            n: how many, one after the other.
            count: what each is counted to begin with.
            pending: hold each until it is ready, becomes an alias, or is abandoned.
        Raises:
            ValueError: neither counted nor pending, they would be deallocated at once.
        """
        cdef uint64_t first, r
        if (count == 0 and not pending) or count >= NIL >> 1 or n >= NIL >> 8:
            raise ValueError(f"Cannot make {n} references counted {count} each.")
        enter(self)
        first = self.length
        try:
            self.grow(first + n)
        except MemoryError:
            leave(self)
            raise
        for r in range(first, first + n):
            self.count_of[r], self.hold_of[r] = count, PENDING if pending else 0
            self.target_of[r], self.parent_of[r], self.next_of[r] = NIL, r, r
            self.live_of[r], self.end_of[r], self.contents_of[r] = 1, r, NULL
        self.length = first + n
        leave(self)
        return first

    cpdef increment(self, refs):
        """Count each reference once more; one named twice, twice.

        Args:
            refs: a NumPy array or other buffer of 64-bit integers (not copied), or any iterable of ints.
        """
        cdef Batch batch = Batch(refs)
        cdef uint64_t bad = 0
        cdef int failed
        enter(self)
        if batch.n < GIL_FREE_MIN:
            failed = self.increment_all(batch.refs, batch.n, &bad)
        else:
            with nogil:
                failed = self.increment_all(batch.refs, batch.n, &bad)
        leave(self)
        if failed != OK:
            self.fail(failed, bad)

    cpdef list decrement(self, refs):
        """Count each reference once less; one named twice, twice.

        Returns:
            All references deallocated by it, classes one after the other, each from its end on.
        """
        cdef Batch batch = Batch(refs)
        cdef uint64_t bad = 0, head = NIL
        cdef int failed
        cdef uint64_t *zeros = <uint64_t *>malloc(max(batch.n, 1) * sizeof(uint64_t))
        if zeros == NULL:
            raise MemoryError(f"no memory to drop {batch.n} references")
        enter(self)
        if batch.n < GIL_FREE_MIN:
            failed = self.decrement_all(batch.refs, batch.n, zeros, &head, &bad)
        else:
            with nogil:
                failed = self.decrement_all(batch.refs, batch.n, zeros, &head, &bad)
        leave(self)
        free(zeros)
        if failed != OK:
            self.fail(failed, bad)
        return self.listed(head)

    cpdef hold(self, uint64_t ref):
        """Keep a reference alive for a delivery."""
        enter(self)
        cdef int failed = self.seen(ref)
        if failed == OK:
            if self.count_of[ref] == 0 and self.hold_of[ref] == 0:
                self.live_of[self.find(ref)] += 1
            self.hold_of[ref] += 1
        leave(self)
        if failed != OK:
            self.fail(failed, ref)

    cpdef list release(self, uint64_t ref):
        """End one `hold`; returns what was deallocated, as `decrement` does."""
        enter(self)
        cdef uint64_t head = NIL
        cdef int failed = self.seen(ref)
        if failed == OK and self.hold_of[ref] & ~PENDING == 0:
            failed = NO_HOLD
        if failed == OK:
            self.hold_of[ref] -= 1
            if self.hold_of[ref] == 0 and self.count_of[ref] == 0:
                head = self.drop(&ref, 1)
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return self.listed(head)

    cpdef list ready(self, uint64_t ref):
        """The object of this reference exists: it is canonical, and waits for no producer any more.

        Returns:
            What was deallocated, as `decrement` does: the reference itself when nobody counts it.
        """
        enter(self)
        cdef uint64_t head = NIL
        cdef int failed = self.seen(ref)
        if failed == OK and self.target_of[ref] != NIL and self.target_of[ref] != ref:
            failed = ALIASED
        if failed == OK:
            self.target_of[ref] = ref
            if self.hold_of[ref] & PENDING:
                self.hold_of[ref] &= ~PENDING
                if self.hold_of[ref] == 0 and self.count_of[ref] == 0:
                    head = self.drop(&ref, 1)
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return self.listed(head)

    def abandon(self, uint64_t ref):
        """No producer is to come any more for this reference. It may become ready all the same, later.

        Returns:
            What was deallocated, as `decrement` does.
        """
        enter(self)
        cdef uint64_t head = NIL
        cdef int failed = self.seen(ref)
        if failed == OK and self.hold_of[ref] & PENDING:
            self.hold_of[ref] &= ~PENDING
            if self.hold_of[ref] == 0 and self.count_of[ref] == 0:
                head = self.drop(&ref, 1)
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return self.listed(head)

    def alias(self, uint64_t alias, uint64_t target):
        """Make a reference that is neither ready nor an alias an alias of another one, in whatever state that is."""
        enter(self)
        cdef uint64_t bad = alias
        cdef int failed = self.seen(alias)
        if failed == OK:
            failed = self.seen(target)
            if failed != OK:
                bad = target
            elif self.target_of[alias] == alias:
                failed = READY
            elif self.target_of[alias] != NIL:
                failed = ALIASED
            else:
                failed = self.merge(alias, target)
        leave(self)
        if failed != OK:
            self.fail(failed, bad)

    def contain(self, uint64_t ref, refs):
        """Say which references the object of this one contains; they are decremented when it is deallocated.

        Args:
            ref: the container.
            refs: the contained ones, as for `increment`; each was counted before for being contained.
        """
        cdef Batch batch = Batch(refs)
        cdef uint64_t bad = ref
        enter(self)
        cdef int failed = self.contain_all(ref, batch.refs, batch.n, &bad)
        leave(self)
        if failed == NO_MEMORY:
            raise MemoryError(f"no memory for {batch.n} contained references")
        if failed != OK:
            self.fail(failed, bad)

    def canonical(self, uint64_t ref):
        """As `canonical_of`, but None while that is not known."""
        cdef int64_t end = self.canonical_of(ref)
        return None if end == NOT_YET else end

    cpdef int64_t canonical_of(self, uint64_t ref) except? -2:
        """The reference whose object this one means; -1 while that is not known.

        Raises:
            ReferenceCountError: the reference is unknown or deallocated.
        """
        enter(self)
        cdef uint64_t end = NIL
        cdef int failed = self.seen(ref)
        if failed == OK:
            end = self.target_of[self.end_of[self.find(ref)]]
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return NOT_YET if end == NIL else <int64_t>end

    cpdef uint64_t end(self, uint64_t ref) except? 0:
        """Where the chain of aliases of this reference ends, whether that is ready or not; itself when it has none.

        Raises:
            ReferenceCountError: the reference is unknown or deallocated.
        """
        enter(self)
        cdef uint64_t end = NIL
        cdef int failed = self.seen(ref)
        if failed == OK:
            end = self.end_of[self.find(ref)]
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return end

    cpdef bint is_alive(self, uint64_t ref) except -1:
        """Whether the reference was made here and is not deallocated."""
        return ref < self.length and self.count_of[ref] != NIL

    cpdef bint is_pending(self, uint64_t ref) except -1:
        """Whether a producer is to come."""
        return ref < self.length and self.count_of[ref] != NIL and self.hold_of[ref] & PENDING != 0

    cpdef list members(self, uint64_t ref):
        """All references of a live reference's class, itself first.

        Raises:
            ReferenceCountError: the reference is unknown or deallocated.
        """
        cdef uint64_t m = ref
        cdef list found = []
        enter(self)
        cdef int failed = self.seen(ref)
        while failed == OK:
            found.append(m)  # an int is not collected, and so runs nobody's code
            m = self.next_of[m]
            if m == ref:
                break
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return found

    def contained(self, uint64_t ref):
        """What the reference was said to contain; nothing once it is deallocated."""
        cdef frt_contents *held
        if ref >= self.length or self.contents_of[ref] == NULL:
            return []
        held = self.contents_of[ref]
        return [held.refs[i] for i in range(held.count)]

    def count(self, uint64_t ref):
        """The count of one reference; `FREED` once it is deallocated.

        Raises:
            ReferenceCountError: the reference is unknown.
        """
        if ref >= self.length:
            self.fail(UNKNOWN_REF, ref)
        return self.count_of[ref]

    def counts(self):
        """A copy of all counts as array('Q'), by reference; `FREED` where deallocated. Holds are not in them."""
        enter(self)
        cdef bytes data = PyBytes_FromStringAndSize(<char *>self.count_of, self.length * 8)
        leave(self)
        return array("Q", data)

    def targets(self):
        """A copy of all targets as array('Q'), by reference: itself where canonical, `UNKNOWN` where not known."""
        enter(self)
        cdef bytes data = PyBytes_FromStringAndSize(<char *>self.target_of, self.length * 8)
        leave(self)
        return array("Q", data)

    cdef int fail(self, int kind, uint64_t ref) except -1:
        """Raise the error of this kind about one reference."""
        target = self.target_of[ref] if ref < self.length else 0
        raise ReferenceCountError(_WORDS[kind].format(ref, self.length, target), _KINDS[kind], ref)

    cdef int grow(self, uint64_t wanted) except -1:
        """Make room for so many references. Half as much again is asked for; untouched, it costs nothing."""
        cdef uint64_t room = max(wanted, self.room + self.room // 2, 64)
        if wanted <= self.room:
            return 0
        self.count_of = <uint64_t *>_more(self.count_of, room * 8)
        self.hold_of = <uint32_t *>_more(self.hold_of, room * 4)
        self.target_of = <uint64_t *>_more(self.target_of, room * 8)
        self.parent_of = <uint64_t *>_more(self.parent_of, room * 8)
        self.next_of = <uint64_t *>_more(self.next_of, room * 8)
        self.live_of = <uint64_t *>_more(self.live_of, room * 8)
        self.end_of = <uint64_t *>_more(self.end_of, room * 8)
        self.contents_of = <frt_contents **>_more(<void *>self.contents_of, room * sizeof(frt_contents *))
        self.room = room
        return 0

    cdef uint64_t find(self, uint64_t ref) noexcept nogil:
        """The root of a reference's class."""
        while self.parent_of[ref] != ref:
            self.parent_of[ref] = self.parent_of[self.parent_of[ref]]
            ref = self.parent_of[ref]
        return ref

    cdef int seen(self, uint64_t ref) noexcept nogil:
        """OK for a live reference, else what is wrong with it."""
        if ref >= self.length:
            return UNKNOWN_REF
        return FREED_REF if self.count_of[ref] == NIL else OK

    cdef int increment_all(self, const uint64_t *refs, Py_ssize_t n, uint64_t *bad) noexcept nogil:
        cdef uint64_t *counts = self.count_of
        cdef uint64_t length = self.length, r, count
        cdef Py_ssize_t i
        for i in range(n):
            if i + AHEAD < n:
                prefetch(counts + refs[i + AHEAD])
            r = refs[i]
            count = counts[r] if r < length else NIL
            if count == NIL:
                bad[0] = r
                break
            counts[r] = count + 1
            if count == 0 and self.hold_of[r] == 0:
                self.live_of[self.find(r)] += 1
        else:
            return OK
        for i in range(i):
            r = refs[i]
            counts[r] -= 1
            if counts[r] == 0 and self.hold_of[r] == 0:
                self.live_of[self.find(r)] -= 1
        return self.seen(bad[0])

    cdef int decrement_all(
        self, const uint64_t *refs, Py_ssize_t n, uint64_t *zeros, uint64_t *head, uint64_t *bad
    ) noexcept nogil:
        cdef uint64_t *counts = self.count_of
        cdef uint64_t length = self.length, r, count
        cdef Py_ssize_t i, zero_count = 0
        for i in range(n):
            if i + AHEAD < n:
                prefetch(counts + refs[i + AHEAD])
            r = refs[i]
            count = counts[r] if r < length else NIL
            if count - 1 >= NIL - 1:  # 0 or NIL
                bad[0] = r
                break
            counts[r] = count - 1
            if count == 1 and self.hold_of[r] == 0:
                zeros[zero_count] = r
                zero_count += 1
        else:
            head[0] = self.drop(zeros, zero_count)
            return OK
        for i in range(i):
            counts[refs[i]] += 1
        return BELOW_ZERO if self.seen(bad[0]) == OK else self.seen(bad[0])

    cdef uint64_t drop(self, uint64_t *zeros, Py_ssize_t n) noexcept nogil:
        """References have lost their last count and hold: deallocate every class that has no live member left.

        Returns the first of the chain of deallocated references, NIL when there are none.
        """
        cdef uint64_t root, ref, last, end, stack = NIL, head = NIL, tail = NIL
        cdef Py_ssize_t i
        for i in range(n):
            root = self.find(zeros[i])
            self.live_of[root] -= 1
            if self.live_of[root] == 0:
                self.live_of[root], stack = stack, root
        while stack != NIL:
            root = stack
            stack, self.live_of[root] = self.live_of[root], 0
            end = ref = self.end_of[root]
            while True:
                self.count_of[ref] = NIL
                self.freed_count += 1
                last, ref = ref, self.next_of[ref]
                if ref == end:
                    break
            self.next_of[last] = NIL
            if tail == NIL:
                head = end
            else:
                self.next_of[tail] = end
            tail, ref = last, end
            while ref != NIL:
                if self.contents_of[ref] != NULL:
                    stack = self.drop_contents(ref, stack)
                ref = self.next_of[ref]
        return head

    cdef uint64_t drop_contents(self, uint64_t ref, uint64_t stack) noexcept nogil:
        """Decrement what a deallocated reference contained; returns the stack with the classes that die of it."""
        cdef frt_contents *held = self.contents_of[ref]
        cdef uint64_t i, inner, root
        for i in range(held.count):
            inner = held.refs[i]
            if self.count_of[inner] == NIL or self.count_of[inner] == 0:
                self.dangling_count += 1
                continue
            self.count_of[inner] -= 1
            if self.count_of[inner] == 0 and self.hold_of[inner] == 0:
                root = self.find(inner)
                self.live_of[root] -= 1
                if self.live_of[root] == 0:
                    self.live_of[root], stack = stack, root
        free(held)
        self.contents_of[ref] = NULL
        return stack

    cdef int contain_all(self, uint64_t ref, const uint64_t *refs, Py_ssize_t n, uint64_t *bad) noexcept nogil:
        cdef Py_ssize_t i
        cdef int failed = self.seen(ref)
        if failed == OK and self.contents_of[ref] != NULL:
            failed = FULL
        if failed != OK or n == 0:
            return failed
        for i in range(n):
            failed = self.seen(refs[i])
            if failed == OK and self.count_of[refs[i]] == 0:
                failed = UNCOUNTED
            if failed != OK:
                bad[0] = refs[i]
                return failed
        return self.keep_contents(ref, refs, n)

    cdef int keep_contents(self, uint64_t ref, const uint64_t *refs, Py_ssize_t n) noexcept nogil:
        cdef frt_contents *held = <frt_contents *>malloc((n + 1) * 8)
        if held == NULL:
            return NO_MEMORY
        held.count = n
        if n:
            memcpy(held.refs, refs, n * 8)
        self.contents_of[ref] = held
        return OK

    cdef int merge(self, uint64_t alias, uint64_t target) noexcept nogil:
        """Join the class that ends at `alias` to that of `target`, and take the hold for its producer back."""
        cdef uint64_t below = self.find(alias), above = self.find(target)
        if below == above:
            return CIRCULAR
        self.target_of[alias] = target
        self.parent_of[below] = above
        self.live_of[above] += self.live_of[below]
        self.next_of[below], self.next_of[above] = self.next_of[above], self.next_of[below]
        if self.hold_of[alias] & PENDING:
            self.hold_of[alias] &= ~PENDING
            if self.hold_of[alias] == 0 and self.count_of[alias] == 0:
                self.live_of[above] -= 1  # never the last: the target's class lives
        return OK

    cdef list listed(self, uint64_t head):
        """The chain of deallocated references as a list. Nobody else touches it: the dead are not changed."""
        cdef list found = []
        while head != NIL:
            found.append(head)
            head = self.next_of[head]
        return found


cdef void *_more(void *block, size_t size) except NULL:
    block = realloc(block, size)
    if block == NULL:
        raise MemoryError(f"no memory for a table of references: {size} bytes")
    return block
