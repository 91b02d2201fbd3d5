from libc.stdint cimport uint16_t

cdef enum:
    KIND_NONE = 0
    KIND_FALSE = 1
    KIND_TRUE = 2
    KIND_INT = 3
    KIND_FLOAT = 4
    KIND_STR = 5
    KIND_BYTES = 6
    KIND_SCALARS_END = 7

cdef Py_ssize_t scalar_size(object value, uint16_t *kind) except -2
cdef int scalar_write(object value, uint16_t kind, char *to, Py_ssize_t nbytes) except -1
cdef object scalar_read(uint16_t kind, const char *data, Py_ssize_t nbytes)
cdef Py_ssize_t args_write(tuple args, type ref_type, char *to, Py_ssize_t room, list refs) except -2
cdef tuple args_read(const char *data, Py_ssize_t nbytes, list refs)
cpdef bint is_plain(object value, int depth=*) except -1
