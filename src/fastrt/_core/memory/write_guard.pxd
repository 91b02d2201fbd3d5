from fastrt._core.memory.layout cimport frt_ctx


cdef void guard_add(const frt_ctx *x) noexcept
cdef void guard_remove(const frt_ctx *x) noexcept
