from libc.stdint cimport uint8_t, uint16_t, uint32_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_actor
from fastrt._core.objects.handles cimport Ref

cdef frt_actor *actor_of(Client client, Ref ref) except NULL
cdef object call_make(Client client, Ref ref, uint32_t method, uint16_t kind, const char *args, uint32_t nbytes,
                      list refs, uint32_t ndeps, uint32_t nreturns, uint8_t retries, uint8_t flags)
