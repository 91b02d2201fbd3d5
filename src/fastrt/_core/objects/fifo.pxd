from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_lock
from fastrt._core.objects.handles cimport Pin

cdef extern from "fifo.h" nogil:
    ctypedef struct frt_fifo_name:
        uint64_t objref
        uint32_t index

    ctypedef struct frt_fifo_state:
        frt_fifo_name head_in, tail_in
        uint64_t head, tail, nput, ngot

    ctypedef struct frt_fifo:
        uint64_t magic, most
        frt_lock lock
        frt_fifo_state state, plan
        uint32_t valid, closed, puts, getters, gets, putters

    ctypedef struct frt_fifo_segment:
        uint64_t magic, capacity
        frt_fifo_name next
        uint64_t end

    ctypedef struct frt_fifo_head:
        uint32_t bytes, kind


cdef class Fifo:
    cdef Client client
    cdef Pin root
    cdef frt_fifo *q
    cdef list left  # objrefs of segments that this process has drained
    cdef Pin head_pin, tail_pin  # the segments that this process drains and fills
    cdef frt_fifo_name head_in, tail_in

    cdef char *_writable(self, Pin pin) except NULL
    cdef int _lock(self) except -1
    cdef int _follow_segments(self) except -1
    cdef frt_fifo_segment *_segment(self, Pin pin) except NULL
    cdef int _put(self, object value, uint32_t kind, const char *data, Py_ssize_t nbytes) except -1
    cdef int _wait(self, uint32_t *word, uint32_t *sleepers, uint32_t seen, double timeout_s) except -1
