from libc.stdint cimport uint8_t, uint32_t

from fastrt._core.memory.layout cimport frt_ctx, frt_entry

cdef uint32_t pages_what(const frt_entry *entry, uint32_t i, const uint8_t *functions) noexcept nogil
cdef uint8_t *pages_functions(frt_ctx *x, uint32_t n) except NULL
