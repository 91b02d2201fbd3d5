from fastrt._core.clients cimport Client
from fastrt._core.handles cimport Ref
from fastrt._core.layout cimport frt_actor

cdef frt_actor *actor_of(Client client, Ref ref) except NULL
