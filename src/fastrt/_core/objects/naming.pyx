# cython: language_level=3, freethreading_compatible=True
"""References that are made of an object's number alone, as a text or a message outside of the store names it."""
cimport cython
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref
from fastrt._core.objects.objects cimport object_acquire

from fastrt.errors import StaleReferenceError


def name_object(Client client, Ref ref, uint64_t objref):
    """Make a reference that names nothing one to an object of this node. This reads the whole table.

    Args:
        ref: such a reference, as its class makes it.
        objref: the object's number.

    Raises:
        StaleReferenceError: this node has no such object, or has none any more.
        ValueError: the reference names an object already.
    """
    cdef uint32_t i
    client.ensure()
    with cython.critical_section(ref):
        if ref.client is not None:
            raise ValueError(f"{ref!r} names an object already")
        for i in range(frt_objects(&client.x)):
            if objref and a64_load_acq(&client.x.entries[i].objref) == objref and \
                    object_acquire(&client.x, i, objref, False) == FRT_OK:
                ref.client, ref.index, ref.objref = client, i, objref
                return
    raise StaleReferenceError(
        f"this node has no object {objref:016x}: a number keeps no object alive, and another node does not find it by "
        "that; pass the reference itself"
    )
