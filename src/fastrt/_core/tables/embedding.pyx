# cython: language_level=3, freethreading_compatible=True
"""Rows of float32 under 64-bit keys, in shared memory: one server makes and changes them, other processes look them up.

`include/rows.h` describes the memory and names the writer of each field. A lookup takes no lock and sends no request:
it finds the row in the server's hash table and copies it, or reports the key as missing; the caller then asks the
server. All functions check their arguments before they change anything, and values from shared memory before they use
them.
"""
import fcntl
import os

from fastrt.errors import AttachError, ObjectStoreFullError

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.unistd cimport close

from fastrt._core.memory.layout cimport (
    a32_load_acq, a32_load_rlx, a32_store_rel, a32_store_rlx, a64_add_rlx, a64_load_acq, a64_load_rlx, a64_store_rel,
    a64_store_rlx, a_fence_acq, a_fence_rel, a_relax,
)

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_NORESERVE, MADV_HUGEPAGE, MADV_REMOVE
    void *MAP_FAILED

cdef extern from "pthread.h" nogil:
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_destroy(pthread_mutex_t *)

cdef extern from "turn.h":
    void frt_turn_take(pthread_mutex_t *) noexcept
    void frt_turn_give(pthread_mutex_t *) noexcept

cdef extern from * nogil:
    """
    static inline void frt_fetch(const void *at) { __builtin_prefetch(at, 0, 3); }
    """
    void frt_fetch(const void *)

cdef enum:
    PART_COUNT = 256
    AHEAD = 16        # keys whose memory is prefetched before the first of them is needed
    LINE_FLOATS = 16
    TRIES = 20000     # attempts to read a row that is being written, about a millisecond; then it counts as missing
    SERVERS_MAX = 256
    HUGE_FROM = 32 << 20

PARTS = PART_COUNT
ROWS_MAX = FRT_ROWS_MAX
cdef int SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


cdef class _Array:
    """A contiguous buffer with items of a given size, held while a call lasts."""
    cdef Py_buffer view
    cdef bint held
    cdef size_t count

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef _Array take(array, int item_bytes, bint writable, str what):
    cdef _Array made = _Array.__new__(_Array)
    PyObject_GetBuffer(array, &made.view, PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0))
    made.held = True
    if made.view.itemsize != item_bytes:
        raise TypeError(f"{what} must have items of {item_bytes} bytes, not {made.view.itemsize}")
    made.count = made.view.len // item_bytes
    return made


cdef uint64_t page_up(uint64_t nbytes) noexcept nogil:
    return (nbytes + PAGE - 1) & ~<uint64_t>(PAGE - 1)


cdef int64_t search(uint64_t key, const frt_entry_of_row *entries, uint64_t mask, uint64_t rows_max) noexcept nogil:
    """The row of a key, or -1."""
    cdef uint64_t at = frt_mix(key) & mask, _k
    cdef uint32_t row
    for _k in range(mask + 1):
        row = a32_load_acq(&entries[at].row)
        if row == FRT_ROW_NONE:
            return -1
        if row != FRT_ROW_GONE and a64_load_rlx(&entries[at].key) == key:
            return <int64_t>row - 1 if row <= rows_max else -1
        at = (at + 1) & mask
    return -1


cdef bint copy_row(frt_note *note, uint64_t key, const float *values, float *to, size_t dim) noexcept nogil:
    """Copy a consistent row; False if it does not belong, or no longer belongs, to the key."""
    cdef uint32_t seq
    cdef int _k
    for _k in range(TRIES):
        seq = a32_load_acq(&note.seq)
        if seq & 1:
            a_relax()
            continue
        if a64_load_rlx(&note.key) != key:
            return False
        memcpy(to, values, dim * sizeof(float))
        a_fence_acq()
        if a32_load_rlx(&note.seq) == seq:
            return True
    return False


cdef class EmbeddingMemory:
    """One process's mapping of one server's rows. Its buffer has all values: rows_max x dim of float32."""

    def __cinit__(self):
        self.fd = -1
        self.base = NULL
        self.free = []
        pthread_mutex_init(&self.turn, NULL)

    def __dealloc__(self):
        pthread_mutex_destroy(&self.turn)
        if self.base != NULL:
            munmap(self.base, self.total_bytes)
        if self.fd >= 0:
            close(self.fd)

    @staticmethod
    def create(uint32_t dim, uint64_t rows_max, bint tracks_use):
        """Make the memory, without rows. It grows as rows are made; `rows_max` reserves nothing.

        Args:
            dim: float32 values per row.
            rows_max: the most rows at a time.
            tracks_use: whether lookups record when a row was used last.
        Raises:
            ValueError: a number is out of range.
        """
        cdef EmbeddingMemory self = EmbeddingMemory.__new__(EmbeddingMemory)
        if not (1 <= dim <= 1 << 20 and 1 <= rows_max < FRT_ROWS_MAX and dim * rows_max <= <uint64_t>1 << 42):
            raise ValueError(f"{rows_max} rows of {dim} values cannot be made; the limits are {FRT_ROWS_MAX - 1} rows "
                             f"of {1 << 20} values, and 16 TiB")
        self.place(rows_max, dim)
        fd = os.memfd_create("fastrt-embedding", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            self._map(fd)
        except BaseException:
            os.close(fd)
            raise
        self.is_server = True
        self.head.rows_max, self.head.dim, self.head.tracks_use = rows_max, dim, tracks_use
        self.head.index, self.head.clock = BITS_MIN, 1
        self.head.magic = FRT_ROWS_MAGIC
        return self

    @staticmethod
    def attach(int fd):
        """Map memory that `create` made in another process.

        Args:
            fd: its descriptor; the result owns it from now on, or still the caller if this raises.
        Raises:
            AttachError: the memory was not made by a process of this build, or cannot be mapped.
        """
        cdef EmbeddingMemory self = EmbeddingMemory.__new__(EmbeddingMemory)
        cdef frt_rows head
        refused = AttachError("an embedding's memory was not made by a server of this fastrt version, or is damaged")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < HEAD:
            raise refused
        raw = os.pread(fd, sizeof(head), 0)
        memcpy(&head, <const char *>raw, sizeof(head))
        if head.magic != FRT_ROWS_MAGIC or not (1 <= head.dim <= 1 << 20 and 1 <= head.rows_max < FRT_ROWS_MAX):
            raise refused
        self.place(head.rows_max, head.dim)
        if self.total_bytes != <uint64_t>os.fstat(fd).st_size:
            raise refused
        self._map(fd)
        return self

    cdef void place(self, uint64_t rows_max, uint32_t dim) noexcept:
        """Compute the size of the mapping and of its parts."""
        self.rows_max, self.dim = rows_max, dim
        self.bits_max = BITS_MIN
        while <uint64_t>1 << self.bits_max < 2 * rows_max:
            self.bits_max += 1
        self.shape[0], self.strides[0] = rows_max * dim, sizeof(float)
        # The places of all index sizes up to 2^bits together take less than twice the two places of the largest.
        self.total_bytes = HEAD + page_up(rows_max * sizeof(frt_note)) + page_up(rows_max * dim * sizeof(float)) + \
            4 * sizeof(frt_entry_of_row) * (<uint64_t>1 << self.bits_max)

    def _map(self, int fd):
        cdef void *at = mmap(NULL, self.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)
        if at == MAP_FAILED:
            raise AttachError(f"cannot map {self.total_bytes} bytes of an embedding: raise the address-space limit "
                              "(ulimit -v), or name a smaller capacity")
        self.fd = fd
        self.base = <char *>at
        self.head = <frt_rows *>at
        self.notes = <frt_note *>(self.base + HEAD)
        self.values = <float *>(self.base + HEAD + page_up(self.rows_max * sizeof(frt_note)))
        self.indexes = <char *>self.values + page_up(self.rows_max * self.dim * sizeof(float))
        self.ask_for_huge_pages(<char *>self.notes, <char *>self.values)
        self.ask_for_huge_pages(<char *>self.values, self.indexes)
        self.ask_for_huge_pages(self.indexes, self.base + self.total_bytes)

    cdef void ask_for_huge_pages(self, char *begin, char *end) noexcept nogil:
        """Ask for huge pages after the first 32 MiB: rows are allocated one after the other, so each page fills up."""
        if <uint64_t>(end - begin) > HUGE_FROM:
            madvise(begin + HUGE_FROM, end - begin - HUGE_FROM, MADV_HUGEPAGE)  # fails on a kernel without them

    cdef frt_entry_of_row *index(self, uint64_t word) noexcept nogil:
        """The entries of the index that a word of `head.index` names; NULL if the word is not valid."""
        cdef int bits = <int>(word & 0xff)
        if bits < BITS_MIN or bits > self.bits_max or word >> 9:
            return NULL
        # Before it lie two places of each smaller size: 2^(bits + 1) - 2^(BITS_MIN + 1) entries in all.
        cdef uint64_t before = (<uint64_t>2 << bits) - (<uint64_t>2 << BITS_MIN)
        return <frt_entry_of_row *>self.indexes + before + ((word >> 8) << bits)

    cdef void enter(self, uint64_t key, uint32_t row, frt_entry_of_row *entries, uint64_t mask) noexcept nogil:
        """Add a key, which must not be in the index, with its row; the index has room."""
        cdef uint64_t at = frt_mix(key) & mask
        while entries[at].row != FRT_ROW_NONE and entries[at].row != FRT_ROW_GONE:
            at = (at + 1) & mask
        if entries[at].row == FRT_ROW_GONE:
            self.tombs -= 1
        a64_store_rlx(&entries[at].key, key)
        a32_store_rel(&entries[at].row, row + 1)

    cdef void describe(self, frt_mapped *mapped) noexcept nogil:
        """Fill in the addresses for a lookup; `head` stays NULL if the index is not valid."""
        cdef uint64_t word = a64_load_acq(&self.head.index)
        mapped.entries = self.index(word)
        if mapped.entries != NULL:
            mapped.mask = (<uint64_t>1 << (word & 0xff)) - 1
            mapped.head, mapped.notes, mapped.values = self.head, self.notes, self.values
            mapped.rows_max = self.rows_max

    # ---- the server's side ----

    def find(self, keys, rows):
        """Write the row of each key, or -1 (int64); returns how many are missing."""
        cdef _Array k = take(keys, 8, False, "keys"), r = take(rows, 8, True, "rows")
        cdef uint64_t word, mask, i, missing = 0
        cdef frt_entry_of_row *entries
        cdef const uint64_t *key = <const uint64_t *>k.view.buf
        cdef int64_t *row = <int64_t *>r.view.buf
        frt_turn_take(&self.turn)  # a new index frees the old one
        word = a64_load_acq(&self.head.index)
        entries = self.index(word)
        if k.count != r.count or entries == NULL:
            frt_turn_give(&self.turn)
            raise ValueError(f"{k.count} keys and {r.count} rows")
        mask = (<uint64_t>1 << (word & 0xff)) - 1
        with nogil:
            for i in range(k.count):
                if i + AHEAD < k.count:
                    frt_fetch(entries + (frt_mix(key[i + AHEAD]) & mask))
                row[i] = search(key[i], entries, mask, self.rows_max)
                missing += row[i] < 0
        frt_turn_give(&self.turn)
        return missing

    def insert(self, keys, values, rows):
        """Make rows for keys that have none, each named once, and write the rows' numbers (int64).

        Raises:
            ObjectStoreFullError: there are not enough rows left; none was made.
        """
        cdef _Array k = take(keys, 8, False, "keys"), v = take(values, 4, False, "values")
        cdef _Array r = take(rows, 8, True, "rows")
        cdef const uint64_t *key = <const uint64_t *>k.view.buf
        cdef const float *value = <const float *>v.view.buf
        cdef int64_t *row = <int64_t *>r.view.buf
        cdef uint64_t i, word, mask, at, count
        cdef frt_note *note
        if not self.is_server or r.count != k.count or v.count != k.count * self.dim:
            raise ValueError(f"{k.count} keys, {r.count} rows and {v.count} values of {self.dim}")
        frt_turn_take(&self.turn)
        if not self.make_room(k.count):
            count = self.count
            frt_turn_give(&self.turn)
            raise ObjectStoreFullError(f"an embedding with {count} of at most {self.rows_max} rows has no room "
                                       f"for {k.count} more: evict some, or make it with a larger capacity")
        word = self.head.index
        mask = (<uint64_t>1 << (word & 0xff)) - 1
        for i in range(k.count):
            if self.free:
                at = self.free.pop()
            else:
                at = self.rows_used
                self.rows_used += 1
            note = self.notes + at
            a32_store_rel(&note.seq, note.seq | 1)
            a_fence_rel()
            a64_store_rlx(&note.key, key[i])
            memcpy(self.values + at * self.dim, value + i * self.dim, self.dim * sizeof(float))
            a32_store_rlx(&note.used, <uint32_t>a64_load_rlx(&self.head.clock))
            a32_store_rel(&note.seq, note.seq + 1)
            self.enter(key[i], <uint32_t>at, self.index(word), mask)
            self.count += 1
            row[i] = at
        frt_turn_give(&self.turn)

    cdef bint make_room(self, uint64_t more) noexcept:
        """Whether `more` rows are free; makes a new index if the current one is too full for them."""
        cdef uint64_t word = self.head.index, fresh, mask, k
        cdef int bits = <int>(word & 0xff), target = bits
        cdef frt_entry_of_row *old
        cdef frt_entry_of_row *new
        if self.count + more > self.rows_max:
            return False
        while 3 * (<uint64_t>1 << target) < 4 * (self.count + more) + 4:
            target += 1
        target = min(target, self.bits_max)
        if target == bits and 8 * (self.count + more + self.tombs) < 7 * (<uint64_t>1 << bits):
            return True
        fresh = <uint64_t>target | ((word >> 8 & 1) ^ (target == bits)) << 8
        old, new = self.index(word), self.index(fresh)
        mask = (<uint64_t>1 << target) - 1
        self.tombs = 0
        with nogil:
            for k in range(<uint64_t>1 << bits):
                if old[k].row != FRT_ROW_NONE and old[k].row != FRT_ROW_GONE:
                    self.enter(old[k].key, old[k].row - 1, new, mask)
            a64_store_rel(&self.head.index, fresh)
            if bits >= BITS_MIN + 2:
                madvise(old, sizeof(frt_entry_of_row) << bits, MADV_REMOVE)
            else:
                memset(old, 0, sizeof(frt_entry_of_row) << bits)
        return True

    def remove(self, rows):
        """Remove rows (int64, each once) and their keys; the rows can then be used for other keys.

        Raises:
            IndexError: a row has no key, or is given twice; no row was removed.
        """
        cdef _Array r = take(rows, 8, False, "rows")
        cdef const int64_t *row = <const int64_t *>r.view.buf
        cdef uint64_t i, word, mask, at, used
        cdef bint are_known = True
        cdef frt_entry_of_row *entries
        cdef frt_note *note
        if not self.is_server:
            raise ValueError("only the server removes rows")
        are_different = <size_t>len({row[i] for i in range(r.count)}) == r.count
        frt_turn_take(&self.turn)
        word, used = self.head.index, self.rows_used
        mask, entries = (<uint64_t>1 << (word & 0xff)) - 1, self.index(word)
        for i in range(r.count):
            if not 0 <= row[i] < <int64_t>used or \
                    search(self.notes[row[i]].key, entries, mask, self.rows_max) != row[i]:
                are_known = False
                break
        if not (are_known and are_different):
            frt_turn_give(&self.turn)
            if not are_known:
                raise IndexError(f"row {row[i]} of {used} has no key")
            raise IndexError(f"a row is given twice among {r.count} rows to remove")
        for i in range(r.count):
            note = self.notes + row[i]
            at = frt_mix(note.key) & mask
            while entries[at].row != row[i] + 1:
                at = (at + 1) & mask
            a32_store_rel(&entries[at].row, FRT_ROW_GONE)
            a32_store_rel(&note.seq, note.seq | 1)
            a_fence_rel()
            a64_store_rlx(&note.key, ~note.key)
            a32_store_rel(&note.seq, note.seq + 1)
            self.tombs += 1
            self.count -= 1
        frt_turn_give(&self.turn)
        for i in range(r.count):
            self.free.append(row[i])

    def begin(self, rows):
        """Mark rows (int64, each once) as about to change: readers wait for them until `end`."""
        self._bump(rows, 0)

    def end(self, rows):
        """Mark the rows of `begin` as complete again."""
        self._bump(rows, 1)

    def _bump(self, rows, uint32_t odd):
        cdef _Array r = take(rows, 8, False, "rows")
        cdef const int64_t *row = <const int64_t *>r.view.buf
        cdef uint64_t i, used
        cdef bint are_valid = True
        cdef uint32_t tick = <uint32_t>a64_add_rlx(&self.head.clock, 1)
        frt_turn_take(&self.turn)
        used = self.rows_used
        for i in range(r.count):
            if not 0 <= row[i] < <int64_t>used or self.notes[row[i]].seq & 1 != odd:
                are_valid = False
                break
        if are_valid:
            with nogil:
                for i in range(r.count):
                    if i + AHEAD < r.count:
                        frt_fetch(self.notes + row[i + AHEAD])
                        frt_fetch(self.values + row[i + AHEAD] * self.dim)
                    a32_store_rel(&self.notes[row[i]].seq, self.notes[row[i]].seq + 1)
                    a32_store_rlx(&self.notes[row[i]].used, tick)
                a_fence_rel()
        frt_turn_give(&self.turn)
        if not are_valid:
            raise IndexError(f"row {row[i]} of {used} does not exist, or is being changed already")

    def retire(self):
        """Make readers find no row here, so that they ask the server: the rows have moved to another memory."""
        a64_store_rel(&self.head.index, 0)

    def keys_of(self, rows, keys):
        """Write the keys of rows (int64); each of the rows must have a key."""
        cdef _Array r = take(rows, 8, False, "rows"), k = take(keys, 8, True, "keys")
        cdef const int64_t *row = <const int64_t *>r.view.buf
        cdef uint64_t i, used
        cdef bint are_used = True
        if r.count != k.count:
            raise ValueError(f"{r.count} rows and {k.count} keys")
        frt_turn_take(&self.turn)
        used = self.rows_used
        for i in range(r.count):
            if not 0 <= row[i] < <int64_t>used:
                are_used = False
                break
            (<uint64_t *>k.view.buf)[i] = self.notes[row[i]].key
        frt_turn_give(&self.turn)
        if not are_used:
            raise IndexError(f"row {row[i]} of {used} was never used")

    def notes_bytes(self):
        """Copy the notes of all rows that were ever used: key u64, seq u32, used u32 of each."""
        frt_turn_take(&self.turn)
        try:
            return (<char *>self.notes)[:self.rows_used * sizeof(frt_note)]
        finally:
            frt_turn_give(&self.turn)

    def __getbuffer__(self, Py_buffer *view, int flags):
        view.buf, view.obj, view.len = self.values, self, self.shape[0] * sizeof(float)
        view.itemsize, view.readonly, view.ndim = sizeof(float), 0, 1
        view.format = b"f"
        view.shape, view.strides, view.suboffsets, view.internal = self.shape, self.strides, NULL, NULL


def lookup(list memories, bytes owners not None, keys, out, missing):
    """Copy the rows of keys from the mapped memories of several servers, without a request to any server.

    Args:
        memories: the memory of each server, or None if this process has not mapped it; do not change it meanwhile.
        owners: the server of each of PARTS parts.
        keys: 64-bit integers.
        out: float32, a row for each key.
        missing: int64, one place per key: the positions of keys that were not found are written here.
    Returns:
        How many keys were not found.
    Raises:
        ValueError: sizes do not fit.
    """
    cdef EmbeddingMemory memory
    cdef frt_mapped mapped[SERVERS_MAX]
    cdef _Array k = take(keys, 8, False, "keys"), o = take(out, 4, True, "out"), m = take(missing, 8, True, "missing")
    cdef size_t servers = len(memories), i, dim = 0, found
    cdef const uint8_t *owner = owners
    if servers > SERVERS_MAX or len(owners) != PART_COUNT or m.count < k.count:
        raise ValueError(f"{servers} servers, {len(owners)} parts, {m.count} places for {k.count} positions")
    for i in range(servers):
        memory = memories[i]
        mapped[i].head = NULL
        if memory is None:
            continue
        if dim and dim != memory.dim:
            raise ValueError("rows of different sizes")
        dim = memory.dim
        memory.describe(&mapped[i])
        if memory.head.tracks_use:
            a64_add_rlx(&memory.head.clock, 1)
    if dim and o.count != k.count * dim:
        raise ValueError(f"{k.count} rows of {dim} into {o.count} values")
    with nogil:
        found = _lookup(mapped, servers, owner, <const uint64_t *>k.view.buf, k.count, dim, <float *>o.view.buf,
                        <int64_t *>m.view.buf)
    return found


cdef size_t _lookup(const frt_mapped *mapped, size_t servers, const uint8_t *owners, const uint64_t *keys, size_t count,
                    size_t dim, float *out, int64_t *missing) noexcept nogil:
    """Look keys up in blocks, to pay memory latency once per block: prefetch the entries, then the rows, then copy."""
    cdef const frt_mapped *of[AHEAD]
    cdef int64_t rows[AHEAD]
    cdef size_t block, begin, i, n, line, server, found = 0
    cdef size_t lines = min((dim + LINE_FLOATS - 1) // LINE_FLOATS, <size_t>16)
    cdef uint64_t hash
    for block in range((count + AHEAD - 1) // AHEAD):
        begin = block * AHEAD
        n = min(count - begin, <size_t>AHEAD)
        for i in range(n):
            hash = frt_mix(keys[begin + i])
            server = owners[hash >> 56]
            of[i] = mapped + server if server < servers and mapped[server].head != NULL else NULL
            if of[i] != NULL:
                frt_fetch(of[i].entries + (hash & of[i].mask))
        for i in range(n):
            rows[i] = -1
            if of[i] != NULL:
                rows[i] = search(keys[begin + i], of[i].entries, of[i].mask, of[i].rows_max)
            if rows[i] >= 0:
                frt_fetch(of[i].notes + rows[i])
                for line in range(lines):
                    frt_fetch(of[i].values + rows[i] * dim + line * LINE_FLOATS)
        for i in range(n):
            if rows[i] >= 0 and copy_row(of[i].notes + rows[i], keys[begin + i], of[i].values + rows[i] * dim,
                                         out + (begin + i) * dim, dim):
                if of[i].head.tracks_use:
                    a32_store_rlx(&of[i].notes[rows[i]].used, <uint32_t>a64_load_rlx(&of[i].head.clock))
            else:
                missing[found] = begin + i
                found += 1
    return found


def parts_of(keys, parts):
    """Write the part (uint8) that each 64-bit key belongs to."""
    cdef _Array k = take(keys, 8, False, "keys"), p = take(parts, 1, True, "parts")
    cdef const uint64_t *key = <const uint64_t *>k.view.buf
    cdef uint8_t *part = <uint8_t *>p.view.buf
    cdef size_t i
    if k.count != p.count:
        raise ValueError(f"{k.count} keys and {p.count} parts")
    for i in range(k.count):
        part[i] = <uint8_t>(frt_mix(key[i]) >> 56)


def sum_rows(keys, grads, out_keys, out_grads):
    """Add up the rows of equal keys, in their order.

    Args:
        keys: 64-bit integers.
        grads: float32, a row for each key.
        out_keys, out_grads: as large as `keys` and `grads`; keys are written in the order of their first appearance.
    Returns:
        How many different keys there are.
    Raises:
        ValueError: sizes do not fit.
        MemoryError: there is no memory for the table of keys.
    """
    cdef _Array k = take(keys, 8, False, "keys"), g = take(grads, 4, False, "grads")
    cdef _Array ok = take(out_keys, 8, True, "out_keys"), og = take(out_grads, 4, True, "out_grads")
    cdef size_t dim = g.count // k.count if k.count else 0
    cdef uint64_t mask = 15
    cdef uint32_t *table
    cdef size_t found
    if g.count != k.count * dim or ok.count < k.count or og.count < g.count or k.count >= FRT_ROWS_MAX:
        raise ValueError(f"{k.count} keys and {g.count} values into {ok.count} and {og.count}")
    while mask < 2 * k.count:
        mask = 2 * mask + 1
    table = <uint32_t *>calloc(mask + 1, sizeof(uint32_t))
    if table == NULL:
        raise MemoryError()
    with nogil:
        found = _sum(<const uint64_t *>k.view.buf, <const float *>g.view.buf, k.count, dim,
                     <uint64_t *>ok.view.buf, <float *>og.view.buf, table, mask)
    free(table)
    return found


cdef size_t _sum(const uint64_t *keys, const float *grads, size_t count, size_t dim, uint64_t *out_keys,
                 float *out_grads, uint32_t *table, uint64_t mask) noexcept nogil:
    cdef size_t i, j, found = 0
    cdef uint64_t at
    cdef float *to
    for i in range(count):
        at = frt_mix(keys[i]) & mask
        while table[at] and out_keys[table[at] - 1] != keys[i]:
            at = (at + 1) & mask
        if table[at] == 0:
            out_keys[found] = keys[i]
            memcpy(out_grads + found * dim, grads + i * dim, dim * sizeof(float))
            found += 1
            table[at] = <uint32_t>found
        else:
            to = out_grads + (table[at] - 1) * dim
            for j in range(dim):
                to[j] += grads[i * dim + j]
    return found
