# What one thread needs of the core; see threads.pyx.
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_ctx


cdef class Board:
    cdef uint64_t objrefs[64]
    cdef uint64_t indexes[64]
    cdef uint64_t counts[8]

cdef uint64_t run(frt_ctx *x, Board board, uint32_t seed, uint32_t rounds) noexcept nogil
