# cython: language_level=3, freethreading_compatible=True
"""A second mapping of a stored value's bytes, private to this process and writable (mmap(2), MAP_PRIVATE).

A page shows the arena until this process writes to it; then the kernel gives the process a copy of that page. The pin
keeps the value in place until the mapping is removed, because unwritten pages still show the arena.
"""
import mmap as pages_of
import os

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo

from libc.stdint cimport uint64_t

from fastrt._core.objects.handles cimport Pin
from fastrt._core.objects.mapped import MappedPin

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_NORESERVE
    void *MAP_FAILED

cdef uint64_t PAGE_BYTES = pages_of.PAGESIZE


@cython.no_gc
cdef class Private:
    """A private copy of a value's bytes, exported writable through the buffer protocol. Made by `map_private`."""

    cdef Pin pin
    cdef char *pages
    cdef uint64_t before  # bytes of the first page that lie before the value

    def __dealloc__(self):
        if self.pages != NULL:
            munmap(self.pages, self.pin.nbytes + self.before)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.pages == NULL:
            raise TypeError("a Private cannot be made directly; call map_private()")
        PyBuffer_FillInfo(view, self, self.pages + self.before, self.pin.nbytes, 0, flags)


def map_private(Pin pin):
    """Map the bytes of a pinned value copy-on-write.

    Returns:
        A `Private`, which keeps the pin; None when the process has no mapping left (vm.max_map_count), or the file of
        the value was removed.
    """
    cdef Private mine
    cdef int fd
    cdef uint64_t offset, before
    cdef void *pages
    if isinstance(pin, MappedPin):
        offset, fd = pin.place(), pin.reopen()
        if fd < 0:
            return None
    else:
        offset, fd = pin.data - pin.client.x.view, pin.client.x.fd
    before = offset % PAGE_BYTES
    pages = mmap(NULL, pin.nbytes + before, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd,
                 <long>(offset - before))
    if pin.client is None:
        os.close(fd)
    if pages == MAP_FAILED:
        return None
    mine = Private.__new__(Private)
    mine.pin, mine.pages, mine.before = pin, <char *>pages, before
    return mine
