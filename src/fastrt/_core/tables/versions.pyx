# cython: language_level=3, freethreading_compatible=True
"""Versions of a dense table in shared memory: one server writes them into separate slots, others read them in place.

`include/versions.h` describes the memory and names the writer of each field. A reader sees one whole version as long as
it holds it, and the server never waits for readers: it takes another slot. The parts of one table on several servers
can be mapped side by side, as one array.
"""
import fcntl
import os

from fastrt.errors import AttachError

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t
from posix.unistd cimport close, getpid

from fastrt._core.memory.layout cimport a32_add_sc, a32_load_sc, a32_store_sc, a32_sub_sc, a64_load_sc, a64_store_sc

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int PROT_NONE, PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED, MAP_NORESERVE
    void *MAP_FAILED

cdef enum:
    PAGE = 4096
    HEAD = 8192  # FRT_VERSIONS_HEAD_BYTES
    SLOT_COUNT = 16
    READER_COUNT = 63
    RETIRED = 0xff  # FRT_VERSIONS_RETIRED

SLOTS = SLOT_COUNT
READERS = READER_COUNT
cdef int SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


cdef class Versions:
    """One process's mapping of the versions of one server's part of a table."""

    def __cinit__(self):
        self.fd = -1
        self.base = NULL

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.total_bytes)
        if self.fd >= 0:
            close(self.fd)

    @staticmethod
    def create(uint64_t slot_bytes):
        """Make the memory. Slot 0 is current: version number 1, with all bytes zero.

        Args:
            slot_bytes: size of one version, a multiple of a page.
        Raises:
            ValueError: `slot_bytes` is 0 or not a multiple of a page.
        """
        cdef Versions self
        if slot_bytes == 0 or slot_bytes % PAGE:
            raise ValueError(f"a version of {slot_bytes} bytes; it must be a multiple of {PAGE}")
        fd = os.memfd_create("fastrt-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, HEAD + SLOT_COUNT * slot_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            self = Versions._map(fd)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.head.slot_bytes = self.slot_bytes = slot_bytes
        a64_store_sc(&self.head.current, 1 << 8)
        self.head.magic = FRT_VERSIONS_MAGIC
        return self

    @staticmethod
    def attach(int fd):
        """Map memory that `create` made in another process.

        Args:
            fd: its descriptor; the result owns it from now on, or still the caller if this raises.
        Raises:
            AttachError: the memory was not made by a process of this build, or cannot be mapped.
        """
        cdef Versions self
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < HEAD:
            raise AttachError("a table's memory was not made by a server of this fastrt version, or is damaged")
        self = Versions._map(fd)
        self.slot_bytes = self.head.slot_bytes
        if self.head.magic != FRT_VERSIONS_MAGIC or self.slot_bytes == 0 or \
                self.slot_bytes > self.total_bytes or HEAD + SLOT_COUNT * self.slot_bytes != self.total_bytes:
            raise AttachError("a table's memory was not made by a server of this fastrt version, or is damaged")
        self.fd = fd
        return self

    @staticmethod
    cdef Versions _map(int fd):
        """Map memory; its descriptor stays the caller's."""
        cdef Versions self = Versions.__new__(Versions)
        self.total_bytes = os.fstat(fd).st_size
        cdef void *at = mmap(NULL, self.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)
        if at == MAP_FAILED:
            raise AttachError(f"cannot map {self.total_bytes} bytes of a table: raise the address-space limit "
                              "(ulimit -v)")
        self.base = <char *>at
        self.head = <frt_versions *>at
        return self

    # ---- the server's side ----

    @property
    def current(self):
        """The newest version: (slot, number)."""
        cdef uint64_t word = a64_load_sc(&self.head.current)
        return word & 0xff, word >> 8

    def slot(self, int index):
        """The memory of a slot, writable."""
        if not 0 <= index < SLOT_COUNT:
            raise IndexError(f"slot {index} of {SLOT_COUNT}")
        cdef Slot made = Slot.__new__(Slot)
        made.memory, made.slot = self, index
        return made

    def offset(self, int slot):
        """A slot's offset in the memory of the descriptor."""
        return HEAD + slot * self.slot_bytes

    def begin(self):
        """Choose a slot for the next version; -1 if readers have pinned all of them."""
        cdef int slot, reader, current = <int>(a64_load_sc(&self.head.current) & 0xff)
        for slot in range(SLOT_COUNT):
            if slot == current:
                continue
            for reader in range(READER_COUNT):
                if a32_load_sc(&self.head.pins[reader][slot]):
                    break
            else:
                return slot
        return -1

    def publish(self, int slot):
        """Make the contents of a slot from `begin` the newest version; returns its number."""
        cdef uint64_t number = (a64_load_sc(&self.head.current) >> 8) + 1
        a64_store_sc(&self.head.current, number << 8 | <uint64_t>slot)
        return number

    def retire(self):
        """Mark the memory as without further versions; versions that readers have pinned stay valid."""
        a64_store_sc(&self.head.current, a64_load_sc(&self.head.current) | RETIRED)

    def clear(self, int reader):
        """Drop all pins of a reader that is gone."""
        cdef int slot
        for slot in range(SLOT_COUNT):
            a32_store_sc(&self.head.pins[reader][slot], 0)

    # ---- a reader's side ----

    def pinned(self, int reader):
        """How many slots a reader has pinned."""
        cdef int slot, count = 0
        for slot in range(SLOT_COUNT):
            count += a32_load_sc(&self.head.pins[reader][slot]) != 0
        return count

    def held(self):
        """How many slots readers have pinned, without the current one; the server needs one that is not pinned."""
        cdef int slot, reader, count = 0, current = <int>(a64_load_sc(&self.head.current) & 0xff)
        for slot in range(SLOT_COUNT):
            for reader in range(READER_COUNT):
                if slot != current and a32_load_sc(&self.head.pins[reader][slot]):
                    count += 1
                    break
        return count

    def pin(self, int reader):
        """Pin the newest version: it does not change until `unpin`.

        Returns:
            (slot, number); (-1, 0) if the server has retired this memory.
        """
        cdef uint64_t word
        cdef int slot
        if not 0 <= reader < READER_COUNT:
            raise IndexError(f"reader {reader} of {READER_COUNT}")
        while True:
            word = a64_load_sc(&self.head.current)
            slot = <int>(word & 0xff)
            if slot == RETIRED:
                return -1, 0
            if slot >= SLOT_COUNT:
                raise AttachError("a table's memory is damaged")
            a32_add_sc(&self.head.pins[reader][slot], 1)
            if a64_load_sc(&self.head.current) == word:
                return slot, word >> 8
            a32_sub_sc(&self.head.pins[reader][slot], 1)

    def unpin(self, int reader, int slot):
        """Drop one pin."""
        if not (0 <= reader < READER_COUNT and 0 <= slot < SLOT_COUNT):
            raise IndexError(f"slot {slot} of reader {reader}")
        a32_sub_sc(&self.head.pins[reader][slot], 1)


cdef class Slot:
    """The memory of one slot, exported writable through the buffer protocol."""

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory.base + HEAD + self.slot * self.memory.slot_bytes,
                          self.memory.slot_bytes, 0, flags)


cdef class Span:
    """Parts of several descriptors, mapped side by side and read-only.

    Args:
        pieces: (descriptor, offset, bytes) of each; offsets and sizes are multiples of a page.
    Raises:
        ValueError: an offset or size is not a multiple of a page.
        AttachError: the pieces cannot be mapped.
    """

    def __cinit__(self, pieces):
        cdef uint64_t at = 0, offset, nbytes
        cdef int fd
        cdef void *got
        self.base = NULL
        for _, offset, nbytes in pieces:
            if offset % PAGE or nbytes % PAGE or nbytes == 0:
                raise ValueError(f"a piece of {nbytes} bytes at {offset} is not made of pages of {PAGE}")
            at += nbytes
        got = mmap(NULL, at or PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if got == MAP_FAILED:
            raise AttachError(f"cannot map {at} bytes of a table: raise the address-space limit (ulimit -v)")
        self.base, self.nbytes = <char *>got, at
        at = 0
        for fd, offset, nbytes in pieces:
            got = mmap(self.base + at, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, <long>offset)
            if got == MAP_FAILED:
                raise AttachError(f"cannot map {nbytes} bytes of a table")
            at += nbytes

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.nbytes or PAGE)


@cython.no_gc_clear
cdef class PinnedView:
    """The memory of a span, read-only. Its versions do not change as long as a view of it exists.

    Args:
        span: the mapping.
        pins: (memory, reader, slot) of each pin; the view owns the pins from now on.
    """
    cdef Span span
    cdef object pins
    cdef int pid

    def __cinit__(self, Span span not None, pins):
        self.span, self.pins, self.pid = span, list(pins), getpid()

    def __dealloc__(self):
        # A forked child has the parent's view, but does not own its pins.
        if self.pins is not None and self.pid == getpid():  # at the interpreter's end the module `os` is empty
            for memory, reader, slot in self.pins:
                (<Versions>memory).unpin(reader, slot)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.span.base, self.span.nbytes, 1, flags)
