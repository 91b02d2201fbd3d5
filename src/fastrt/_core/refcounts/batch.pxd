from libc.stdint cimport uint64_t


cdef enum:
    FEW = 8


cdef class Batch:
    cdef Py_buffer view
    cdef bint held
    cdef const uint64_t *refs
    cdef Py_ssize_t n
    cdef uint64_t few[FEW]  # the references of a list or tuple with up to FEW items
