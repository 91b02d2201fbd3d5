from libc.stdint cimport uint16_t, uint32_t

from fastrt._core.memory.clients cimport Client


cdef class Fill:
    cdef Client client
    cdef uint32_t index
    cdef char *data
    cdef Py_ssize_t nbytes
    cdef uint16_t kind
    cdef bint replaces, error, done

    cdef void _abort(self) noexcept
