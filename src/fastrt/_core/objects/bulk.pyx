# cython: language_level=3, freethreading_compatible=True
"""Many small objects in one call: pin them to send them, or make and seal them on arrival.

For one object, the functions of `handles` cost Python some microseconds, as much as moving 64 KiB. The functions here
take the same steps, so a death at any step leaves the same state; but there is one Python call for all objects.
"""
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Pin, Ref, Writer, ref_use, ref_wrap
from fastrt._core.objects.objects cimport *
from fastrt._core.objects.unread_list cimport unread_read

cdef enum:
    MANY = 64

MANY_MAX = MANY


def pin_many(Client client, list refs, uint64_t bytes_max, uint64_t total_max):
    """Pin the encoded bytes of small sealed values.

    Args:
        refs: Refs, or None to skip a place.
        bytes_max: most bytes of one value.
        total_max: most bytes of all pinned values together.
    Returns:
        For each, as `handles.read` with `raw`: (kind, is_error, pin); None for a value that exceeds a limit, is not
        ready, is not in memory, or contains references.
    Raises:
        StaleReferenceError: a reference belongs to an ended session.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef const char *data
    cdef uint64_t nbytes
    cdef Ref ref
    cdef Pin pin
    cdef list found = []
    client.ensure()
    for one in refs:
        found.append(None)
        if one is None:
            continue
        ref = one
        ref_use(client, ref)
        entry = x.entries + ref.index
        if not object_is_sealed(x, ref.index) or entry.nrefs or entry.bytes > bytes_max or entry.bytes > total_max:
            continue
        if object_acquire(x, ref.index, ref.objref, True) != FRT_OK:
            continue
        pin = Pin.__new__(Pin)
        pin.client, pin.index = client, ref.index
        data = object_view(x, ref.index, &nbytes)
        if data == NULL:
            check(FRT_CORRUPT)
        a32_store_rlx(&entry.used, x.sb.clock)
        if entry.flags & FRT_ENTRY_ERROR:
            unread_read(x, ref.index)
        pin.data, pin.nbytes = data, nbytes
        total_max -= nbytes
        found[len(found) - 1] = (entry.kind, (entry.flags & FRT_ENTRY_ERROR) != 0, pin)
    return found


cdef int _make_room(frt_ctx *x, int count, const uint64_t *sizes, const int *made, char **rooms) noexcept nogil:
    """Give new entries room for their bytes. Returns how many fit."""
    cdef int k, rc = FRT_OK
    for k in range(count):
        rooms[k] = object_room(x, made[k], sizes[k], 0, &rc)
        if rooms[k] == NULL:
            return k
    return count


def create_many(Client client, list specs):
    """Allocate memory for new values that contain no references.

    Args:
        specs: (nbytes, kind, is_error) of each, as for `handles.create`; at most MANY_MAX.
    Returns:
        A `Writer` for each, in order, for as many values as fit without spilling.
    Raises:
        ValueError: there are more than MANY_MAX specs.
    """
    cdef uint64_t sizes[MANY]
    cdef uint16_t kinds[MANY]
    cdef bint errors[MANY]
    cdef int entries[MANY]
    cdef char *rooms[MANY]
    cdef int k, made, count = len(specs)
    cdef Writer w
    cdef list writers = []
    client.ensure()
    if count > MANY:
        raise ValueError(f"{count} values in one call; at most {MANY}")
    for k in range(count):
        sizes[k], kinds[k], errors[k] = specs[k]
    for k in range(count):
        entries[k] = object_new(&client.x)
        if entries[k] < 0:
            count = k
            break
    with nogil:  # the store may grow here, and the kernel commits memory at 1 GB/s
        made = _make_room(&client.x, count, sizes, entries, rooms)
    for k in range(made, count):
        object_discard(&client.x, entries[k])
    for k in range(made):
        w = Writer.__new__(Writer)
        client.x.entries[entries[k]].kind = kinds[k]
        if errors[k]:
            client.x.entries[entries[k]].flags |= FRT_ENTRY_ERROR
        w.data, w.nbytes, w.task, w.index, w.client = rooms[k], sizes[k], -1, <uint32_t>entries[k], client
        writers.append(w)
    return writers


def seal_many(list writers):
    """Make values of `create_many` immutable and visible.

    Returns:
        A Ref to each.
    Raises:
        BufferError: one of them is sealed already; those before it are sealed, too.
    """
    cdef Writer w
    cdef list refs = []
    for one in writers:
        w = one
        w._check_open()
        check(object_contain(&w.client.x, w.index))
        w.done = True
        object_seal_new(&w.client.x, w.index)
        refs.append(ref_wrap(w.client, w.index))
    return refs
