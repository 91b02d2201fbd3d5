# cython: language_level=3, freethreading_compatible=True
"""Values in files that processes map: those that found no room in the arena, and spilled ones that find none again.

    RESERVED -> SPILLED(me)      `create`, then `FileWriter.seal`
    PENDING -> SPILLED(me)       `result`, then `FileWriter.seal`
    SPILLED -> RESTORING(me) -> SPILLED(me)      `fetch` or `replace`, then `FileFill.seal`: a remote value's bytes

So a value that finds no room is a spilled one from its beginning, under the rules of `spill`. FRT_ENTRY_FILE is set
before the file exists: the client that frees the entry, or recovers its dead writer, removes the file. The caller
creates the file and gives it its size; `FileWriter.seal` commits when all bytes are written: by `copy` with system
calls, or by those who take the memory through the mapping. The references that the
value contains stay in the arena, alone. A remote value gets FRT_ENTRY_FILE only when all bytes are in the file, because
the flag says that it needs no source; recovery removes the file of an entry that is RESTORING without the flag.

A `MappedPin` needs neither a pin in the arena nor the file's name: the kernel keeps a file's bytes while a process maps
them, also after the file was removed. Then their space is free once the last mapping is gone, or its process.
"""
import os

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer

from fastrt.errors import FastrtError, ObjectStoreFullError

from libc.errno cimport EDQUOT, EINTR, ENOSPC, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from fastrt._core.memory.arena cimport arena_alloc
from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport spill_remove
from fastrt._core.memory.trace cimport *
from fastrt._core.objects.handles cimport Pin, Ref, Writer, frt_copy, ref_use, ref_wrap, writer_contain
from fastrt._core.objects.objects cimport (
    object_discard,
    object_empty,
    object_maybe_delete,
    object_new,
    object_seal_file,
    object_seal_remote,
    object_tell,
)
from fastrt._core.objects.references cimport task_is_mine, task_result
from fastrt._core.objects.remote cimport Fill
from fastrt._core.objects.scalar cimport KIND_SCALARS_END, scalar_read
from fastrt._core.objects.unread_list cimport unread_read

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    int PROT_READ, PROT_WRITE, MAP_SHARED
    void *MAP_FAILED

cdef extern from "<unistd.h>" nogil:
    int close(int)
    ssize_t pwrite(int, const void *, size_t, long)

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int, int, ...)
    int F_DUPFD_CLOEXEC

cdef enum:  # of Linux 5.14; older kernels refuse them, and the pages come one by one
    MADV_POPULATE_READ = 22
    MADV_POPULATE_WRITE = 23
    POPULATE_STEP = 16 << 20

cdef enum:
    WRITE_STEP = 1 << 19  # in one call: the kernel does not let go of the processor in between

cdef enum:
    MAPS_MAX = 2  # reads of a file before the value is restored: a restored value may have to be written again


@cython.no_gc
cdef class Pages:
    """All bytes of a mapped file, for the code that authenticates it."""

    cdef char *data
    cdef Py_ssize_t nbytes
    cdef bint readonly
    cdef object owner

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.nbytes, self.readonly, flags)


cdef Pages _pages(char *data, uint64_t nbytes, bint readonly, owner):
    cdef Pages pages = Pages.__new__(Pages)
    pages.data, pages.nbytes, pages.readonly, pages.owner = data, nbytes, readonly, owner
    return pages


cdef char *_map(int fd, uint64_t nbytes, bint readonly) noexcept nogil:
    """Map a file; NULL when this process has no mapping left."""
    cdef void *pages = mmap(NULL, nbytes, PROT_READ if readonly else PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    return NULL if pages == MAP_FAILED else <char *>pages


cdef void _populate(char *pages, uint64_t nbytes, int advice) noexcept nogil:
    """Fill the page tables of a mapping."""
    cdef uint64_t at = 0
    while at < nbytes and madvise(pages + at, min(nbytes - at, <uint64_t>POPULATE_STEP), advice) == 0:
        at += POPULATE_STEP


# ---- writing ----

@cython.no_gc
cdef class _Output:
    """The file of a value while it is written: by system calls, and through its mapping from when that is asked for.

    Writing 1 GiB takes 0.3 to 0.5 s of CPU by calls, and 2.4 to 3.1 s through a mapping: a call lets the file system
    take many pages at once.
    """

    cdef char *pages
    cdef uint64_t length, before, after
    cdef int fd
    cdef bint populated
    cdef object finish

    def __cinit__(self):
        self.fd = -1

    def __dealloc__(self):
        if self.pages != NULL:
            munmap(self.pages, self.length)
        if self.fd >= 0:
            close(self.fd)

    cdef char *room(self) noexcept:
        """The memory of the value in the mapping."""
        if not self.populated:
            self.populated = True
            with nogil:
                _populate(self.pages, self.length, MADV_POPULATE_WRITE)
        return self.pages + self.before

    cdef int copy(self, Py_ssize_t offset, source) except -1:
        cdef Py_buffer view
        cdef int rc
        cdef uint64_t nbytes = self.length - self.before - self.after
        PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
        try:
            if offset < 0 or offset > nbytes or view.len > nbytes - offset:
                raise ValueError(f"{view.len} bytes at {offset} do not fit into {nbytes}")
            with nogil:
                if self.populated:
                    frt_copy(self.pages + self.before + offset, view.buf, view.len)
                    rc = 0
                else:
                    rc = _write_all(self.fd, <const char *>view.buf, view.len, self.before + offset)
        finally:
            PyBuffer_Release(&view)
        if rc == ENOSPC or rc == EDQUOT:
            raise ObjectStoreFullError(f"no room for a value of {nbytes} bytes in its file: {os.strerror(rc)}")
        if rc:
            raise OSError(rc, f"a value of {nbytes} bytes cannot be written to its file: {os.strerror(rc)}")
        return 0

    cdef int end(self) except -1:
        """Give the whole file to `finish`, and close it."""
        if not self.populated:
            with nogil:
                _populate(self.pages, self.length, MADV_POPULATE_READ)
        self.finish(_pages(self.pages, self.length, False, self))
        self.finish = None
        close(self.fd)
        self.fd = -1
        return 0


cdef _Output _output(int fd, uint64_t before, uint64_t nbytes, uint64_t after, finish):
    """Map a file that is to be written; the arguments are those of `FileWriter.map`."""
    cdef _Output out = _Output.__new__(_Output)
    out.length, out.before, out.after, out.finish = before + nbytes + after, before, after, finish
    out.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3)
    if out.fd < 0:
        raise OSError(errno, os.strerror(errno))
    out.pages = _map(fd, out.length, False)
    if out.pages == NULL:
        raise MemoryError("this process has too many mappings (vm.max_map_count)")
    return out


cdef int _write_all(int fd, const char *data, uint64_t nbytes, uint64_t at) noexcept nogil:
    """Write bytes at a place in a file; return 0, or the error's number."""
    cdef uint64_t done = 0
    cdef ssize_t written
    while done < nbytes:
        written = pwrite(fd, data + done, min(nbytes - done, <uint64_t>WRITE_STEP), at + done)
        if written > 0:
            done += written
        elif written == 0:
            return ENOSPC
        elif errno != EINTR:
            return errno
    return 0


@cython.no_gc
cdef class FileWriter(Writer):
    """A `Writer` whose memory is a file; made by `create` or `result`, usable after `map`."""

    cdef _Output out

    def name(self):
        """The number of the object, which names its file."""
        return self.client.x.entries[self.index].objref

    def map(self, int fd, uint64_t before, uint64_t after, finish):
        """Map the file.

        Args:
            fd: of the file, which has its whole size; the caller closes it.
            before, after: bytes of the file before and after those of the value.
            finish: called with the whole file as a writable buffer before the value is sealed.
        Raises:
            MemoryError: this process has no mapping left.
            OSError: it has no file descriptor left.
        """
        Writer._check_open(self)
        if self.out is not None:
            raise FastrtError("the file is mapped already")
        self.out = _output(fd, before, self.nbytes, after, finish)

    cdef int _check_open(self) except -1:
        Writer._check_open(self)
        if self.out is None:
            raise BufferError("the file is not mapped yet")
        return 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        self._check_open()
        PyBuffer_FillInfo(view, self, self.out.room(), self.nbytes, 0, flags)

    def copy(self, Py_ssize_t offset, source):
        """Copy the bytes of a contiguous buffer to `offset`.

        Raises:
            ValueError: the bytes do not fit.
            ObjectStoreFullError: the disk is full.
            OSError: the file cannot be written.
        """
        self._check_open()
        self.out.copy(offset, source)

    @cython.critical_section
    cpdef object seal(self, refs=()):
        """Make the value immutable and visible; as `Writer.seal`."""
        cdef frt_ctx *x = &self.client.x
        self._check_open()
        self.out.end()
        writer_contain(self, refs)
        self.done = True
        frt_trace_end(x, self.traced)
        a64_add_rlx(&x.sb.mapped_objects, 1)
        a64_add_rlx(&x.sb.mapped_bytes, self.nbytes)
        if self.task >= 0:
            object_seal_remote(x, self.index)
            return None
        object_seal_file(x, self.index)
        return ref_wrap(self.client, self.index)

    def seal_in_place(self):
        """Seal a value without contained references; the mapping stays while this Writer lives."""
        if self.task >= 0 or self.client.x.entries[self.index].nrefs:
            raise BufferError("only a new value without contained references is sealed in place")
        return self.seal()


cdef FileWriter _writer(Client client, uint32_t i, int task, uint64_t nbytes, uint32_t nrefs, uint16_t kind):
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry = x.entries + i
    cdef FileWriter w = FileWriter.__new__(FileWriter)
    cdef int rc = FRT_OK
    if nrefs * sizeof(frt_refslot) > FRT_INLINE_BYTES:
        with nogil:
            rc = arena_alloc(x, nrefs * sizeof(frt_refslot), i + 1, &entry.offset)
        if rc != FRT_OK:
            if task < 0:
                object_discard(x, i)
            check(rc)
    entry.maps = 0
    a8_or_sc(&entry.flags, FRT_ENTRY_FILE)  # from now on the file is removed with the entry
    entry.nrefs, entry.kind = nrefs, kind
    a64_store_rlx(&entry.bytes, nbytes)
    w.client, w.index, w.task, w.nbytes = client, i, task, nbytes
    w.traced = frt_trace_begin(x, FRT_TRACE_PUT, entry.objref, <uint32_t>((nbytes + 1023) >> 10), 0)
    return w


def create(Client client, uint64_t nbytes, uint16_t kind, uint32_t nrefs=0):
    """Begin a new value in a file.

    Args:
        nbytes, kind, nrefs: as for `handles.create`.
    Returns:
        A `FileWriter`.
    Raises:
        ObjectStoreFullError: the table is full, or there is no room for the references.
    """
    client.ensure()
    return _writer(client, check(object_new(&client.x)), -1, nbytes, nrefs, kind)


def result(Client client, uint32_t t, uint32_t k, uint64_t nbytes, uint16_t kind, uint32_t nrefs=0):
    """Begin a task's result in a file; None when it is sealed already. The arguments are those of `handles.result`.

    Raises:
        ObjectStoreFullError: there is no room for the references.
    """
    cdef int i
    client.ensure()
    if not task_is_mine(&client.x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    i = task_result(&client.x, t, k)
    if i < 0:
        return None
    check(object_empty(&client.x, i))
    return _writer(client, i, <int>t, nbytes, nrefs, kind)


@cython.no_gc
cdef class FileFill(Fill):
    """A `Fill` whose memory is a file; made by `fetch`, usable after `map`."""

    cdef _Output out

    def name(self):
        """The number of the object, which names its file."""
        return self.client.x.entries[self.index].objref

    def map(self, int fd, uint64_t before, uint64_t after, finish):
        """Map the file; as `FileWriter.map`."""
        if self.done or self.out is not None:
            raise FastrtError("the file is mapped already")
        self.out = _output(fd, before, self.nbytes, after, finish)

    cdef int _check_open(self) except -1:
        if self.done or self.out is None:
            raise BufferError("the file is not mapped, or sealed already")
        return 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        self._check_open()
        PyBuffer_FillInfo(view, self, self.out.room(), self.nbytes, 0, flags)

    def copy(self, Py_ssize_t offset, source):
        """Copy the bytes of a contiguous buffer to `offset`; as `FileWriter.copy`."""
        self._check_open()
        self.out.copy(offset, source)

    cdef void _abort(self) noexcept:
        spill_remove(&self.client.x, self.client.x.entries[self.index].objref)
        Fill._abort(self)

    @cython.critical_section
    cpdef object seal(self, refs=()):
        """Make the bytes visible; the value is an ordinary one in a file from now on, and needs its source no more."""
        cdef frt_ctx *x = &self.client.x
        cdef uint64_t *state = frt_state(x, self.index)
        self._check_open()
        if refs:
            raise ValueError("a remote value contains no references")
        self.client.ensure()
        self.out.end()
        self.done = True
        if self.replaces:
            x.entries[self.index].kind = self.kind
            a64_store_rlx(&x.entries[self.index].bytes, self.nbytes)
        a64_add_rlx(&x.sb.mapped_objects, 1)
        a64_add_rlx(&x.sb.mapped_bytes, self.nbytes)
        a8_or_sc(&x.entries[self.index].flags, FRT_ENTRY_FILE)
        a8_and_sc(&x.entries[self.index].flags, <uint8_t>~<unsigned>FRT_ENTRY_REMOTE)
        a64_store_sc(state, frt_word(FRT_OBJ_SPILLED, x.me, frt_word_gen(a64_load_sc(state))))  # commit
        object_tell(x, self.index)
        object_maybe_delete(x, self.index)


cdef FileFill _fill(Client client, Ref ref):
    cdef frt_ctx *x = &client.x
    cdef uint64_t *state
    cdef uint64_t word
    cdef FileFill fill
    client.ensure()
    ref_use(client, ref)
    state = frt_state(x, ref.index)
    word = a64_load_sc(state)
    if frt_word_state(word) != FRT_OBJ_SPILLED or a8_load_sc(&x.entries[ref.index].flags) & FRT_ENTRY_FILE or \
            not a64_cas_sc(state, word, frt_word(FRT_OBJ_RESTORING, x.me, frt_word_gen(word))):
        return None
    fill = FileFill.__new__(FileFill)
    fill.client, fill.index, fill.nbytes = client, ref.index, x.entries[ref.index].bytes
    x.entries[ref.index].maps = 0
    return fill


def fetch(Client client, Ref ref):
    """Begin to fetch the bytes of a remote value into a file.

    Returns:
        A `FileFill`; None when the bytes are here, or another client is fetching or dropping them.
    """
    return _fill(client, ref)


def replace(Client client, Ref ref, uint64_t nbytes, uint16_t kind):
    """Begin to fill a remote value whose source is lost with another value, in a file.

    Returns:
        A `FileFill`; None when there is a copy here.
    """
    cdef FileFill fill = _fill(client, ref)
    if fill is not None:
        fill.replaces, fill.nbytes, fill.kind = True, nbytes, kind
    return fill


# ---- reading ----

@cython.no_gc
cdef class MappedPin(Pin):
    """The bytes of a value in a mapped file, exported read-only; made by `map_file`."""

    cdef char *pages
    cdef uint64_t length
    cdef object path
    cdef object identity
    cdef object __weakref__

    def __dealloc__(self):
        if self.pages != NULL:
            munmap(self.pages, self.length)

    def whole(self):
        """All bytes of the file as a read-only buffer."""
        return _pages(self.pages, self.length, True, self)

    def place(self):
        """Where the value lies in the file: its first byte."""
        return <uint64_t>(self.data - self.pages)

    def reopen(self):
        """Open the file again: a descriptor, which the caller closes; -1 when its name is gone."""
        cdef int fd
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return -1
        if _identity(fd) != self.identity:
            os.close(fd)
            return -1
        return fd


cdef tuple _identity(int fd):
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def map_file(int fd, str path, uint64_t before, uint64_t nbytes, uint64_t after):
    """Map a value's file read-only.

    Args:
        fd: of the file, which has its whole size; the caller closes it.
        path: of the file.
        before, nbytes, after: bytes before the value, of the value, and after it.
    Returns:
        A `MappedPin`; None when this process has no mapping left.
    """
    cdef MappedPin pin
    cdef char *pages
    cdef uint64_t length = before + nbytes + after
    if length == 0 or length < nbytes:
        raise ValueError("the file has no bytes")
    pages = _map(fd, length, True)
    if pages == NULL:
        return None
    with nogil:
        _populate(pages, length, MADV_POPULATE_READ)
    pin = MappedPin.__new__(MappedPin)
    pin.pages, pin.length, pin.path, pin.identity = pages, length, path, _identity(fd)
    pin.data, pin.nbytes = pages + before, nbytes
    return pin


def look(Client client, Ref ref):
    """Describe a value whose bytes are only in a file.

    Returns:
        (kind, is_error, bytes, pays): `pays` says whether it was read often enough to be restored, and there may be
        room. None when its bytes are in memory, or on another node.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef uint64_t pages
    cdef int state
    client.ensure()
    ref_use(client, ref)
    entry = x.entries + ref.index
    state = frt_word_state(a64_load_acq(frt_state(x, ref.index)))
    if state != FRT_OBJ_SPILLED and state != FRT_OBJ_RESTORING or not a8_load_sc(&entry.flags) & FRT_ENTRY_FILE:
        return None
    pages = (entry.bytes + FRT_PAGE_BYTES - 1) >> FRT_PAGE_SHIFT
    return (entry.kind, (entry.flags & FRT_ENTRY_ERROR) != 0, entry.bytes,
            state == FRT_OBJ_RESTORING or entry.nrefs == 0 and entry.maps >= MAPS_MAX
            and x.sb.used_pages + pages <= x.pages_max)


def is_restoring(Client client, Ref ref):
    """Whether the value is being restored at this moment."""
    client.ensure()
    ref_use(client, ref)
    return frt_word_state(a64_load_acq(frt_state(&client.x, ref.index))) == FRT_OBJ_RESTORING


def decode(Client client, Ref ref, uint16_t kind, bint is_error, data, bint raw):
    """Make the result of `handles.read` for a value from its file's bytes."""
    cdef Py_buffer view
    if client.x.entries[ref.index].maps < 255:
        client.x.entries[ref.index].maps += 1
    if is_error:
        unread_read(&client.x, ref.index)
    if kind >= KIND_SCALARS_END or raw:
        return kind, is_error, data
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return kind, is_error, scalar_read(kind, <const char *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
