from libc.stdint cimport uint64_t

from fastrt._core.memory.layout cimport frt_ctx, frt_function, a64_load_acq

cdef extern from *:
    """
    #define FRT_FUNCTION_GONE UINT64_MAX /* in place of an objref: the slot's function was swept */
    """
    uint64_t FRT_FUNCTION_GONE

cdef int functions_touch(frt_ctx *x) noexcept nogil
cdef const char *functions_name(frt_ctx *x, uint64_t objref) noexcept nogil

cdef inline bint functions_counts(const frt_function *f) noexcept nogil:
    """Whether a slot of the table holds a function."""
    cdef uint64_t objref = a64_load_acq(&f.objref)
    return objref != 0 and objref != FRT_FUNCTION_GONE
