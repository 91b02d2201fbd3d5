"""C declarations of the operands: a held buffer."""
from libc.stdint cimport uint64_t

cdef enum:
    BYTES_DTYPE = 255  # elements that can be moved but not reduced


cdef class Held:
    cdef Py_buffer view
    cdef bint held
    cdef int dtype
    cdef int item_bytes
    cdef uint64_t count


cdef Held hold(as_buffer, array, bint writable)
