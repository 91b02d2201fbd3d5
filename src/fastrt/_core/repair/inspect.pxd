from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_ctx

cdef object inspect_object(frt_ctx *x, uint32_t i)
cdef object inspect_task(frt_ctx *x, uint32_t t)
