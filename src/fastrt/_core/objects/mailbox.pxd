from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.layout cimport frt_actor, frt_ctx

cdef void mailbox_push(frt_ctx *x, frt_actor *actor, uint32_t t) noexcept nogil
cdef void mailbox_wake(frt_ctx *x, frt_actor *actor) noexcept nogil
cdef uint64_t mailbox_take(frt_actor *actor) noexcept nogil
cdef uint64_t mailbox_before(frt_ctx *x, uint64_t cell) noexcept nogil
cdef void mailbox_forget(frt_actor *actor) noexcept nogil
cdef void mailbox_release(frt_ctx *x, uint32_t i) noexcept nogil
