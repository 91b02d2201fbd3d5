from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client


cdef class Runner:
    cdef readonly list stack
    cdef public bint interruptible, leaving
    cdef public object ends

    cdef Client client
    cdef dict loaded
    cdef list methods
    cdef object prepare, seal, fail, leave
    cdef tuple outputs
    cdef object last_function
    cdef uint64_t last_objref
    cdef object enter_job
    cdef uint64_t job
