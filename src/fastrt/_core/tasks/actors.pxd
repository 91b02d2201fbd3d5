from libc.stdint cimport uint32_t

from fastrt._core.memory.layout cimport frt_actor, frt_ctx, frt_refslot

cdef int actors_touch(frt_ctx *x) noexcept nogil
cdef frt_refslot actor_object(frt_actor *actor) noexcept nogil
cdef int actor_uncount(frt_ctx *x, frt_actor *actor) noexcept nogil
cdef void actors_of_dead(frt_ctx *x, uint32_t v) noexcept nogil
