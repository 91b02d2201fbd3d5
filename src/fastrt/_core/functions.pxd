from fastrt._core.layout cimport frt_ctx

cdef int functions_touch(frt_ctx *x) noexcept nogil
