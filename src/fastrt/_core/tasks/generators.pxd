from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_ctx, frt_stream
from fastrt._core.objects.handles cimport Ref


cdef frt_stream *generator_stream(Client client, Ref stream) except NULL
cdef void generator_tell(frt_ctx *x, uint32_t stream) noexcept nogil


cdef class Producer:
    cdef readonly uint64_t skip
    cdef Client client
    cdef uint32_t task, index
    cdef frt_stream *stream

    cdef int _check(self) except -1
