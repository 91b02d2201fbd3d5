from libc.stdint cimport uint64_t


cdef class Chunk:
    cdef readonly uint64_t objref
    cdef readonly uint64_t totalsize
    cdef object body
    cdef const char *data
    cdef Py_ssize_t nbytes
