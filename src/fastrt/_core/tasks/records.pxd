from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport FRT_KIND_TOOL, a32_store_rlx, a64_store_rlx, frt_ctx, frt_refslot

cdef frt_refslot *task_slots(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_record(frt_ctx *x, uint32_t nreturns, uint32_t nrefs, uint32_t nbytes) noexcept nogil
cdef void task_forget(frt_ctx *x, uint32_t t) noexcept nogil
cdef void task_announce(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_fill(Client client, uint64_t id, uint64_t function, uint32_t function_index, uint16_t kind,
                   const char *args, uint32_t nbytes, list refs, uint32_t nreturns, uint8_t retries,
                   uint8_t flags) except -1
cdef int task_let_go(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_done(frt_ctx *x, uint32_t t) noexcept nogil
cdef bint task_results_sealed(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_priority(frt_ctx *x, uint32_t t) noexcept nogil
cdef bint task_is_cancelled(frt_ctx *x, uint32_t t) noexcept nogil
cdef int task_mark_cancelled(frt_ctx *x, uint32_t t, uint64_t word, uint32_t how) noexcept nogil


cdef inline void task_works_on(frt_ctx *x, uint32_t t) noexcept nogil:
    """Note that this client works on task `t`. What a worker submits then belongs to the task's job.

    An uplink keeps its own job. It forwards the tasks that it claims, and what it submits comes from other nodes.
    """
    a32_store_rlx(&x.clients[x.me].task, t + 1)
    if x.clients[x.me].kind != <uint32_t>FRT_KIND_TOOL:
        a64_store_rlx(&x.clients[x.me].job, x.tasks[t].job)
