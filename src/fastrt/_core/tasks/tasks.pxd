from libc.stdint cimport int8_t, uint8_t, uint16_t, uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_ctx
from fastrt._core.objects.handles cimport Ref

cdef enum:
    ARGS_SCALARS = 1  # a tuple written by scalar.args_write

cpdef int next_task(Client client, double timeout_s, double spin_s) except -100
cpdef bint finish_scalar(Client client, uint32_t t, object value) except -1

cdef object task_submit(Client client, Ref function, uint16_t kind, const char *args, uint32_t nbytes, list refs,
                        uint32_t ndeps, uint32_t nreturns, uint8_t retries, uint8_t flags, int8_t priority,
                        uint8_t hops)
cdef uint32_t task_start(frt_ctx *x, uint32_t t) noexcept nogil
cdef void task_requeue(frt_ctx *x, uint32_t t) noexcept nogil
