# cython: language_level=3, freethreading_compatible=True
"""The scheduler's reference counts: references numbered from 0 without gaps, their aliases and contents.

An alias and its target are in one class. The canonical reference of a class is the end of its chain of aliases, known
once that reference is ready. A class lives while any member has a count (by a client) or a hold (by the scheduler: one
for a pending producer, one per delivery in flight). When no member has one, all members are deallocated at once. Then
the references that they contained are decremented, which may deallocate further classes. The classes to deallocate are
linked through the dead entries: depth and length cost no stack and no memory.

Dead references are forgotten: when all references of a block are deallocated, the block is freed, and one that stands
for any dead block takes its place. Their numbers are never used again.

A batch of changes is applied completely or not at all. Large batches release the GIL. The table's lock is held over C
code, and while numbers are added to a list, but never while another object is made: that may run a finalizer that calls
this table again. Where Python has no GIL, reads take the lock, too.

Invariants: the fields of all references exist; chains of aliases end, and only their ends may be
ready; the members of a class are in one ring and die together; a dead reference never lives again; a living class has a
living member.

Source: the scheduler of early Ray (ray-legacy, `reference_counts_` and the code around it), with two later repairs:
an object is not deallocated while its producer is pending, or while it is being delivered to a store.
"""
from array import array

from fastrt.errors import ReferenceCountError

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from fastrt._core.refcounts.batch cimport Batch

cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size)

cdef extern from "pthread.h" nogil:
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_destroy(pthread_mutex_t *)

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void *) noexcept nogil

cdef enum:
    # A smaller batch takes less time than releasing the GIL and taking it again.
    GIL_FREE_MIN = 2048
    # Counts are prefetched this far ahead: in random order each lies far from the previous one.
    AHEAD = 24
    NOT_YET = -1
    OK, UNKNOWN_REF, FREED_REF, BELOW_ZERO, ALIASED, READY, CIRCULAR, FULL, UNCOUNTED, NO_HOLD, NO_MEMORY

UNKNOWN = NIL
FREED = NIL

# Stands for each block whose references are all dead. Nothing writes to it.
cdef frt_ref *FORGOTTEN = <frt_ref *>aligned_alloc(sizeof(frt_ref), sizeof(frt_ref) << BLOCK_BITS)
if FORGOTTEN == NULL:
    raise MemoryError("no memory for a table of references")
memset(FORGOTTEN, 0, sizeof(frt_ref) << BLOCK_BITS)
for _index in range(1 << BLOCK_BITS):
    FORGOTTEN[<uint64_t>_index].count = FORGOTTEN[<uint64_t>_index].target = NIL

_KINDS = ("", "unknown", "freed", "negative", "aliased", "ready", "circular", "contained", "uncounted", "negative")
_WORDS = (
    "",
    "Reference {0} is unknown: this table has {1} references, numbered from 0.",
    "Reference {0} is deallocated: its counts reached zero. Increment a reference before its last count is dropped.",
    "Reference {0} has no counts left to drop. Each decrement must match an increment, or the first count.",
    "Reference {0} is an alias of {2} already; an alias cannot change.",
    "Reference {0} is an object of its own already, and cannot become an alias.",
    "Reference {0} would become an alias of itself.",
    "Reference {0} has its contents already; name all contained references in one call.",
    "Reference {0} is named as contained but has no count. Increment contained references before naming them.",
    "Reference {0} has no hold to release.",
)


cdef class RefTable:
    """Counts, aliases and contents of references. Several threads may use it.

    Raises:
        ReferenceCountError: a change is not valid; every changing method raises it, and then changes nothing.
    """

    def __cinit__(self):
        pthread_mutex_init(&self.lock, NULL)

    def __dealloc__(self):
        cdef uint64_t r, i
        for r in range(self.block_count):
            if self.blocks[r] != FORGOTTEN:
                for i in range(min(<uint64_t>1 << BLOCK_BITS, self.length - (r << BLOCK_BITS))):
                    free(self.blocks[r][i].contents)
                free(self.blocks[r])
        free(<void *>self.blocks)
        free(self.block_alive)
        pthread_mutex_destroy(&self.lock)

    def __len__(self):
        """How many references were ever made in this table."""
        return self.read(&self.length)

    @property
    def alive(self):
        """How many references are not deallocated."""
        return self.alive_count()

    cpdef uint64_t alive_count(self) noexcept:
        """How many references are not deallocated, for compiled callers."""
        enter_read(self)
        cdef uint64_t count = self.length - self.freed_count
        leave_read(self)
        return count

    @property
    def dangling(self):
        """How often a deallocated object contained a reference without a count: an error of a client."""
        return self.read(&self.dangling_count)

    cpdef uint64_t add(self, uint64_t n=1, uint64_t count=1, bint pending=True) except? 0:
        """Make references; returns the first.

        Args:
            n: how many, with consecutive numbers.
            count: the initial count of each.
            pending: hold each until it is ready, becomes an alias, or is abandoned.
        Raises:
            ValueError: `count` is 0 and `pending` is False, so they would be deallocated at once; or a number is too
                large.
        """
        cdef uint64_t first, r
        cdef frt_ref *made
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
            made = ref_at(self, r)
            made.count, made.hold, made.live, made.contents = count, PENDING if pending else 0, 1, NULL
            made.target, made.parent, made.next, made.end = NIL, r, r, r
            self.block_alive[r >> BLOCK_BITS] += 1
        self.length = first + n
        leave(self)
        return first

    cpdef increment(self, refs):
        """Increment the count of each reference, once per occurrence in `refs`.

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
        self.checked(failed, bad)

    cpdef list decrement(self, refs):
        """Decrement the count of each reference, once per occurrence in `refs`.

        Returns:
            All references that this has deallocated, class after class, each from the end of its aliases on.
        """
        cdef Batch batch = Batch(refs)
        cdef uint64_t bad = 0, head = NIL
        cdef int failed
        cdef list found = []
        cdef uint64_t *zeros = <uint64_t *>malloc(max(batch.n, 1) * sizeof(uint64_t))
        if zeros == NULL:
            raise MemoryError(f"no memory to drop {batch.n} references")
        enter(self)
        if batch.n < GIL_FREE_MIN:
            failed = self.decrement_all(batch.refs, batch.n, zeros, &head, &bad)
        else:
            with nogil:
                failed = self.decrement_all(batch.refs, batch.n, zeros, &head, &bad)
        free(zeros)
        return self.listed(failed, bad, head, found)

    cpdef hold(self, uint64_t ref):
        """Keep a reference alive while it is being delivered."""
        cdef frt_ref *at
        enter(self)
        cdef int failed = self.seen(ref)
        if failed == OK:
            at = ref_at(self, ref)
            if at.count == 0 and at.hold == 0:
                ref_at(self, self.find(ref)).live += 1
            at.hold += 1
        self.checked(failed, ref)

    cpdef list release(self, uint64_t ref):
        """End one `hold`; returns the deallocated references, as `decrement` does."""
        cdef list found = []
        enter(self)
        cdef uint64_t head = NIL
        cdef int failed = self.seen(ref)
        if failed == OK and ref_at(self, ref).hold & ~PENDING == 0:
            failed = NO_HOLD
        if failed == OK:
            ref_at(self, ref).hold -= 1
            if ref_at(self, ref).hold == 0 and ref_at(self, ref).count == 0:
                head = self.drop(&ref, 1)
        return self.listed(failed, ref, head, found)

    cpdef list ready(self, uint64_t ref):
        """Mark a reference as ready: its object exists, so it is canonical and its producer is no longer pending.

        Returns:
            The deallocated references, as `decrement` does: among them this one if it has no count.
        """
        cdef list found = []
        enter(self)
        cdef uint64_t head = NIL
        cdef int failed = self.seen(ref)
        if failed == OK and ref_at(self, ref).target != NIL and ref_at(self, ref).target != ref:
            failed = ALIASED
        if failed == OK:
            ref_at(self, ref).target = ref
            if ref_at(self, ref).hold & PENDING:
                ref_at(self, ref).hold &= ~PENDING
                if ref_at(self, ref).hold == 0 and ref_at(self, ref).count == 0:
                    head = self.drop(&ref, 1)
        return self.listed(failed, ref, head, found)

    def abandon(self, uint64_t ref):
        """Mark a reference as without a pending producer. It may still become ready later.

        Returns:
            The deallocated references, as `decrement` does.
        """
        cdef list found = []
        enter(self)
        cdef uint64_t head = NIL
        cdef int failed = self.seen(ref)
        if failed == OK and ref_at(self, ref).hold & PENDING:
            ref_at(self, ref).hold &= ~PENDING
            if ref_at(self, ref).hold == 0 and ref_at(self, ref).count == 0:
                head = self.drop(&ref, 1)
        return self.listed(failed, ref, head, found)

    def alias(self, uint64_t alias, uint64_t target):
        """Make a reference an alias of another one. It must be neither ready nor an alias; the target may be either."""
        enter(self)
        cdef uint64_t bad = alias
        cdef int failed = self.seen(alias)
        if failed == OK:
            failed = self.seen(target)
            if failed != OK:
                bad = target
            elif ref_at(self, alias).target == alias:
                failed = READY
            elif ref_at(self, alias).target != NIL:
                failed = ALIASED
            else:
                failed = self.merge(alias, target)
        self.checked(failed, bad)

    def contain(self, uint64_t ref, refs):
        """Set the references that an object contains; they are decremented when the object is deallocated.

        Args:
            ref: the container.
            refs: the contained references, as for `increment`; the caller has incremented each of them for this.
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
        """The reference of the object that this one means, as `canonical_of`; None while it is not known."""
        cdef int64_t end = self.canonical_of(ref)
        return None if end == NOT_YET else end

    cpdef int64_t canonical_of(self, uint64_t ref) except? -2:
        """The reference of the object that this one means; -1 while it is not known.

        Raises:
            ReferenceCountError: the reference is unknown or deallocated.
        """
        enter(self)
        cdef uint64_t end = NIL
        cdef int failed = self.seen(ref)
        if failed == OK:
            end = ref_at(self, ref_at(self, self.find(ref)).end).target
        self.checked(failed, ref)
        return NOT_YET if end == NIL else <int64_t>end

    cpdef uint64_t end(self, uint64_t ref) except? 0:
        """The end of this reference's chain of aliases, ready or not; the reference itself if it is no alias.

        Raises:
            ReferenceCountError: the reference is unknown or deallocated.
        """
        enter(self)
        cdef uint64_t end = NIL
        cdef int failed = self.seen(ref)
        if failed == OK:
            end = ref_at(self, self.find(ref)).end
        self.checked(failed, ref)
        return end

    cpdef bint is_alive(self, uint64_t ref) except -1:
        """Whether the reference exists and is not deallocated."""
        enter_read(self)
        cdef bint is_alive = ref < self.length and ref_at(self, ref).count != NIL
        leave_read(self)
        return is_alive

    cpdef bint is_pending(self, uint64_t ref) except -1:
        """Whether the reference has a pending producer."""
        enter_read(self)
        cdef bint is_pending = ref < self.length and ref_at(self, ref).count != NIL and \
            ref_at(self, ref).hold & PENDING != 0
        leave_read(self)
        return is_pending

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
            found.append(m)  # under the lock: making an int starts no garbage collection, so no finalizer runs
            m = ref_at(self, m).next
            if m == ref:
                break
        self.checked(failed, ref)
        return found

    def contained(self, uint64_t ref):
        """The references from `contain`; empty once this reference is deallocated."""
        cdef frt_contents *held
        cdef uint64_t i
        cdef list found = []
        enter_read(self)
        held = ref_at(self, ref).contents if ref < self.length else NULL
        if held != NULL:
            for i in range(held.count):
                found.append(held.refs[i])
        leave_read(self)
        return found

    def count(self, uint64_t ref):
        """The count of one reference; `FREED` once it is deallocated.

        Raises:
            ReferenceCountError: the reference is unknown.
        """
        enter_read(self)
        cdef int failed = self.seen(ref)
        cdef uint64_t count = ref_at(self, ref).count if failed != UNKNOWN_REF else NIL
        leave_read(self)
        if failed == UNKNOWN_REF:
            self.fail(failed, ref)
        return count

    def counts(self, uint64_t first=0):
        """Copy the counts from reference `first` on as array('Q'); `FREED` where deallocated. They include no holds."""
        return self.copied(first, False)

    def targets(self, uint64_t first=0):
        """Copy the targets from reference `first` on as array('Q'): the reference itself if canonical, `UNKNOWN` if its
        target is not known or it is forgotten.
        """
        return self.copied(first, True)

    cdef copied(self, uint64_t first, bint are_targets):
        cdef uint64_t r
        enter(self)
        first = min(first, self.length)
        cdef bytes data = PyBytes_FromStringAndSize(NULL, (self.length - first) * 8)
        for r in range(first, self.length):
            (<uint64_t *>PyBytes_AS_STRING(data))[r - first] = \
                ref_at(self, r).target if are_targets else ref_at(self, r).count
        leave(self)
        return array("Q", data)

    def alive_before(self, uint64_t first):
        """The live references below `first`, in order, each as (reference, count, target)."""
        cdef uint64_t r = 0, count, target
        cdef bint is_dead
        cdef list found = []
        first = min(first, <uint64_t>len(self))
        while r < first:
            enter_read(self)
            count, target = ref_at(self, r).count, ref_at(self, r).target
            is_dead = self.block_alive[r >> BLOCK_BITS] == 0
            leave_read(self)  # a tuple is made below
            if count != NIL:
                found.append((r, count, target))
            r = ((r >> BLOCK_BITS) + 1) << BLOCK_BITS if is_dead else r + 1
        return found

    @property
    def kept(self):
        """For how many references there is memory: the live ones, and the dead ones that are not forgotten."""
        cdef uint64_t block, kept = 0
        enter_read(self)
        for block in range(self.block_count):
            kept += self.is_kept(block)
        leave_read(self)
        return kept << BLOCK_BITS

    cdef uint64_t read(self, const uint64_t *word) noexcept:
        enter_read(self)
        cdef uint64_t value = word[0]
        leave_read(self)
        return value

    cdef int fail(self, int kind, uint64_t ref) except -1:
        """Raise the error of a kind for one reference."""
        enter_read(self)
        cdef uint64_t length = self.length, target = ref_at(self, ref).target if ref < self.length else 0
        leave_read(self)
        raise ReferenceCountError(_WORDS[kind].format(ref, length, target), _KINDS[kind], ref)

    cdef int grow(self, uint64_t wanted) except -1:
        """Make room for `wanted` references. Existing references do not move."""
        cdef uint64_t room = max(self.block_room * 2, 16)
        while self.block_count << BLOCK_BITS < wanted:
            if self.block_count == self.block_room:
                blocks = realloc(<void *>self.blocks, room * sizeof(frt_ref *))
                if blocks == NULL:
                    raise MemoryError(f"no memory for a table of references: {room} blocks")
                self.blocks = <frt_ref **>blocks
                counters = realloc(self.block_alive, room * sizeof(uint32_t))
                if counters == NULL:
                    raise MemoryError(f"no memory for a table of references: {room} blocks")
                self.block_alive, self.block_room, room = <uint32_t *>counters, room, room * 2
            block = aligned_alloc(sizeof(frt_ref), sizeof(frt_ref) << BLOCK_BITS)
            if block == NULL:
                raise MemoryError(f"no memory for a table of references: {sizeof(frt_ref) << BLOCK_BITS} bytes")
            self.blocks[self.block_count] = <frt_ref *>block
            self.block_alive[self.block_count] = 0
            self.block_count += 1
        return 0

    cdef int add_forgotten(self) except -1:
        """Add a block of dead references behind a full one, for a table that is loaded."""
        self.grow(self.length + (<uint64_t>1 << BLOCK_BITS))
        free(self.blocks[self.block_count - 1])
        self.blocks[self.block_count - 1] = FORGOTTEN
        self.length += <uint64_t>1 << BLOCK_BITS
        self.freed_count += <uint64_t>1 << BLOCK_BITS
        return 0

    cdef bint is_kept(self, uint64_t block) noexcept nogil:
        """Whether a block has references of its own, dead or alive."""
        return self.blocks[block] != FORGOTTEN

    cdef int forget(self) noexcept:
        """Free the blocks whose references are all dead. Under the lock: a batch without the GIL may read them."""
        cdef uint64_t block
        self.has_dead_block = False
        for block in range(self.length >> BLOCK_BITS):
            if self.block_alive[block] == 0 and self.blocks[block] != FORGOTTEN:
                free(self.blocks[block])
                self.blocks[block] = FORGOTTEN
        return 0

    cdef uint64_t find(self, uint64_t ref) noexcept nogil:
        """The root of a reference's class."""
        cdef frt_ref *at = ref_at(self, ref)
        while at.parent != ref:
            at.parent = ref_at(self, at.parent).parent
            ref = at.parent
            at = ref_at(self, ref)
        return ref

    cdef int seen(self, uint64_t ref) noexcept nogil:
        """OK for a live reference; else UNKNOWN_REF or FREED_REF."""
        if ref >= self.length:
            return UNKNOWN_REF
        return FREED_REF if ref_at(self, ref).count == NIL else OK

    cdef int increment_all(self, const uint64_t *refs, Py_ssize_t n, uint64_t *bad) noexcept nogil:
        cdef uint64_t length = self.length, r
        cdef frt_ref *at
        cdef Py_ssize_t i
        for i in range(n):
            if i + AHEAD < n and refs[i + AHEAD] < length:
                prefetch(ref_at(self, refs[i + AHEAD]))
            r = refs[i]
            if r >= length or ref_at(self, r).count == NIL:
                bad[0] = r
                break
            at = ref_at(self, r)
            at.count += 1
            if at.count == 1 and at.hold == 0:
                ref_at(self, self.find(r)).live += 1
        else:
            return OK
        for i in range(i):
            at = ref_at(self, refs[i])
            at.count -= 1
            if at.count == 0 and at.hold == 0:
                ref_at(self, self.find(refs[i])).live -= 1
        return self.seen(bad[0])

    cdef int decrement_all(
        self, const uint64_t *refs, Py_ssize_t n, uint64_t *zeros, uint64_t *head, uint64_t *bad
    ) noexcept nogil:
        cdef uint64_t length = self.length, r, count
        cdef frt_ref *at
        cdef Py_ssize_t i, zero_count = 0
        for i in range(n):
            if i + AHEAD < n and refs[i + AHEAD] < length:
                prefetch(ref_at(self, refs[i + AHEAD]))
            r = refs[i]
            count = ref_at(self, r).count if r < length else NIL
            if count - 1 >= NIL - 1:  # 0 or NIL
                bad[0] = r
                break
            at = ref_at(self, r)
            at.count = count - 1
            if count == 1 and at.hold == 0:
                zeros[zero_count] = r
                zero_count += 1
        else:
            head[0] = self.drop(zeros, zero_count)
            return OK
        for i in range(i):
            ref_at(self, refs[i]).count += 1
        return BELOW_ZERO if self.seen(bad[0]) == OK else self.seen(bad[0])

    cdef uint64_t drop(self, uint64_t *zeros, Py_ssize_t n) noexcept nogil:
        """Deallocate every class without a live member, after the references `zeros` lost their last count and hold.

        Returns the first of the chain of deallocated references, NIL when there are none.
        """
        cdef uint64_t root, ref, last, end, stack = NIL, head = NIL, tail = NIL
        cdef Py_ssize_t i
        for i in range(n):
            root = self.find(zeros[i])
            ref_at(self, root).live -= 1
            if ref_at(self, root).live == 0:
                ref_at(self, root).live, stack = stack, root
        while stack != NIL:
            root = stack
            stack, ref_at(self, root).live = ref_at(self, root).live, 0
            end = ref = ref_at(self, root).end
            while True:
                ref_at(self, ref).count = NIL
                self.freed_count += 1
                self.block_alive[ref >> BLOCK_BITS] -= 1
                if self.block_alive[ref >> BLOCK_BITS] == 0:
                    self.has_dead_block = True
                last, ref = ref, ref_at(self, ref).next
                if ref == end:
                    break
            ref_at(self, last).next = NIL
            if tail == NIL:
                head = end
            else:
                ref_at(self, tail).next = end
            tail, ref = last, end
            while ref != NIL:
                if ref_at(self, ref).contents != NULL:
                    stack = self.drop_contents(ref, stack)
                ref = ref_at(self, ref).next
        return head

    cdef uint64_t drop_contents(self, uint64_t ref, uint64_t stack) noexcept nogil:
        """Decrement the contents of a deallocated reference; pushes classes that die by it on the stack, returns it."""
        cdef frt_contents *held = ref_at(self, ref).contents
        cdef uint64_t i, inner, root
        for i in range(held.count):
            inner = held.refs[i]
            if ref_at(self, inner).count == NIL or ref_at(self, inner).count == 0:
                self.dangling_count += 1
                continue
            ref_at(self, inner).count -= 1
            if ref_at(self, inner).count == 0 and ref_at(self, inner).hold == 0:
                root = self.find(inner)
                ref_at(self, root).live -= 1
                if ref_at(self, root).live == 0:
                    ref_at(self, root).live, stack = stack, root
        free(held)
        ref_at(self, ref).contents = NULL
        return stack

    cdef int contain_all(self, uint64_t ref, const uint64_t *refs, Py_ssize_t n, uint64_t *bad) noexcept nogil:
        cdef Py_ssize_t i
        cdef int failed = self.seen(ref)
        if failed == OK and ref_at(self, ref).contents != NULL:
            failed = FULL
        if failed != OK or n == 0:
            return failed
        for i in range(n):
            failed = self.seen(refs[i])
            if failed == OK and ref_at(self, refs[i]).count == 0:
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
        ref_at(self, ref).contents = held
        return OK

    cdef int merge(self, uint64_t alias, uint64_t target) noexcept nogil:
        """Join the class that ends at `alias` to the class of `target`, and drop the hold for its pending producer."""
        cdef uint64_t below = self.find(alias), above = self.find(target)
        if below == above:
            return CIRCULAR
        ref_at(self, alias).target = target
        ref_at(self, below).parent = above
        ref_at(self, above).live += ref_at(self, below).live
        ref_at(self, below).next, ref_at(self, above).next = ref_at(self, above).next, ref_at(self, below).next
        if ref_at(self, alias).hold & PENDING:
            ref_at(self, alias).hold &= ~PENDING
            if ref_at(self, alias).hold == 0 and ref_at(self, alias).count == 0:
                ref_at(self, above).live -= 1  # never to 0: the target's class lives
        return OK

    cdef int checked(self, int failed, uint64_t ref) except -1:
        """Unlock the table; raise the error of a call that failed."""
        leave(self)
        if failed != OK:
            self.fail(failed, ref)
        return 0

    cdef list listed(self, int failed, uint64_t ref, uint64_t head, list found):
        """Append the chain of deallocated references to a list, before another thread can free them; see `checked`."""
        try:
            while head != NIL:
                found.append(head)
                head = ref_at(self, head).next
            if self.has_dead_block:
                self.forget()
        finally:
            self.checked(failed, ref)
        return found
