from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client

cdef extern from "copy.h" nogil:
    void frt_copy(void *, const void *, size_t) noexcept

cdef class Ref:
    cdef Client client
    cdef readonly uint64_t objref
    cdef readonly uint32_t index

cdef class Pin:
    cdef Client client
    cdef uint32_t index
    cdef const char *data
    cdef Py_ssize_t nbytes

cdef class Writer:
    cdef Client client
    cdef uint32_t index
    cdef int task
    cdef bint done
    cdef bint pinned
    cdef uint64_t objref
    cdef char *data
    cdef Py_ssize_t nbytes
    cdef uint64_t traced

    cdef int _check_open(self) except -1
    cpdef object seal(self, refs=*)

cdef int writer_contain(Writer w, refs) except -1
cdef Ref ref_wrap(Client client, uint32_t index)
cdef int ref_use(Client client, Ref ref) except -1
cdef type ref_class()
