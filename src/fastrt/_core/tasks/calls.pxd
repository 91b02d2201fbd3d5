from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport frt_actor
from fastrt._core.objects.handles cimport Ref

cdef frt_actor *actor_of(Client client, Ref ref) except NULL
