# cython: language_level=3, freethreading_compatible=True
"""Collective operations of the ranks of one node, over their shared memory. Each rank reads directly from all others.

An operation works in rounds of one chunk. In each round a rank copies its part of the input into a staging buffer
(unless the input lies in the group's heap, where others read it in place), posts this, waits until all ranks have
posted, and reads the data for its output from the others' buffers. There are two buffers, so one such meeting per round
is enough: a rank that fills a buffer again has met all others since they read it. The first meeting also checks that
all ranks run the same operation.

all_reduce has a second algorithm for more than two ranks, and for arrays reduced in place in the heap: in each chunk
every rank reduces one slice (reading all inputs), then all copy the slices of the others. Without slices every rank
reads every input; with slices each input is read once, at the cost of a second meeting.

Chunks are 512 KiB: buffers stay in the caches, so main memory sees the input read and the output written, and little
else. Measured with two ranks on an otherwise idle machine, 1 and 4 MiB of float32 in private arrays: 45 and 202 us in
chunks of 32 KiB, 44 and 189 with 256 KiB, 41 and 171 with 512 KiB, 42 and 183 with 1 MiB. When other processes use the
processors, too, each meeting may wait for a time slice, and the number of meetings decides: 64 MiB then take 83, 22 and
17 ms in chunks of 32 KiB, 256 KiB and 1 MiB. Tried and rejected, for 64 MiB in private arrays: reducing in blocks of 8
KiB while the next chunk is prefetched and staged (0.8 of the rate), and going backwards in every other operation, to
begin with the data in the cache (1.0; 1.1 for arrays in the heap, which is within the noise).
"""
from fastrt._core.collective.operands import NAMES as _DTYPES
from fastrt._core.collective.reduce import REDUCTIONS as _REDUCTIONS
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from fastrt._core.collective.groups cimport *
from fastrt._core.collective.operands cimport BYTES_DTYPE, Held, hold
from fastrt._core.collective.reduce cimport *
from fastrt._core.memory.layout cimport (
    a32_load_sc, a32_store_sc, a64_cas_sc, a64_load_acq, a64_load_rlx, a64_load_sc, a64_store_rlx, a64_store_sc,
    a_fence_sc,
)

cdef extern from "turn.h":
    bint frt_turn_enter(uint32_t *) noexcept
    void frt_turn_leave(uint32_t *) noexcept

cdef enum:
    ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, BROADCAST, SCATTER, ALL_TO_ALL, BARRIER, SHARED, KINDS
    AVERAGE = 64  # a sum, divided at the end
    SMALL_BYTES = 1 << 15  # up to this size a copy costs less than a second meeting
    MISMATCH = 100
    NO_REDUCTION = 101
    F_GIVES = 1
    F_IN_PLACE = 2  # the output overwrites an input that others read in place
    F_STAGES = 4

KIND = {
    name: k for k, name in enumerate((
        "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter", "all_to_all",
        "barrier", "all_reduce_shared"))
}
_KINDS = list(KIND)
OPS = {**_REDUCTIONS, "avg": FRT_SUM | AVERAGE}
_OPS = {code: name for name, code in OPS.items()}
cdef object _op_codes = OPS


cdef struct frt_run:
    int kind
    int reduction
    int dtype
    int root
    int item_bytes
    int parts  # the input has this many parts of `count` elements: 1, or one per rank
    bint gives  # this rank has an input
    bint takes  # this rank has an output
    bint staged_any  # some rank's input is staged
    bint direct_any  # some rank's array is read in place
    bint direct_all  # every rank's output can be read in place
    uint64_t count
    uint64_t seq
    uint64_t divisor
    int64_t deadline_ns
    char *source
    char *target
    uint64_t source_offset
    uint64_t target_offset


cdef class Collective(GroupPart):
    """One rank's side of a group's operations within a node. One operation at a time.

    Args:
        memory: this rank's mapping of the group's memory; all ranks are attached.
        timeout: the default time that an operation may wait for other ranks, in seconds.
    """

    cdef readonly int rank
    cdef readonly int world_size
    cdef uint64_t begun  # operations; their numbers begin with 1
    cdef double default_timeout
    cdef uint32_t inside  # a thread is in an operation
    cdef uint32_t queued_count

    def __cinit__(self, GroupMemory memory, double timeout, *_, **__):
        self.rank, self.world_size = memory.rank, memory.world_size
        self.default_timeout = timeout

    @property
    def queued(self):
        """How many operations run in the background, or wait for that."""
        return a32_load_sc(&self.queued_count)

    @queued.setter
    def queued(self, uint32_t count):
        a32_store_sc(&self.queued_count, count)

    # ---- methods that a subclass may override ----

    def as_buffer(self, array, writable):
        """Convert an array that exports no usable buffer: (buffer, dtype name or None).

        Raises:
            TypeError: always, in this base class.
        """
        raise TypeError(f"a contiguous array is needed, not {type(array).__name__}")

    def later(self, async_op, function, *args):
        """Run an operation after those that are queued or running.

        Raises:
            RuntimeError: always, in this base class.
        """
        raise RuntimeError("this group runs no operation in the background")

    def name_of(self, rank):
        """A rank's name in messages."""
        return f"rank {rank}"

    # ---- operations ----

    def barrier(self, *, timeout=None, async_op=False):
        """Wait until all ranks have called this.

        Args:
            timeout: in seconds; the group's by default.
            async_op: return a handle at once.
        Raises:
            CollectiveTimeout: some rank did not come in time.
            CollectiveMismatch: ranks run different operations.
            PeerDied: a rank's process has ended.
        """
        if async_op or a32_load_sc(&self.queued_count):
            return self.later(async_op, self.perform, "barrier", None, None, 0, "sum", timeout)
        self.run(BARRIER, 0, 0, None, None, self.default_timeout if timeout is None else timeout)

    def all_reduce(self, array, op="sum", out=None, *, timeout=None, async_op=False):
        """Combine the arrays of all ranks element by element, in the order of ranks; every rank gets the result.

        Args:
            array: contiguous, of the same type and number of elements on all ranks.
            op: sum, prod, min, max, avg, or band and bor for integers. Integers wrap; their avg rounds towards zero.
            out: an array for the result that does not overlap `array`; by default `array` is overwritten.
            timeout: in seconds; the group's by default.
            async_op: return a handle at once; do not use the arrays until it is done.
        Returns:
            The array that holds the result, or a handle.
        Raises:
            TypeError: the operation is not defined for the type.
            CollectiveTimeout: some rank did not come in time.
            CollectiveMismatch: ranks run different operations.
            PeerDied: a rank's process has ended.
        """
        if async_op or a32_load_sc(&self.queued_count):
            return self.later(async_op, self.perform, "all_reduce", array, out, 0, op, timeout)
        code = _op_codes.get(op)
        if code is None:
            raise ValueError(f"op={op!r}; there are {', '.join(_op_codes)}")
        self.run(ALL_REDUCE, code, 0, array, array if out is None else out,
                 self.default_timeout if timeout is None else timeout)
        return array if out is None else out

    def perform(self, kind, source, target, root, op, timeout):
        """Run an operation of any kind now.

        Args:
            kind: one of KIND.
            source, target: this rank's input and output, or None if it has none.
            root: the rank that gives or takes, for operations that have one.
            op: how to combine.
            timeout: in seconds; None: the group's.
        Returns:
            The array that holds the result; None on a rank without one.
        Raises:
            ValueError: the root or the operation does not exist, or sizes do not fit.
        """
        if op not in OPS:
            raise ValueError(f"op={op!r}; there are {', '.join(OPS)}")
        if not 0 <= root < self.world_size:
            raise ValueError(f"rank {root} in a group of {self.world_size}")
        if kind == "all_reduce" and target is None:
            target = source
        self.run(KIND[kind], OPS[op], root, source, target, self.default_timeout if timeout is None else timeout)
        return target

    @property
    def operations(self):
        """How many operations this rank has begun."""
        return a64_load_rlx(&self.begun)

    # ---- one operation ----

    cdef int run(self, int kind, int reduction, int root, source, target, double timeout) except -1:
        self.check_open()
        if not frt_turn_enter(&self.inside):
            raise RuntimeError("another thread is inside an operation of this group: use a group for each thread")
        try:
            return self._run(kind, reduction, root, source, target, timeout)
        finally:
            frt_turn_leave(&self.inside)

    cdef int _run(self, int kind, int reduction, int root, source, target, double timeout) except -1:
        cdef frt_run r
        cdef Held given = None
        cdef Held taken = None
        memset(&r, 0, sizeof(r))
        r.kind, r.reduction, r.root = kind, reduction & ~AVERAGE, root
        r.divisor = self.world_size if reduction & AVERAGE else 1
        r.parts = self.world_size if kind in (REDUCE_SCATTER, SCATTER, ALL_TO_ALL) else 1
        r.dtype = BYTES_DTYPE
        r.item_bytes = 1
        r.deadline_ns = -<int64_t>(min(max(timeout, 1e-9), 1e9) * 1e9)
        if source is not None:
            given = hold(self.as_buffer, source, False)
        if target is source:
            taken = given
        elif target is not None:
            taken = hold(self.as_buffer, target, True)
        if target is source and source is not None and given.view.readonly:
            raise ValueError("the array is read-only: pass another array as out=")
        self._describe(&r, given, taken)
        return self._perform(&r)

    cdef int _describe(self, frt_run *r, source, target) except -1:
        """Fill in the operation from the buffers; raise if they cannot fit, regardless of the other ranks."""
        cdef Held given = source
        cdef Held taken = target
        cdef Held either = given if given is not None else taken
        cdef uint64_t size = self.world_size
        cdef uint64_t taken_parts = size if r.kind in (ALL_GATHER, GATHER, ALL_TO_ALL) else 1
        if given is not None and taken is not None and given.dtype != taken.dtype:
            raise TypeError(f"the input is {_DTYPES[given.dtype]}, the output {_DTYPES[taken.dtype]}")
        if either is not None:
            r.dtype, r.item_bytes = either.dtype, either.item_bytes
        if given is not None:
            if given.count % r.parts:
                raise ValueError(f"{given.count} elements cannot be shared out among {size} ranks")
            r.count = given.count // r.parts
            r.gives, r.source = True, <char *>given.view.buf
        if taken is not None:
            if given is None:
                r.count = taken.count // taken_parts
            if taken.count != r.count * taken_parts:
                raise ValueError(f"the output has {taken.count} elements; there must be {r.count * taken_parts}")
            r.takes, r.target = True, <char *>taken.view.buf
        if r.gives and r.takes and r.source != r.target and r.source < r.target + taken.view.len and \
                r.target < r.source + given.view.len:
            raise ValueError("the output overlaps the input")
        if r.gives and r.takes and r.source == r.target and r.kind not in (ALL_REDUCE, REDUCE, BROADCAST):
            raise ValueError(f"{_KINDS[r.kind]} cannot work in place: pass another array as out=")
        if r.kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER, SHARED) and r.dtype == BYTES_DTYPE:
            raise TypeError("this type cannot be reduced; integers and floats of 16 bits and more can")
        if r.kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER, SHARED) and r.dtype >= FRT_F16 and \
                r.reduction in (FRT_BAND, FRT_BOR):
            raise TypeError(f"there is no {_OPS[r.reduction]} of {_DTYPES[r.dtype]}")
        # Small inputs are always staged: that takes one meeting, reading in place takes two.
        if r.gives and given.view.len > SMALL_BYTES:
            r.source_offset = self.memory.offset_of(r.source, given.view.len)
        if r.takes and (taken.view.len > SMALL_BYTES or r.kind == SHARED):
            r.target_offset = self.memory.offset_of(r.target, taken.view.len)
        return 0

    cdef int _perform(self, frt_run *r) except -1:
        cdef int rc
        r.seq = a64_load_rlx(&self.begun) + 1
        a64_store_rlx(&self.begun, r.seq)
        with nogil:
            rc = self._operate(r)
        if rc != WAIT_MET:
            self._fail(r, rc)
        return 0

    cdef int _operate(self, frt_run *r) noexcept nogil:
        cdef frt_post *post = &self.memory.mine.posts[r.seq & 1]
        cdef int rc
        if a32_load_sc(&self.memory.head.dead):
            return WAIT_DEAD
        if a64_load_sc(&self.memory.head.abandoned) >= r.seq:
            return WAIT_ABANDONED
        post.what = <uint64_t>r.kind | <uint64_t>r.reduction << 8 | <uint64_t>(r.divisor > 1) << 15 | \
            <uint64_t>r.dtype << 16 | <uint64_t>r.root << 24 | <uint64_t>r.item_bytes << 40
        post.count = r.count
        post.source, post.target = r.source_offset, r.target_offset
        post.flags = (F_GIVES if r.gives else 0) | (F_STAGES if r.gives and r.source_offset == 0 else 0) | \
            (F_IN_PLACE if r.source_offset and r.source == r.target else 0)
        self._stage(r, 0, self._chunk(r), 0)
        self._post(r, 0)
        rc = self._wait_all(r, 0)
        if rc == WAIT_MET:
            rc = self._agree(r)
        if rc == WAIT_MET:
            rc = self._slices(r) if self._in_slices(r) else self._rounds(r)
        if rc == WAIT_MET:
            # A rank that gave this operation up and went on may have overwritten data that this rank has read.
            a_fence_sc()
            if a64_load_acq(&self.memory.head.abandoned) >= r.seq:
                rc = WAIT_ABANDONED
        return rc

    cdef uint64_t _chunk(self, frt_run *r) noexcept nogil:
        """How many elements of each part are moved in one round."""
        cdef uint64_t most = self.memory.chunk_bytes // (r.parts * r.item_bytes)
        if most > 64:
            most &= ~<uint64_t>63  # whole cache lines
        return most if most < r.count else r.count

    cdef bint _in_slices(self, frt_run *r) noexcept nogil:
        """Whether an all_reduce works by slices; all ranks decide alike, because they read the same posts."""
        cdef int q
        cdef frt_post *post
        cdef bint in_place = False
        r.direct_all = True
        for q in range(self.world_size):
            post = &self.memory.ranks[q].posts[r.seq & 1]
            r.staged_any |= (post.flags & F_STAGES) != 0
            r.direct_any |= post.source != 0 or post.target != 0
            r.direct_all &= post.target != 0
            in_place |= (post.flags & F_IN_PLACE) != 0
        if r.kind != ALL_REDUCE:
            return r.kind == SHARED  # all ranks have the same output: slices are reduced into it, none is copied
        return in_place or (self.world_size > 2 and r.count * r.item_bytes > SMALL_BYTES)

    cdef int _rounds(self, frt_run *r) noexcept nogil:
        cdef uint64_t chunk = self._chunk(r)
        cdef uint64_t at = 0
        cdef uint64_t step = 0
        cdef uint64_t n
        cdef int rc
        while at < r.count:
            n = chunk if chunk < r.count - at else r.count - at
            if step:
                self._stage(r, at, n, step)
                rc = self._meet(r, step)
                if rc != WAIT_MET:
                    return rc
            rc = self._take(r, at, n, step)
            if rc != WAIT_MET:
                return rc
            at += n
            step += 1
        # The owner of an array that is read in place must wait until all ranks have read it.
        return self._meet(r, step or 1) if r.direct_any else WAIT_MET

    cdef void _stage(self, frt_run *r, uint64_t at, uint64_t count, int step) noexcept nogil:
        """Copy elements [at, at + count) of each part of the input into the staging buffer."""
        cdef char *to = self.memory.staging(self.rank, r.seq & 1, step)
        cdef int k
        if r.gives and r.source_offset == 0:
            for k in range(r.parts):
                memcpy(to + k * count * r.item_bytes, r.source + (k * r.count + at) * r.item_bytes,
                       count * r.item_bytes)

    cdef const char *_input(self, frt_run *r, int rank, int part, uint64_t at, int step) noexcept nogil:
        """The address, in this round, of element `at` of a part of a rank's input."""
        cdef uint64_t chunk = self._chunk(r)
        cdef uint64_t place
        if rank == self.rank:
            return r.source + (part * r.count + at) * r.item_bytes
        place = self.memory.ranks[rank].posts[r.seq & 1].source
        if place:
            return self.memory.base + place + (part * r.count + at) * r.item_bytes
        if r.count - at < chunk:
            chunk = r.count - at
        return self.memory.staging(rank, r.seq & 1, step) + part * chunk * r.item_bytes

    cdef int _take(self, frt_run *r, uint64_t at, uint64_t count, int step) noexcept nogil:
        """Compute elements [at, at + count) of the output from the inputs of all ranks."""
        cdef const void *sources[256]
        cdef uint64_t nbytes = count * r.item_bytes
        cdef char *to = r.target + at * r.item_bytes
        cdef int q
        if not r.takes:
            return WAIT_MET
        if r.kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER, SHARED):
            for q in range(self.world_size):
                sources[q] = self._input(r, q, self.rank if r.parts > 1 else 0, at, step)
            if reduce_into(r.reduction, r.dtype, to, sources, self.world_size, count, <uint32_t>r.divisor) < 0:
                return NO_REDUCTION
        elif r.kind == BROADCAST or r.kind == SCATTER:
            if r.root != self.rank or r.kind == SCATTER:
                memcpy(to, self._input(r, r.root, self.rank if r.parts > 1 else 0, at, step), nbytes)
        else:
            for q in range(self.world_size):
                memcpy(to + q * r.count * r.item_bytes,
                       self._input(r, q, self.rank if r.parts > 1 else 0, at, step), nbytes)
        return WAIT_MET

    cdef int _slices(self, frt_run *r) noexcept nogil:
        """Run all_reduce by slices: each rank reduces its slice of every chunk and copies the others' slices.

        If all arrays lie in the heap, a rank reduces its slice of the next chunk before it waits for the others'
        slices of this one: a rank that is late by less than a chunk delays no other. (With staging, this would need
        three buffers.)
        """
        cdef uint64_t chunk = self._chunk(r)
        cdef uint64_t at = 0
        cdef uint64_t step = 0
        cdef uint64_t n, before = 0
        cdef bint ahead = r.direct_all and not r.staged_any
        cdef int rc
        cdef int buffer = 0
        while at < r.count:
            n = chunk if chunk < r.count - at else r.count - at
            if at and r.staged_any:
                step += 1
                self._stage(r, at, n, buffer)
                rc = self._meet(r, step)
                if rc != WAIT_MET:
                    return rc
            if self._reduce_slice(r, at, n, buffer) < 0:
                return NO_REDUCTION
            step += 1
            self._post(r, step)
            if at or not ahead:
                rc = self._wait_all(r, step - 1 if ahead else step)
                if rc != WAIT_MET:
                    return rc
                if ahead:
                    self._copy_slices(r, before, at - before, 0)
                else:
                    self._copy_slices(r, at, n, buffer)
            before = at
            at += n
            buffer ^= 1
        if ahead:
            rc = self._wait_all(r, step)
            if rc != WAIT_MET:
                return rc
            self._copy_slices(r, before, r.count - before, 0)
        return self._meet(r, step + 1) if r.direct_any else WAIT_MET

    cdef uint64_t _slice_begin(self, uint64_t count, int rank) noexcept nogil:
        """The first element of a rank's slice of `count` elements: slices are as equal as multiples of 64 allow."""
        cdef uint64_t cut
        if rank == self.world_size:
            return count
        cut = count * rank // self.world_size
        return cut & ~<uint64_t>63 if count >= <uint64_t>128 * self.world_size else cut

    cdef char *_slice_of(self, frt_run *r, int rank, uint64_t at, uint64_t begin, int buffer) noexcept nogil:
        """The address of a rank's reduced slice of this chunk: in its output if that lies in the heap, else staged."""
        cdef uint64_t place = self.memory.ranks[rank].posts[r.seq & 1].target
        if place:
            return self.memory.base + place + (at + begin) * r.item_bytes
        return self.memory.staging(rank, r.seq & 1, buffer) + begin * r.item_bytes

    cdef int _reduce_slice(self, frt_run *r, uint64_t at, uint64_t count, int buffer) noexcept nogil:
        cdef const void *sources[256]
        cdef uint64_t begin = self._slice_begin(count, self.rank)
        cdef uint64_t end = self._slice_begin(count, self.rank + 1)
        cdef int q
        for q in range(self.world_size):
            sources[q] = self._input(r, q, 0, at + begin, buffer)
            if q != self.rank and not self.memory.ranks[q].posts[r.seq & 1].source:
                sources[q] = self.memory.staging(q, r.seq & 1, buffer) + begin * r.item_bytes
        return reduce_into(r.reduction, r.dtype, self._slice_of(r, self.rank, at, begin, buffer), sources,
                           self.world_size, end - begin, <uint32_t>r.divisor)

    cdef void _copy_slices(self, frt_run *r, uint64_t at, uint64_t count, int buffer) noexcept nogil:
        cdef uint64_t begin, end
        cdef char *to
        cdef char *made
        cdef int k, q
        for k in range(self.world_size):
            q = (self.rank + k) % self.world_size  # so that not all ranks read from the same one at a time
            begin = self._slice_begin(count, q)
            end = self._slice_begin(count, q + 1)
            to = r.target + (at + begin) * r.item_bytes
            made = self._slice_of(r, q, at, begin, buffer)
            if made != to:
                memcpy(to, made, (end - begin) * r.item_bytes)

    # ---- meeting the others ----

    cdef void _post(self, frt_run *r, uint64_t step) noexcept nogil:
        a64_store_sc(&self.memory.mine.posts[r.seq & 1].stamp, r.seq << FRT_STEP_BITS | step)
        if a32_load_sc(&self.memory.head.sleepers):
            self.memory.wake_all()

    cdef int _wait_all(self, frt_run *r, uint64_t step) noexcept nogil:
        cdef uint64_t stamp = r.seq << FRT_STEP_BITS | step
        cdef int k, q, rc
        cdef const uint64_t *word
        for k in range(1, self.world_size):
            q = (self.rank + k) % self.world_size
            word = &self.memory.ranks[q].posts[r.seq & 1].stamp
            if a64_load_acq(word) < stamp:
                rc = self.memory.wait(word, stamp, q, r.seq, &r.deadline_ns)
                if rc != WAIT_MET:
                    return rc
        return WAIT_MET

    cdef int _meet(self, frt_run *r, uint64_t step) noexcept nogil:
        self._post(r, step)
        return self._wait_all(r, step)

    cdef int _agree(self, frt_run *r) noexcept nogil:
        """Whether all ranks run the same operation: WAIT_MET, MISMATCH, or WAIT_ABANDONED if a rank is past it."""
        cdef frt_post *mine = &self.memory.mine.posts[r.seq & 1]
        cdef frt_post *post
        cdef int q
        for q in range(self.world_size):
            post = &self.memory.ranks[q].posts[r.seq & 1]
            if post.stamp >> FRT_STEP_BITS != r.seq:
                return WAIT_ABANDONED
            if post.what != mine.what or post.count != mine.count:
                return MISMATCH
        return WAIT_MET

    # ---- failures ----

    cdef int _fail(self, frt_run *r, int why) except -1:
        """Raise the error that ended the operation. If only this rank knows of it, abandon the operation for all."""
        cdef uint64_t seen
        cdef frt_group *head = self.memory.head
        if why in (WAIT_TIMED_OUT, WAIT_SIGNALLED):
            seen = a64_load_sc(&head.abandoned)
            while seen < r.seq and not a64_cas_sc(&head.abandoned, seen, r.seq):
                seen = a64_load_sc(&head.abandoned)
            self.memory.wake_all()
        name = f"operation {r.seq} ({_KINDS[r.kind]})"
        if why == WAIT_SIGNALLED:
            raise self.memory.take_raised()
        if why == WAIT_DEAD:
            raise self.peer_died()
        if why == WAIT_ABANDONED:
            raise CollectiveTimeout(f"{name} was given up by another rank, after a timeout or an interrupt; "
                                    "no rank may use its result. The next operation is not affected")
        if why == MISMATCH:
            raise CollectiveMismatch(self._mismatch_message(r.seq))
        if why == NO_REDUCTION:
            raise TypeError(f"there is no {_OPS[r.reduction]} of {_DTYPES[r.dtype]}")
        late = [q for q in range(self.world_size)
                if self.memory.ranks[q].posts[r.seq & 1].stamp < self.memory.mine.posts[r.seq & 1].stamp]
        raise CollectiveTimeout(f"{name}: {', '.join(self.name_of(q) for q in late) or 'others'} did not come in time. "
                                "No rank has its result; the next operation is not affected")

    def peer_died(self):
        """Make the error for the rank that is gone."""
        cdef int rank = self.memory.dead_rank()
        if self.memory.has_left(rank):
            what = "has destroyed its side of the group"
        else:
            what = f"(process {self.memory.ranks[rank].pid}) has ended"
        return PeerDied(f"{self.name_of(rank)} {what}; the others go on with rebuild()", rank)

    def _mismatch_message(self, uint64_t seq):
        """The message for a mismatch: the operation of each rank."""
        cdef frt_post *post
        does = {}
        for q in range(self.world_size):
            post = &self.memory.ranks[q].posts[seq & 1]
            kind = post.what & 255
            text = _KINDS[kind] if kind < KINDS else "an unknown operation"
            if kind != BARRIER:
                text += f" of {post.count} {_DTYPES.get(post.what >> 16 & 255, '?')}"
                if (post.what >> 16 & 255) == BYTES_DTYPE:
                    text += f" items of {post.what >> 40} bytes"
            if kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER, SHARED):
                text += f", {'avg' if post.what >> 15 & 1 else _OPS.get(post.what >> 8 & 127, '?')}"
            if kind in (REDUCE, GATHER, BROADCAST, SCATTER):
                text += f", root {post.what >> 24 & 65535}"
            does.setdefault(text, []).append(q)
        parts = "; ".join(f"{', '.join(self.name_of(q) for q in ranks)}: {text}" for text, ranks in does.items())
        return f"operation {seq} is not the same on all ranks: {parts}"
