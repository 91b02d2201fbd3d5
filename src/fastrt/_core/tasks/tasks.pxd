from libc.stdint cimport uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_ctx

cdef enum:
    ARGS_SCALARS = 1  # a tuple written by scalar.args_write

cpdef int next_task(Client client, double timeout_s, double spin_s) except -100
cpdef bint finish_scalar(Client client, uint32_t t, object value) except -1

cdef uint32_t task_start(frt_ctx *x, uint32_t t) noexcept nogil
cdef void task_requeue(frt_ctx *x, uint32_t t) noexcept nogil
